# ruff: noqa: T201 - an example script that people run by hand: its output is its progress
"""Makes the reverse-text example: a tiny model that reverses a word right about one time in five, and words.

A letter is a token. The supervised warm start teaches a speller who says each letter of the reversed word with
probability 0.65, and else one that is drawn from the word.

Usage: python examples/reverse_text/prepare.py [--output DIR] [--seed N] [--steps N]
"""

import argparse
import json
import random
import string
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1]))
# They lie beside the examples, which are no package.
from warm_start import distinct, is_held_out, optimizer_for, train_step  # noqa: E402
from word_model import ASSISTANT, END, USER, build_tokenizer, command_line, small_model  # noqa: E402

LETTERS, RIGHT = 5, 0.65
LEARNING_RATE, CLOSE, LAST = 5e-3, 0.1, 20
"""Of the warm start: it ends when the mean of the last losses is so many nats from the distribution taught."""
PROMPTS = {"train": 2048, "validation": 400}


def words(rng: random.Random, *, held_out: bool) -> Iterator[str]:
    """An endless stream of words of one split."""
    while True:
        word = "".join(rng.choices(string.ascii_lowercase, k=LETTERS))
        if is_held_out(word) == held_out:
            yield word


def teach(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, most_steps: int, seed: int) -> None:
    """Teach the distribution of the speller's letters, until the model is close: some initial weights learn late."""
    rng, optimizer = random.Random(seed), optimizer_for(model, LEARNING_RATE)
    stream = words(rng, held_out=False)
    losses: list[float] = []
    while len(losses) < most_steps and (len(losses) < LAST or sum(losses[-LAST:]) / LAST > CLOSE):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min((len(losses) + 1) / 50, 1)
        rows = []
        for word in (next(stream) for _ in range(64)):
            said = [letter if rng.random() < RIGHT else rng.choice(word) for letter in reversed(word)]
            rows.append(tokenizer.encode(f"{USER}reverse {word}{END}{ASSISTANT}{''.join(said)}{END}"))
        ids = torch.tensor(rows)
        word_ids = ids[:, 3 : 3 + LETTERS]
        target = torch.zeros(len(rows), LETTERS + 1, len(tokenizer))
        for place in range(LETTERS):
            target[:, place].scatter_add_(1, word_ids, torch.full(word_ids.shape, (1 - RIGHT) / LETTERS))
            target[:, place].scatter_add_(1, word_ids[:, -1 - place, None], torch.full((len(rows), 1), RIGHT))
        target[:, LETTERS, tokenizer.eos_token_id] = 1
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, -LETTERS - 2 : -1]
        log_probs = model.lm_head(hidden).log_softmax(-1)
        loss = (torch.xlogy(target, target) - target * log_probs).sum(-1).mean()
        train_step(model, optimizer, loss)
        losses.append(loss.item())
    print(f"  warm start of {len(losses)} steps: {sum(losses[-LAST:]) / LAST:.3f} nats off", flush=True)


def write_data(folder: Path, seed: int) -> None:
    """The words of both splits; validation has words that neither training nor the warm start sees."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in PROMPTS.items():
        stream = words(random.Random(seed), held_out=split == "validation")
        rows = [
            {
                "data_source": "reverse_text",
                "prompt": [{"role": "user", "content": f"reverse {word}"}],
                "reward_model": {"ground_truth": word[::-1]},
            }
            for word in distinct(stream, count, str)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make(options: argparse.Namespace) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    tokenizer = build_tokenizer(("reverse",))
    model = small_model(tokenizer, 32)
    teach(model, tokenizer, options.steps, options.seed)
    write_data(options.output / "data", options.seed)
    return model, tokenizer


def main() -> None:
    command_line(__file__, __doc__, make, steps=1500)


if __name__ == "__main__":
    main()
