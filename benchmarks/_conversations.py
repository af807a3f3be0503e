"""Requests for the engine benchmarks, made from a seed, and a random model to answer them."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl_testing.tiny_model import tiny_tokenizer

TINY = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32}
LARGE = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "num_attention_heads": 12,
         "head_dim": 64}  # fmt: skip
"""Of 0.1 billion parameters."""


@dataclass(frozen=True)
class Requests:
    """Prompts, and how many tokens each shall get."""

    prompts: list[list[int]]
    max_tokens: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.max_tokens)


def make_model(shape: dict[str, int], vocabulary: int) -> Qwen3ForCausalLM:
    """A random Qwen3 in float32; half as many heads of keys as of queries."""
    torch.manual_seed(0)
    heads = shape["num_attention_heads"]
    config = Qwen3Config(
        **shape, vocab_size=vocabulary, num_key_value_heads=heads // 2, max_position_embeddings=1024,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval().requires_grad_(False)


def save(module: Any, path: Path) -> None:
    """A folder that every engine can load."""
    module.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)


def ragged(count: int, vocabulary: int, prompt: int, mean: int, cap: int) -> Requests:
    """Response lengths are geometric: many short ones, few as long as the cap."""
    rng = random.Random(0)
    prompts = random_prompts(rng, count, vocabulary, prompt)
    lengths = []
    for _ in range(count):
        length = 1
        while length < cap and rng.random() > 1 / mean:
            length += 1
        lengths.append(length)
    return Requests(prompts, lengths)


def random_prompts(rng: random.Random, count: int, vocabulary: int, longest: int) -> list[list[int]]:
    """Ids between half of ``longest`` and all of it."""
    return [[rng.randrange(vocabulary) for _ in range(rng.randint(longest // 2, longest))] for _ in range(count)]
