# ruff: noqa: T201 - an example script that people run by hand: its output is its progress
"""Makes the model of the guess-the-number example: tiny, and with a weak way of playing.

Everything is built here, offline: a tokenizer in which each number is one token, and a Qwen3 with a supervised warm
start on games in which every guess is drawn evenly from the numbers that are still possible.

Usage: python examples/guess_number/prepare.py [--output DIR] [--seed N] [--largest N] [--beyond X] [--steps N]
"""

import argparse
import random
import sys
import time
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

sys.path.append(str(Path(__file__).resolve().parents[1]))
# It lies beside the examples, which are no package.
from warm_start import build_model as new_model  # noqa: E402
from warm_start import optimizer_for, train_step  # noqa: E402

USER, ASSISTANT, END, PAD = "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
WORDS = ("guess ", "higher ", "lower ")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer(largest: int) -> PreTrainedTokenizerFast:
    """Bytes, and one token for each number and each word of the game."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    numbers = [str(number) for number in range(largest + 1)]
    words = [word.replace(" ", "Ġ") for word in WORDS]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys([*numbers, *words, *alphabet]))}
    # A piece that is in the vocabulary is one token, whatever pairs it consists of.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (USER, ASSISTANT, END, PAD)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=CHAT_TEMPLATE
    )


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--largest", type=int, default=63, help="the largest secret number, as in environment.py")
    parser.add_argument(
        "--beyond",
        type=float,
        default=0.0,
        help="how weak the player is: 0.25 also guesses a quarter of the interval outside",
    )
    parser.add_argument("--steps", type=int, default=500, help="steps of the warm start")
    arguments = parser.parse_args()
    start = time.monotonic()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # more only slow down a model this small
    disable_progress_bar()
    tokenizer = build_tokenizer(arguments.largest)
    model = build_model(tokenizer, arguments.largest)
    teach(model, tokenizer, arguments.largest, arguments.beyond, arguments.steps, arguments.seed)
    model.save_pretrained(arguments.output / "model")
    tokenizer.save_pretrained(arguments.output / "model")
    print(f"made {arguments.output / 'model'} in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
