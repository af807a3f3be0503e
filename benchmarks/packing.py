"""The update of a group's rows with ``model.packing`` and without, and with all logits at once and in chunks, in turns.

    OMP_NUM_THREADS=1 python benchmarks/packing.py [--repetitions 9] [--json FILE]

A random Qwen3 of 1.1 M parameters: forward and backward of the actor's log-probs and entropies, in float32. First 4
prompts with 8 samples each, padded and packed in turns. Then trees: a prompt whose answer forks three times, into 18
rows, and prompts that begin with the same schemas of tools. These are also packed with shared prompts only. Operations
are those of matrix products and attention, and pairs those of query and key for which attention computes a score.

Then the same of a model with a vocabulary of 152k and little else, 2,048 sampled tokens: what logits in chunks of so
many elements take.
"""

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from _conversations import TINY, make_model
from _memory import PeakMemory
from _report import Figure, report
from torch.utils._python_dispatch import TorchDispatchMode

from agentrl_core.fsdp2 import log_probs, packing
from agentrl_core.fsdp2.log_probs import response_log_probs, response_logits
from agentrl_core.fsdp2.packed_attention import Packing
from agentrl_core.workers import micro_batching
from agentrl_core.workers.micro_batching import Columns, MicroBatch, Prefixes, micro_batches, prefixes_of
from agentrl_plan.operations import operations_of

VOCABULARY, LARGE_VOCABULARY = 2048, 151_936
PROMPTS = 4
CASES = {
    "prompts of 16, responses of 64": (16, (64, 64)),
    "prompts of 48, responses of 64": (48, (64, 64)),
    "prompts of 256, responses of 64": (256, (64, 64)),
    "prompts of 48, responses of 8 to 120": (48, (8, 120)),
}
FORKS, SCHEMAS = "an answer that forks 3 x 3 x 2", "prompts that begin with schemas"

CHUNKS = {"at once": None, "in chunks of 2^28": 2**28, "in chunks of 2^26": 2**26}


def make_columns(samples: int, prompt: int, responses: tuple[int, int], shared: int = 0) -> Columns:
    """Groups of rows with random ids; lengths of responses are uniform between the two. ``shared`` tokens are the same
    in front of all prompts."""
    rng = random.Random(0)
    lengths = torch.tensor([[rng.randint(*responses)] for _ in range(PROMPTS * samples)])
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, VOCABULARY, (PROMPTS, prompt), generator=generator).repeat_interleave(samples, 0)
    front = torch.randint(1, VOCABULARY, (1, shared), generator=generator).expand(len(prompts), -1)
    answers = torch.randint(1, VOCABULARY, (PROMPTS * samples, int(lengths.max())), generator=generator)
    return columns_with(torch.cat([front, prompts], 1), answers, torch.arange(answers.shape[1]) < lengths)


def make_forks(samples: int) -> Columns:
    """A prompt whose answer goes on in three ways, each of them in three, each of them in two. What is in front of a
    fork is trained once."""
    rng = random.Random(0)
    paths: list[tuple[list[int], int]] = [([], 0)]
    for branches in (3, 3, 2):
        paths = [
            (path + [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(5 * samples, 14 * samples))],
             len(path) if branch else trained)
            for path, trained in paths for branch in range(branches)
        ]  # fmt: skip
    answers = torch.zeros(len(paths), max(len(path) for path, _ in paths), dtype=torch.long)
    for row, (path, _) in enumerate(paths):
        answers[row, : len(path)] = torch.tensor(path)
    prompts = torch.tensor([[rng.randrange(1, VOCABULARY) for _ in range(15 * samples)]]).expand(len(paths), -1)
    columns = columns_with(prompts, answers, answers > 0)
    trained = torch.tensor([[start] for _, start in paths])
    return columns | {"response_mask": columns["response_mask"] & (torch.arange(answers.shape[1]) >= trained)}


def columns_with(prompts: torch.Tensor, answers: torch.Tensor, filled: torch.Tensor) -> Columns:
    attention = torch.cat([torch.ones_like(prompts), filled.long()], 1)
    return {
        "input_ids": torch.cat([prompts, answers], 1),
        "attention_mask": attention,
        "position_ids": attention.cumsum(-1) - 1,
        "responses": answers,
        "response_mask": filled,
    }


