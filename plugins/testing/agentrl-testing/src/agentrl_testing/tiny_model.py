"""A tokenizer and a model small enough to be made in a test, in milliseconds, offline and with random weights.

save_tiny_model(tmp_path)                                    # a folder for model.path
renderer = HFChatRenderer(tiny_tokenizer())                  # one byte is one token; ChatML with tools
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from agentrl_core.api import RendererContext, ToolParser

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")

CHATML_TEMPLATE = """\
{%- if tools -%}
{{ '<|im_start|>system\\n' ~ (messages[0].content ~ '\\n' if messages[0].role == 'system' else '') ~ 'Tools:' }}
{%- for tool in tools -%}{{ '\\n' ~ (tool | tojson) }}{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
{{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}
{%- elif not (message.role == 'system' and tools and loop.first) -%}
{{ '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content or '') }}
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
"""ChatML as Hermes writes it: tool calls as JSON in tags, consecutive tool messages in one user turn; append-only."""


def tiny_tokenizer(
    chat_template: str | None = CHATML_TEMPLATE,
    *,
    extra_tokens: Sequence[str] = (),
    eos_token: str = "<|im_end|>",
    bos_token: str | None = None,
) -> PreTrainedTokenizerFast:
    """One token per byte, and one for each of :data:`SPECIAL_TOKENS`.

    Args:
        chat_template: Jinja; None for a tokenizer without one.
        extra_tokens: texts that shall be one token each, for templates with other markers.
        eos_token: ends a turn.
        bos_token: what a template's ``bos_token`` stands for.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_tokens([AddedToken(token, special=token.startswith("<|"), normalized=False) for token in SPECIAL_TOKENS])
    bpe.add_tokens([AddedToken(token, special=True, normalized=False) for token in extra_tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=bos_token,
        eos_token=eos_token,
        pad_token="<|endoftext|>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


_CONTROL = re.compile(
    r"<\|[\w/]{1,40}\|?>|<\w{1,40}\|>|<｜[^｜\s]{1,40}｜>|\[/?[A-Z][A-Z_]{2,30}\]|<(?:start|end)_of_turn>|</?s>|<seed:[be]os>|\[e~\["
)


def tokenizer_for(chat_template: str) -> PreTrainedTokenizerFast:
    """:func:`tiny_tokenizer` with one token for each control token that the template of a real model names.

    ``<bos>`` begins a text and ``<eos>`` ends it; what else ends a turn is found from the template.
    """
    tokens = sorted({*_CONTROL.findall(chat_template), "<bos>", "<eos>"} - set(SPECIAL_TOKENS))
    return tiny_tokenizer(chat_template, extra_tokens=tokens, bos_token="<bos>", eos_token="<eos>")


def renderer_context(
    chat_template: str = CHATML_TEMPLATE,
    parser: "ToolParser | None" = None,
    *,
    tokens: Sequence[str] = (),
    stops: Sequence[str] = (),
) -> "RendererContext":
    """What a renderer gets when it is built, over a tiny tokenizer for this chat template.

    Args:
        chat_template: of the model.
        parser: of ``rollout.tool_parser``.
        tokens: further tokens of the vocabulary.
        stops: tokens that ``generation_config.json`` would name.
    """
    from agentrl_core.api import RendererContext
    from agentrl_core.data.chat_template import ChatTemplateRenderer
    from agentrl_core.data.renderer import HFChatRenderer

    plain = chat_template == CHATML_TEMPLATE
    tokenizer = tiny_tokenizer() if plain else tokenizer_for(chat_template)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=token.startswith("<|")) for token in tokens])
    chat = HFChatRenderer(tokenizer)
    chat.model_stops = tuple(tokenizer.convert_tokens_to_ids(list(stops)))
    return RendererContext(chat, tokenizer, parser, base=ChatTemplateRenderer.of(chat, parser))


def save_tiny_model(
    path: str | Path, *, seed: int = 0, tokenizer: PreTrainedTokenizerFast | None = None, **config: Any
) -> str:
    """Save a Qwen3 of two layers with random weights, and its tokenizer, where ``model.path`` can point to.

    Args:
        path: a folder, made if it is missing.
        seed: of the weights; torch's global generator is left as it was.
        tokenizer: :func:`tiny_tokenizer` unless given.
        config: more or other fields of ``Qwen3Config``.

    Returns:
        ``path`` as a string.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = tokenizer or tiny_tokenizer()
    fields: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**{**fields, **config}))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)
