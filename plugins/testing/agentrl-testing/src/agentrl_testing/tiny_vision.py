"""Tiny vision-language models with random weights, their processors and tokenizers."""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl_testing.tiny_model import tiny_tokenizer

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

VISION_TEMPLATE = """\
{%- macro content_of(message) -%}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content or [] -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
{{ '<|im_start|>system\\n' ~ (content_of(messages[0]) ~ '\\n' if messages[0].role == 'system' else '') ~ 'Tools:' }}
{%- for tool in tools -%}{{ '\\n' ~ (tool | tojson) }}{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
{{- '\\n<tool_response>\\n' ~ content_of(message) ~ '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}
{%- elif not (message.role == 'system' and tools and loop.first) -%}
{{ '<|im_start|>' ~ message.role ~ '\\n' ~ content_of(message) }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n' if message.content or not loop.first }}
{{- '<tool_call>\\n' ~ ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}
{{- '\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{{ '<|im_start|>assistant\\n' if add_generation_prompt }}
"""
"""ChatML with tools and images, as Qwen's vision-language models write it; append-only."""


@dataclass(frozen=True)
class Family:
    """What a family of vision-language models needs to be built small.

    Args:
        model, config: names of its classes in transformers.
        processor, images: names of the classes of its processor and of that of its images.
        placeholder: what a template writes for an image.
        tokens: of the vocabulary, by the names that the processor finds them under, or under their own.
        vision: fields of its vision config.
        size: fields of the processor of its images.
        text: fields of its text config, besides those of :data:`TEXT`.
        whole: fields of its config; a token stands for its id.
        settings: of the processor.
        needs: packages that its processor does not work without.
    """

    model: str
    config: str
    processor: str
    images: str
    placeholder: str
    tokens: dict[str, str]
    vision: dict[str, Any]
    size: dict[str, Any]
    text: dict[str, Any] = field(default_factory=dict)
    whole: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    "bos_token_id": None,
}  # fmt: skip
_SIGLIP = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 7,
}  # fmt: skip
_QWEN_TOKENS = {token: token for token in VISION_TOKENS}
_QWEN_IDS = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>", "tie_word_embeddings": True,
}  # fmt: skip
_QWEN_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
_IDEFICS_TOKENS = {
    token: token
    for token in (
        "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<video>",
        *(f"<row_{row}_col_{column}>" for row in range(1, 3) for column in range(1, 3)),
    )
}  # fmt: skip
_LLAMA4_TOKENS = {
    token: token
    for token in ("<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>",
                  "<|tile_y_separator|>")
}  # fmt: skip

FAMILIES = {
    "qwen2_5_vl": Family(
        "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig", "Qwen2_5_VLProcessor", "Qwen2VLImageProcessorPil",
        "<|vision_start|><|image_pad|><|vision_end|>", _QWEN_TOKENS,
        {**_QWEN_VISION, "fullatt_block_indexes": [1], "window_size": 56},
        {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64}},
        {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}, _QWEN_IDS,
    ),
    "qwen3_vl": Family(
        "Qwen3VLForConditionalGeneration", "Qwen3VLConfig", "Qwen3VLProcessor", "Qwen2VLImageProcessorPil",
        "<|vision_start|><|image_pad|><|vision_end|>", _QWEN_TOKENS,
        {**_QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16, "patch_size": 14},
        {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64}, "patch_size": 14},
        {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True}}, _QWEN_IDS,
    ),
    "gemma3": Family(
        "Gemma3ForConditionalGeneration", "Gemma3Config", "Gemma3Processor", "Gemma3ImageProcessorPil",
        "<start_of_image>",
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        _SIGLIP, {"size": {"height": 28, "width": 28}},
        {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16},
        {"boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>",
         "image_token_index": "<image_soft_token>", "mm_tokens_per_image": 4},
        {"image_seq_length": 4},
    ),
    "gemma4": Family(
        "Gemma4ForConditionalGeneration", "Gemma4Config", "Gemma4Processor", "Gemma4ImageProcessorPil", "<|image|>",
        {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>", "video_token": "<|video|>",
         "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"},
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 2, "head_dim": 16, "patch_size": 16},
        {"patch_size": 16, "max_soft_tokens": 70},
        {"layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0,
         "global_head_dim": 16, "vocab_size_per_layer_input": 16},
        {"image_token_id": "<|image|>", "video_token_id": "<|video|>", "audio_token_id": "<|audio|>",
         "boi_token_id": "<|image>", "eoi_token_id": "<image|>"},
        needs=("torchvision",),
    ),
    "idefics3": Family(
        "Idefics3ForConditionalGeneration", "Idefics3Config", "Idefics3Processor", "Idefics3ImageProcessorPil",
        "<image>", _IDEFICS_TOKENS, _SIGLIP,
        {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}},
        {"model_type": "llama"}, {"image_token_id": "<image>", "tie_word_embeddings": True},
        {"image_seq_len": 4},
    ),
    "smolvlm": Family(
        "SmolVLMForConditionalGeneration", "SmolVLMConfig", "SmolVLMProcessor", "SmolVLMImageProcessorPil",
        "<image>", _IDEFICS_TOKENS, _SIGLIP,
        {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}},
        {"model_type": "llama"}, {"image_token_id": "<image>", "tie_word_embeddings": True},
        {"image_seq_len": 4}, needs=("num2words",),
    ),
    "internvl": Family(
        "InternVLForConditionalGeneration", "InternVLConfig", "InternVLProcessor", "GotOcr2ImageProcessorPil",
        "<IMG_CONTEXT>",
        {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
         "video_token": "<video>"},
        {**_SIGLIP, "layer_scale_init_value": 1.0},
        {"size": {"height": 28, "width": 28}, "crop_to_patches": True, "min_patches": 1, "max_patches": 2},
        {"model_type": "qwen2"}, {"image_token_id": "<IMG_CONTEXT>", "image_seq_length": 4},
        {"image_seq_length": 4},
    ),
    "llama4": Family(
        "Llama4ForConditionalGeneration", "Llama4Config", "Llama4Processor", "Llama4ImageProcessor", "<|image|>",
        _LLAMA4_TOKENS,
        {**_SIGLIP, "intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32,
         "projector_output_dim": 32, "pixel_shuffle_ratio": 0.5},
        {"size": {"height": 28, "width": 28}, "max_patches": 2},
        {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 64, "moe_layers": [],
         "attention_chunk_size": 1024, "attn_temperature_tuning": False},
        {"image_token_index": "<|patch|>", "tie_word_embeddings": True}, {"patch_size": 7},
        needs=("torchvision",),
    ),
}  # fmt: skip
"""By their names in transformers."""


