# ruff: noqa: T201 - an example script that people run by hand: its output is its progress
"""Makes the model of the planner and worker example: tiny, and right about half of the time in both roles.

The supervised warm start teaches to say each word of a plan, or of its buttons, right with probability 0.7, and each of
the two wrong words with 0.15.

Usage: python examples/planner_worker/prepare.py [--output DIR] [--seed N] [--steps N]
"""

import argparse
import sys
from itertools import product
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1]))
# They lie beside the examples, which are no package.
from environment import BUTTONS, MACHINES, OPERATIONS, PARTS, buttons  # noqa: E402
from warm_start import optimizer_for, train_step  # noqa: E402
from word_model import ASSISTANT, END, USER, build_tokenizer, command_line, small_model  # noqa: E402

RIGHT, GAIN, LEARNING_RATE = 0.7, 4.0, 5e-3
WORDS = (
    "part",
    "machine",
    *(f" {number}" for number in range(len(PARTS))),
    *(space + word for word in (*OPERATIONS, *BUTTONS) for space in ("", " ")),
)


def roles() -> list[tuple[str, list[str], tuple[str, ...]]]:
    """What each role is asked, the two words that are right, and the words among which it chooses."""
    planner = [(f"part {number}", part, OPERATIONS) for number, part in enumerate(PARTS)]
    seen = product(MACHINES, PARTS)
    worker = [(f"machine {machine} {' '.join(plan)}", buttons(machine, plan), BUTTONS) for machine, plan in seen]
    return [*planner, *worker]


def teach(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int) -> None:
    """Teach the distribution of both words in each role, whatever was said first, and the end after them."""
    texts, targets = [], []
    for asked, right, words in roles():
        chances = torch.zeros(3, len(tokenizer))
        for place, space in enumerate(("", " ")):
            for word in words:
                chance = RIGHT if word == right[place] else (1 - RIGHT) / (len(words) - 1)
                chances[place, tokenizer.convert_tokens_to_ids(tokenizer.tokenize(space + word))[0]] = chance
        chances[2, tokenizer.eos_token_id] = 1
        texts += [f"{USER}{asked}{END}{ASSISTANT}{first} {right[1]}" for first in words]
        targets += [chances] * len(words)
    rows = [tokenizer.encode(text) for text in texts]
    length = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (length - len(row)) for row in rows])
    number = torch.arange(len(rows))[:, None]
    place = torch.tensor([[len(row) - 3, len(row) - 2, len(row) - 1] for row in rows])
    target = torch.stack(targets)
    # Adapters do not change the last layer and its norm: with this gain, they can make a word as good as certain.
    torch.nn.init.constant_(model.model.norm.weight, GAIN)
    optimizer = optimizer_for(model, LEARNING_RATE)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min((step + 1) / 20, 1 - step / steps)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[number, place]
        log_probs = model.lm_head(hidden).log_softmax(-1)
        loss = (torch.xlogy(target, target) - target * log_probs).sum(-1).mean()
        train_step(model, optimizer, loss)
    print(f"  warm start of {steps} steps: {loss.item():.4f} nats off", flush=True)


def make(options: argparse.Namespace) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    tokenizer = build_tokenizer(WORDS)
    model = small_model(tokenizer, 32)
    teach(model, tokenizer, options.steps)
    return model, tokenizer


def main() -> None:
    command_line(__file__, __doc__, make, steps=200)


if __name__ == "__main__":
    main()
