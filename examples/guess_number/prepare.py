# ruff: noqa: T201 - an example script that people run by hand: its output is its progress
"""Makes the model of the guess-the-number example: tiny, and with a weak way of playing.

Everything is built here, offline: a tokenizer in which each number is one token, and a Qwen3 with a supervised warm
start on games in which every guess is drawn evenly from the numbers that are still possible.

Usage: python examples/guess_number/prepare.py [--output DIR] [--seed N] [--largest N] [--beyond X] [--steps N]
"""

import argparse
import random
import sys
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1]))
# They lie beside the examples, which are no package.
from warm_start import build_model as new_model  # noqa: E402
from warm_start import optimizer_for, train_step  # noqa: E402
from word_model import ASSISTANT, END, USER, build_tokenizer, command_line  # noqa: E402

WORDS = ("guess ", "higher ", "lower ")


def build_model(tokenizer: PreTrainedTokenizerFast, largest: int) -> Qwen3ForCausalLM:
    """A Qwen3 that knows the order of numbers from the start: neighbours have similar embeddings."""
    model = new_model(tokenizer, num_hidden_layers=2, intermediate_size=256, max_position_embeddings=512)
    place = torch.arange(largest + 1)[:, None] / (largest + 1)
    wave = torch.pi * 2 ** (torch.arange(32) * 9 / 31) * place
    features = torch.cat([wave.sin(), wave.cos()], 1)
    with torch.no_grad():
        model.model.embed_tokens.weight[: largest + 1] = features @ torch.randn(64, 128) / 64**0.5 * 0.3
    return model


def game(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, largest: int, guesses: int, beyond: float
) -> tuple[list[int], ...]:
    """A game of a player who draws evenly from the possible numbers, and ``beyond`` of their count on each side.

    Returns its ids and, in step, the first and the last of the ids that the player may choose from; 0, 0 where the text
    is not the player's.
    """
    secret, low, high = rng.randint(0, largest), 0, largest
    ids, first, last, word = [], [], [], WORDS[0]
    for _ in range(guesses):
        shown = tokenizer.convert_tokens_to_ids(
            [USER, word.replace(" ", "Ġ"), str(low), "Ġ", str(high), END, ASSISTANT]
        )
        margin, end = int((high - low + 1) * beyond), tokenizer.eos_token_id
        lowest, highest = max(0, low - margin), min(largest, high + margin)
        guess = rng.randint(lowest, highest)
        ids += [*shown, guess, end]
        first += [0] * len(shown) + [lowest, end]
        last += [0] * len(shown) + [highest, end]
        if guess == secret:
            break
        if low <= guess <= high:
            low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
        word = WORDS[1] if guess < secret else WORDS[2]
    return ids, first, last


def teach(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, largest: int, beyond: float, steps: int, seed: int
) -> None:
    """Teach the distribution of this player's guesses: the ids of numbers are the numbers."""
    rng, guesses, vocabulary = random.Random(seed), largest.bit_length(), torch.arange(len(tokenizer))
    optimizer = optimizer_for(model, 2e-3)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * min((step + 1) / 50, 1 - 0.95 * step / steps)
        games = [game(tokenizer, rng, largest, guesses, beyond) for _ in range(64)]
        length = max(len(ids) for ids, _, _ in games)
        # Right-padded and causal: no guess can see the padding.
        ids, first, last = (torch.tensor([row[i] + [0] * (length - len(row[i])) for row in games]) for i in range(3))
        # Where only 0 is left, there is no choice to learn.
        trained = last[:, 1:] > 0
        low, high = first[:, 1:][trained, None], last[:, 1:][trained, None]
        target = ((vocabulary >= low) & (vocabulary <= high)) / (high - low + 1)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        loss = F.cross_entropy(model.lm_head(hidden[trained]), target)
        train_step(model, optimizer, loss)
        if (step + 1) % 100 == 0:
            entropy = -(target * target.clamp(min=1e-9).log()).sum(-1).mean()
            print(f"  warm start, step {step + 1} of {steps}: {(loss - entropy).item():.3f} nats off", flush=True)


def make(options: argparse.Namespace) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    numbers = [str(number) for number in range(options.largest + 1)]
    tokenizer = build_tokenizer([*numbers, *WORDS], r"\d+")
    model = build_model(tokenizer, options.largest)
    teach(model, tokenizer, options.largest, options.beyond, options.steps, options.seed)
    return model, tokenizer


def main() -> None:
    weak = "how weak the player is: 0.25 also guesses a quarter of the interval outside"
    command_line(
        __file__,
        __doc__,
        make,
        steps=500,
        largest={"type": int, "default": 63, "help": "the largest secret number, as in environment.py"},
        beyond={"type": float, "default": 0.0, "help": weak},
    )


if __name__ == "__main__":
    main()
