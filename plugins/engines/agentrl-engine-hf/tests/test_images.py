"""Families of models with images, whose sampled log-probs are those of one forward over all of a conversation."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from agentrl_core.api import (
    Adapter,
    AdapterSlots,
    ArrayBucket,
    EngineContext,
    EngineError,
    MultiModal,
    SamplingParams,
    TokenOutput,
    WeightUpdate,
    together,
)
from agentrl_core.engine_kit.media import MediaProcessor, opened
from agentrl_engine_hf.config import HFEngineConfig
from agentrl_engine_hf.engine import HFEngine
from agentrl_engine_hf.images import ImageReader, Pictures
from agentrl_testing.contracts.engine_images import picture
from agentrl_testing.tiny_model import tiny_tokenizer
from agentrl_testing.tiny_vision import save_tiny_vision_model

TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "initializer_range": 0.12,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": True,
}  # fmt: skip
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SQUARE = {"image_size": 28, "patch_size": 14}
NAMES = {
    "gemma3": {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    "internvl": {
        "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    "idefics3": {
        "image": "<image>", "fake": "<fake_token_around_image>", "global": "<global-img>", "end": "<end_of_utterance>",
        **{f"tile{row}{column}": f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)},
    },
    "qwen3_vl": {"a": "<|vision_start|>", "b": "<|vision_end|>", "c": "<|image_pad|>", "d": "<|video_pad|>"},
}  # fmt: skip
"""Tokens by the name under which the tokenizer knows them."""


def gemma3(ids: dict[str, int], vocab_size: int) -> tuple[Any, Any, dict[str, Any]]:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    text = {**TEXT, "vocab_size": vocab_size, "sliding_window": 1024, "query_pre_attn_scalar": 16}
    config = Gemma3Config(
        text_config=text, vision_config={**VISION, **SQUARE}, mm_tokens_per_image=4,
        image_token_id=ids["image_token"], boi_token_index=ids["boi_token"], eoi_token_index=ids["eoi_token"],
        tie_word_embeddings=True,
    )  # fmt: skip
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    return Gemma3ForConditionalGeneration(config), images, {"processor_class": "Gemma3Processor", "image_seq_length": 4}


def idefics3(ids: dict[str, int], vocab_size: int) -> tuple[Any, Any, dict[str, Any]]:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    config = Idefics3Config(
        text_config={**TEXT, "model_type": "llama", "vocab_size": vocab_size}, vision_config={**VISION, **SQUARE},
        scale_factor=1, image_token_id=ids["image"], tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip
    images = Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    return (
        Idefics3ForConditionalGeneration(config),
        images,
        {"processor_class": "Idefics3Processor", "image_seq_len": 4},
    )


def internvl(ids: dict[str, int], vocab_size: int) -> tuple[Any, Any, dict[str, Any]]:
    from transformers import InternVLConfig, InternVLForConditionalGeneration
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    vision = {**VISION, "image_size": [28, 28], "patch_size": [14, 14]}
    config = InternVLConfig(
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": vocab_size}, vision_config=vision,
        image_token_id=ids["context_image_token"], image_seq_length=1, tie_word_embeddings=True,
    )  # fmt: skip
    images = GotOcr2ImageProcessorPil(size={"height": 28, "width": 28}, crop_to_patches=True, max_patches=4)
    return (
        InternVLForConditionalGeneration(config),
        images,
        {"processor_class": "InternVLProcessor", "image_seq_length": 1},
    )


def qwen3_vl(ids: dict[str, int], vocab_size: int) -> tuple[Any, Any, dict[str, Any]]:
    from transformers import Qwen2VLImageProcessorPil, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64, "patch_size": 14,
        "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    config = Qwen3VLConfig(
        text_config={**TEXT, "vocab_size": vocab_size, "rope_parameters": rope}, vision_config=vision,
        image_token_id=ids["c"], video_token_id=ids["d"], vision_start_token_id=ids["a"], vision_end_token_id=ids["b"],
        tie_word_embeddings=True,
    )  # fmt: skip
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64}, patch_size=14)
    return Qwen3VLForConditionalGeneration(config), images, {"processor_class": "Qwen3VLProcessor"}


FAMILIES: dict[str, Callable[..., tuple[Any, Any, dict[str, Any]]]] = {
    "gemma3": gemma3, "idefics3": idefics3, "internvl": internvl, "qwen3_vl": qwen3_vl,
}  # fmt: skip


def save(path: Path, family: str) -> str:
    """A tiny model of a family, its tokenizer and its processor."""
    names = NAMES[family]
    tokenizer = tiny_tokenizer(extra_tokens=tuple(names.values()))
    if family in ("gemma3", "internvl"):
        tokenizer._set_model_specific_special_tokens(special_tokens=names)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, images, settings = FAMILIES[family](ids, len(tokenizer))
        # Images would hardly matter with towers as they are initialised.
        for name, parameter in model.named_parameters():
            if "vision" in name or "visual" in name or "connector" in name or "projector" in name:
                torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    images.save_pretrained(path)
    file = path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "processor_class": settings["processor_class"]}))
    (path / "processor_config.json").write_text(json.dumps(settings))
    return str(path)


def expanded(media: MediaProcessor, text: str, *shown: tuple[str, bytes]) -> tuple[list[int], MultiModal]:
    """A prompt of a text with a placeholder for each image."""
    names = tuple(name for name, _ in shown)
    ids = media.processor.tokenizer.encode(media.expanded(text, names), add_special_tokens=False)
    return ids, MultiModal(names, [], dict(shown))


@torch.no_grad()
def reference(
    module: Any, media: MediaProcessor, prompt: list[int], images: MultiModal, output: list[int]
) -> list[float]:
    """In one forward, as transformers prepares it for generation."""
    ids = torch.tensor([prompt + output])
    inputs = media.inputs([opened(images.data[name]) for name in images.images]) if images.images else {}
    types = (ids == module.config.image_token_id).int()
    if images.images and hasattr(module.model, "get_rope_index"):
        inputs["mm_token_type_ids"] = types
    if module.config.model_type == "gemma3":
        inputs["token_type_ids"] = types
    logits = module(input_ids=ids, use_cache=False, **inputs).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(output)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_with_images(tmp_path: Path, family: str, shared: bool) -> None:
    path = save(tmp_path / family, family)
    module = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    media = MediaProcessor.load(path)
    assert media is not None
    place = media.placeholder
    shown = [picture(1, 56, 56), picture(2, 84, 56), picture(3, 56, 112)]
    others = [picture(number, 56, 56) for number in (4, 5)]
    context = EngineContext(
        path, max_model_len=512, max_images=3, reserved_ids=media.reserved, shared_module=module if shared else None
    )

    async def main() -> list[tuple[list[int], MultiModal, TokenOutput]]:
        engine = HFEngine(HFEngineConfig(max_prefill_tokens=24), context)
        await engine.start()
        try:

            async def talk(name: str, *pictures: tuple[str, bytes]) -> list[tuple[list[int], MultiModal, TokenOutput]]:
                turns, text, seen, prompt = [], f"A: {place} b", 0, []
                while seen < len(pictures):
                    more, _ = expanded(media, text, pictures[seen])
                    seen += 1
                    prompt = prompt + more
                    images = MultiModal(tuple(each[0] for each in pictures[:seen]), [], dict(pictures[:seen]))
                    output = await engine.generate(prompt, SamplingParams(8, seed=seen), name, images)
                    turns.append((prompt, images, output))
                    prompt, text = prompt + output.token_ids, f" Another {place}, well?"
                return turns

            text = expanded(media, "No image in here, none at all.")

            async def without_images() -> list[Any]:
                return [(*text, await engine.generate(text[0], SamplingParams(8, seed=1), "plain", text[1]))]

            talks = talk("one", *shown), talk("two", *others), talk("three", others[0]), without_images()
            return [turn for turns in await together(talks) for turn in turns]
        finally:
            await engine.close()

    turns = asyncio.run(main())
    assert getattr(module.model, "rope_deltas", None) is None, "the engine has left its positions on the actor's module"
    for prompt, images, output in turns:
        expected = reference(module, media, prompt, images, output.token_ids)
        assert output.log_probs == pytest.approx(expected, abs=5e-5), f"{family} with {len(images.images)} images"


def test_a_family_that_is_computed_otherwise_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "model", "qwen3_vl")
    # As if the engine did not know of this family's axes.
    placed = ImageReader._placed
    monkeypatch.setattr(ImageReader, "_placed", lambda *prompt: Pictures(placed(*prompt).each))
    engine = HFEngine(HFEngineConfig(), EngineContext(path, max_model_len=512, max_images=1))
    with pytest.raises(EngineError, match=r"model type 'qwen3_vl'.*cannot show it images; its logits differ"):
        asyncio.run(engine.start())


@pytest.mark.parametrize("see_too", [False, True], ids=["language alone", "vision too"])
def test_adapters_leave_the_vision_tower_alone(tmp_path: Path, see_too: bool) -> None:
    # The tower of a Qwen2.5-VL has layers of these names.
    path = save_tiny_vision_model(tmp_path)
    slots = AdapterSlots(("a",), 1, 2, ("gate_proj", "down_proj"))
    engine = HFEngine(HFEngineConfig(), EngineContext(path, max_model_len=512, max_images=1, adapters=slots))
    model = AutoModelForImageTextToText.from_pretrained(path)
    text = set(model.model.language_model.modules())
    layers = {name: part for name, part in model.named_modules() if name.rpartition(".")[2] in slots.targets}
    left_out = [name for name, part in layers.items() if part not in text]
    assert left_out and any("visual" in name for name in left_out)
    fields: dict[str, Any] = {"r": 2, "lora_alpha": 2, "target_modules": list(slots.targets)}
    if not see_too:
        fields["exclude_modules"] = left_out
    shapes = {
        f"base_model.model.{name}.lora_{side}.weight": shape
        for name, part in layers.items() if see_too or name not in left_out
        for side, shape in (("A", (2, part.in_features)), ("B", (part.out_features, 2)))
    }  # fmt: skip

    data = np.ones(sum(a * b for a, b in shapes.values()), np.float32).view(np.uint8)
    bucket = ArrayBucket(tuple(shapes), tuple(shapes.values()), ("float32",) * len(shapes), data)

    async def main() -> None:
        try:
            await engine.start()
            await engine.update_weights(WeightUpdate([bucket], adapter=Adapter("a", fields)), 1)
        finally:
            await engine.close()

    if see_too:
        with pytest.raises(EngineError, match=r"model\.visual\.blocks\.0\.mlp\.gate_proj"):
            asyncio.run(main())
    else:
        asyncio.run(main())
