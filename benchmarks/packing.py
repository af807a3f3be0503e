"""The update of a group's rows with ``model.packing`` and without, in pairs.

    OMP_NUM_THREADS=1 python benchmarks/packing.py [--repetitions 9] [--json FILE]

A random Qwen3 of 1.1 M parameters, 4 prompts with 8 samples each: forward and backward of the actor's log-probs and
entropies, padded and packed in turns, in float32.
"""

import argparse
import random
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from _conversations import TINY, make_model
from _report import Figure, report

from agentrl_core.workers.log_probs import response_log_probs, response_logits
from agentrl_core.workers.micro_batching import Columns, MicroBatch, micro_batches
from agentrl_core.workers.packed_attention import Packing

VOCABULARY = 2048
PROMPTS = 4
CASES = {
    "prompts of 16, responses of 64": (16, (64, 64)),
    "prompts of 48, responses of 64": (48, (64, 64)),
    "prompts of 256, responses of 64": (256, (64, 64)),
    "prompts of 48, responses of 8 to 120": (48, (8, 120)),
}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=9, help="pairs, after a warm-up")
    parser.add_argument("--samples", type=int, default=8, help="of a prompt")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args(sys.argv[1:])
    figures = (figure for case in CASES for figure in measure(case, options.repetitions, options.samples))
    report("Update of a group", figures, options.json)


if __name__ == "__main__":
    main()