def missing(family: str) -> str:
    """The packages that the processor of a family needs and that are not installed, "" where none is."""
    return ", ".join(name for name in FAMILIES[family].needs if importlib.util.find_spec(name) is None)


def save_tiny_vision_model(
    path: str | Path, *, seed: int = 0, extra_tokens: Sequence[str] = (), family: str = "qwen2_5_vl", **config: Any
) -> str:
    """Save a vision-language model of two layers with random weights, its processor and tokenizer, where
    ``model.path`` can point to. For a Qwen2.5-VL an image of 56 x 56 pixels takes four tokens.

    Args:
        path: a folder, made if it is missing.
        seed: of the weights; torch's global generator is left as it was.
        extra_tokens: texts that shall be one token each.
        family: of :data:`FAMILIES`.
        config: more or other fields of the text config.

    Returns:
        ``path`` as a string.
    """
    import torch
    import transformers

    own = FAMILIES[family]
    tokens = dict.fromkeys(own.tokens.values())
    template = VISION_TEMPLATE.replace(FAMILIES["qwen2_5_vl"].placeholder, own.placeholder)
    tokenizer = tiny_tokenizer(template, extra_tokens=(*tokens, *extra_tokens))
    named = {name: token for name, token in own.tokens.items() if name != token}
    if named:
        tokenizer = type(tokenizer)(
            tokenizer_object=tokenizer.backend_tokenizer, eos_token=tokenizer.eos_token, pad_token=tokenizer.pad_token,
            chat_template=template, clean_up_tokenization_spaces=False, extra_special_tokens=named,
        )  # fmt: skip
    ids = dict(zip(tokens, tokenizer.convert_tokens_to_ids(list(tokens)), strict=True))
    text = {
        **TEXT, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id, **own.text, **config,
    }  # fmt: skip
    if "hidden_size" in config and "head_dim" not in config:
        text["head_dim"] = text["hidden_size"] // text["num_attention_heads"]
    fields = {name: ids.get(value, value) if isinstance(value, str) else value for name, value in own.whole.items()}
    joint = {"out_hidden_size": text["hidden_size"]} if "out_hidden_size" in own.vision else {}
    whole = getattr(transformers, own.config)(text_config=text, vision_config={**own.vision, **joint}, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, own.model)(whole)
        for parameter in model.parameters():
            # Such as the projector of Gemma 3, which would show the same of all images.
            if parameter.dim() > 1 and not parameter.any():
                torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    if missing(family):
        return str(path)
    getattr(transformers, own.images)(**own.size).save_pretrained(path)
    file = Path(path) / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "processor_class": own.processor}, indent=2))
    if own.settings:
        settings = {"processor_class": own.processor, **own.settings}
        (Path(path) / "processor_config.json").write_text(json.dumps(settings, indent=2))
    return str(path)