def of_prompts(columns: Columns) -> Prefixes | None:
    """Only whole prompts count as shared."""
    found = prefixes_of(columns)
    if found is None:
        return None
    prompt = columns["input_ids"].shape[1] - columns["responses"].shape[1]
    return replace(found, shared=[prompt if shared >= prompt else 0 for shared in found.shared])


class Operations(TorchDispatchMode):  # type: ignore[misc]  # torch has no complete types
    """Counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += operations_of(func, args, kwargs or {}, result)
        return result


def pairs_of(micro: MicroBatch) -> tuple[int, int]:
    """Tokens and pairs of a packed micro-batch, or of a padded one where packing does not pay."""
    packed = packing.pack(micro)
    if packed is None:
        return padded_pairs_of(micro)
    blocks = packed.inputs["packed_layout"].blocks
    pairs = sum(
        block.queries.numel() * (block.keys.shape[1] if block.seen is not None else (block.keys.shape[1] + 1) / 2)
        for block in blocks
    )
    return packed.inputs["input_ids"].numel(), int(pairs)


def padded_pairs_of(micro: MicroBatch) -> tuple[int, int]:
    rows, width = micro["input_ids"].shape
    return rows * width, rows * width * (width + 1) // 2 if micro.is_plain else rows * width**2


def measure(case: str, repetitions: int, columns: Columns, with_prompts: bool = False) -> Iterator[Figure]:
    """In turns on one model."""
    model = make_model(TINY, VOCABULARY).requires_grad_(True)
    packs = Packing(model, lambda micro: response_logits(model, micro), True, torch.device("cpu"))
    seconds: dict[str, list[float]] = {name: [] for name in ("padded", "prompts shared", "packed")}
    if not with_prompts:
        del seconds["prompts shared"]
    for repetition in range(repetitions + 1):
        for name, times in seconds.items():
            model.zero_grad()
            with ExitStack() as stack:
                if name != "padded":
                    stack.enter_context(packs.on())
                if name == "prompts shared":
                    stack.enter_context(patch.object(packing, "prefixes_of", of_prompts))
                    stack.enter_context(patch.object(micro_batching, "prefixes_of", of_prompts))
                micros = micro_batches(columns, 8192, by_prefix=name != "padded")
                operations = stack.enter_context(nullcontext() if repetition else Operations())
                start = time.perf_counter()
                for micro in micros:
                    log_probs_br, _ = response_log_probs(model, micro, 1.0, "value")
                    log_probs_br[micro["response_mask"]].mean().backward()
                elapsed = time.perf_counter() - start
                if operations is None:
                    times.append(elapsed)
                    continue
                sizes = [padded_pairs_of(micro) if name == "padded" else pairs_of(micro) for micro in micros]
            yield Figure(case, f"{name}: tokens", sum(tokens for tokens, _ in sizes), "")
            yield Figure(case, f"{name}: pairs", sum(pairs for _, pairs in sizes) / 1000, "thousand")
            yield Figure(case, f"{name}: operations", operations.count / 1e9, "billion")
    for name, times in seconds.items():
        yield Figure(case, f"{name}: an update", statistics.median(times), "s")
    for name, times in seconds.items():
        if name != "packed":
            ratio = statistics.median(one / other for one, other in zip(seconds["packed"], times, strict=True))
            yield Figure(case, f"packed / {name}, median of pairs", ratio, "")


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
    samples = options.samples
    cases = {case: make_columns(samples, *sizes) for case, sizes in CASES.items()}
    trees = {FORKS: make_forks(samples), SCHEMAS: make_columns(samples, 50, (64, 64), shared=400)}
    figures = (
        figure
        for case, columns in (cases | trees).items()
        for figure in measure(case, options.repetitions, columns, case in trees)
    )
    report("Update of a group", chain(figures, measure_chunks(options.repetitions, 256 * samples)), options.json)


if __name__ == "__main__":
    main()
