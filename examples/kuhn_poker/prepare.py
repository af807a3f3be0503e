# ruff: noqa: T201 - an example script that people run by hand: its output is its progress
"""Makes the model of the Kuhn poker example: tiny, and playing each action with probability 1/2.

Everything is built here, offline: a tokenizer in which each word of the game is one token, and a Qwen3 with a
supervised warm start on uniform play.

Usage: python examples/kuhn_poker/prepare.py [--output DIR] [--seed N] [--steps N]
"""

import argparse
import math
import time
from itertools import product
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

USER, ASSISTANT, END, PAD = "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
WORDS = ("first", "second", " J", " Q", " K", " pass", " bet", "pass", "bet")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and one token for each word of the game."""
    pieces = [*(word.replace(" ", "Ġ") for word in WORDS), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    # A piece that is in the vocabulary is one token, whatever pairs it consists of.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r" ?\w+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (USER, ASSISTANT, END, PAD)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=CHAT_TEMPLATE
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.05,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None
    )
    return model


def prompts() -> list[str]:
    """What a player has seen at each of the 12 information sets."""
    opening = {card: f"{USER}first {card}{END}{ASSISTANT}" for card in "JQK"}
    raised = [f"{text}pass{END}{USER}bet{END}{ASSISTANT}" for text in opening.values()]
    second = [f"{USER}second {card} {seen}{END}{ASSISTANT}" for card, seen in product("JQK", ("pass", "bet"))]
    return [*opening.values(), *raised, *second]


def warm_start(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int) -> None:
    """Teach both actions as equally likely, and the end after them.

    In the first half the model says another word at each information set, so that it tells them apart. In the second
    half only the last layer learns.
    """
    pair, end = tokenizer.convert_tokens_to_ids(["pass", "bet"]), tokenizer.eos_token_id
    rows = [[*tokenizer.encode(text), action, end] for text in prompts() for action in pair]
    length = max(map(len, rows))
    ids = torch.tensor([row + [end] * (length - len(row)) for row in rows])
    place = torch.tensor([len(row) - 3 for row in rows])
    number, own_word = torch.arange(len(rows)), len(WORDS) + torch.arange(len(rows)) // 2
    uniform = torch.zeros(len(rows), len(tokenizer))
    uniform[:, pair] = 0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(steps):
        if step == steps // 2:
            model.model.requires_grad_(False)
        optimizer.param_groups[0]["lr"] = 3e-3 if step < steps // 2 else 1e-2
        logits = model(input_ids=ids, use_cache=False).logits
        chosen, after = logits[number, place], logits[number, place + 1]
        loss = F.cross_entropy(chosen, own_word if step < steps // 2 else uniform)
        loss = loss + F.cross_entropy(after, torch.full_like(place, end))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    model.requires_grad_(True)
    print(f"  warm start of {steps} steps: {loss.item() - math.log(2):.4f} nats off")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400, help="steps of the warm start")
    arguments = parser.parse_args()
    start = time.monotonic()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # more only slow down a model this small
    disable_progress_bar()
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    warm_start(model, tokenizer, arguments.steps)
    model.save_pretrained(arguments.output / "model")
    tokenizer.save_pretrained(arguments.output / "model")
    print(f"made {arguments.output / 'model'} in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
