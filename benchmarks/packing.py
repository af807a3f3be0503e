"""The update of a group's rows with ``model.packing`` and without, and with all logits at once and in chunks, in turns.

    OMP_NUM_THREADS=1 python benchmarks/packing.py [--repetitions 9] [--json FILE]

A random Qwen3 of 1.1 M parameters, 4 prompts with 8 samples each: forward and backward of the actor's log-probs and
entropies, padded and packed in turns, in float32. Then the same of a model with a vocabulary of 152k and little else,
2,048 sampled tokens: what logits in chunks of so many elements take.
"""

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import torch
from _conversations import TINY, make_model
from _memory import PeakMemory
from _report import Figure, report

from agentrl_core.workers import log_probs
from agentrl_core.workers.log_probs import response_log_probs, response_logits
from agentrl_core.workers.micro_batching import Columns, MicroBatch, micro_batches
from agentrl_core.workers.packed_attention import Packing

VOCABULARY, LARGE_VOCABULARY = 2048, 151_936
PROMPTS = 4
CASES = {
    "prompts of 16, responses of 64": (16, (64, 64)),
    "prompts of 48, responses of 64": (48, (64, 64)),
    "prompts of 256, responses of 64": (256, (64, 64)),
    "prompts of 48, responses of 8 to 120": (48, (8, 120)),
}

CHUNKS = {"at once": None, "in chunks of 2^28": 2**28, "in chunks of 2^26": 2**26}


def make_columns(samples: int, prompt: int, responses: tuple[int, int]) -> Columns:
    """Groups of rows with random ids; lengths of responses are uniform between the two."""
    rng = random.Random(0)
    lengths = torch.tensor([[rng.randint(*responses)] for _ in range(PROMPTS * samples)])
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, VOCABULARY, (PROMPTS, prompt), generator=generator).repeat_interleave(samples, 0)
    answers = torch.randint(1, VOCABULARY, (PROMPTS * samples, int(lengths.max())), generator=generator)
    sampled = torch.arange(answers.shape[1]) < lengths
    attention = torch.cat([torch.ones_like(prompts), sampled.long()], 1)
    return {
        "input_ids": torch.cat([prompts, answers], 1),
        "attention_mask": attention,
        "position_ids": attention.cumsum(-1) - 1,
        "responses": answers,
        "response_mask": sampled,
    }


def measure(case: str, repetitions: int, samples: int) -> list[Figure]:
    """Padded and packed in turns on one model."""
    model = make_model(TINY, VOCABULARY).requires_grad_(True)
    packing = Packing(model, lambda micro: response_logits(model, micro), True, torch.device("cpu"))
    micros = micro_batches(make_columns(samples, *CASES[case]), 8192, by_prompt=True)

    def update(micro: MicroBatch) -> None:
        log_probs_br, _ = response_log_probs(model, micro, 1.0, "value")
        log_probs_br[micro["response_mask"]].mean().backward()

    seconds: dict[str, list[float]] = {"padded": [], "packed": []}
    for repetition in range(repetitions + 1):
        for name in seconds:
            model.zero_grad()
            with packing.on() if name == "packed" else nullcontext():
                start = time.perf_counter()
                for micro in micros:
                    update(micro)
                elapsed = time.perf_counter() - start
            if repetition:
                seconds[name].append(elapsed)
    ratio = statistics.median(packed / padded for padded, packed in zip(*seconds.values(), strict=True))
    figures = [Figure(case, f"{name}: an update", statistics.median(times), "s") for name, times in seconds.items()]
    return [*figures, Figure(case, "packed / padded, median of pairs", ratio, "")]


def measure_chunks(repetitions: int, tokens: int) -> Iterator[Figure]:
    """The log-probs of so many tokens whose logits are all there at once, and in chunks, in turns on one model."""
    model = make_model({**TINY, "hidden_size": 64, "num_hidden_layers": 1}, LARGE_VOCABULARY).requires_grad_(True)
    rows = torch.randint(1, LARGE_VOCABULARY, (4, 1 + tokens // 4), generator=torch.Generator().manual_seed(0))
    ones = torch.ones_like(rows)
    (micro,) = micro_batches(
        {
            "input_ids": rows, "attention_mask": ones, "position_ids": ones.cumsum(-1) - 1, "responses": rows[:, 1:],
            "response_mask": ones[:, 1:].bool(),
        },
        2 * tokens,
    )  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in CHUNKS}
    case = f"{tokens} tokens of a vocabulary of {LARGE_VOCABULARY}"
    for repetition in range(repetitions + 1):
        for name, most in CHUNKS.items():
            model.zero_grad()
            with patch.object(log_probs, "MOST_LOGITS", most or log_probs.MOST_LOGITS):
                # Looking at the memory takes time: it is measured in the warm-up.
                with nullcontext() if repetition else PeakMemory([os.getpid()]) as memory:
                    start = time.perf_counter()
                    log_probs_br, _ = response_log_probs(model, micro, 1.0, "value", in_chunks=most is not None)
                    log_probs_br.mean().backward()
                    elapsed = time.perf_counter() - start
            if memory is not None:
                yield Figure(case, f"{name}: memory of an update at the peak", memory.growth / 2**20, "MiB")
            else:
                seconds[name].append(elapsed)
    whole, *others = seconds
    for name, times in seconds.items():
        yield Figure(case, f"{name}: an update", statistics.median(times), "s")
    for name in others:
        ratio = statistics.median(cut / full for cut, full in zip(seconds[name], seconds[whole], strict=True))
        yield Figure(case, f"{name} / {whole}, median of pairs", ratio, "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=9, help="pairs, after a warm-up")
    parser.add_argument("--samples", type=int, default=8, help="of a prompt")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args(sys.argv[1:])
    figures = (figure for case in CASES for figure in measure(case, options.repetitions, options.samples))
    chunks = measure_chunks(options.repetitions, 256 * options.samples)
    report("Update of a group", chain(figures, chunks), options.json)


if __name__ == "__main__":
    main()
