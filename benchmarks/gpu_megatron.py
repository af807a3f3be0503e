"""Compares the Megatron backend with FSDP2 on the same rows, in the Megatron environment.

    .engines/megatron/bin/python benchmarks/gpu_megatron.py [--device cpu --tiny] [--json FILE]

Both train in bfloat16 from the same weights. Each may differ from FSDP2 in float32 by as much rounding.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from _gpu_bench import SHALLOW, TINY, Bench
from _report import Figure, report
from torch import Tensor

from agentrl_core.protocol import DataProto

UNIT = 2**-8
"""Half the distance between neighbouring numbers of bfloat16, relative."""


@dataclass(frozen=True)
class Trained:
    """What a backend did with a batch.

    Args:
        before, after: [n] log-probs of the sampled tokens, before and after two updates.
        norms: of the gradients of the updates.
    """

    before: Tensor
    after: Tensor
    norms: Tensor


def measure(bench: Bench) -> Iterator[Figure]:
    """FSDP2 in float32 is the reference; FSDP2 in bfloat16 says what rounding costs."""
    batch = bench.batch()
    exact = trained(bench, batch, "fsdp2", "float32")
    rounded = distances(trained(bench, batch, "fsdp2", "bfloat16"), exact)
    yield from figures("fsdp2", rounded, [None] * len(rounded))
    found = distances(trained(bench, batch, "megatron", "bfloat16"), exact)
    yield from figures("megatron", found, [max(2 * each, UNIT) for each in rounded])


def trained(bench: Bench, batch: DataProto, backend: str, dtype: str) -> Trained:
    """From the same weights each time."""
    changes = (f"trainer.backend.name={backend}", f"model.compute_dtype={dtype}", "actor.optimizer.lr=1e-3")
    batch = batch.slice()
    mask = batch.batch["response_mask"]
    with bench.actor(*changes) as actor:
        before = actor.compute_log_prob(batch)
        batch.union(before)
        norms = [actor.update(batch)["actor/grad_norm"] for _ in range(2)]
        after = actor.compute_log_prob(batch)
    return Trained(before.batch["old_log_probs"][mask], after.batch["old_log_probs"][mask], torch.tensor(norms))


def distances(found: Trained, exact: Trained) -> list[float]:
    """In the order of :func:`figures`."""
    moved, wanted = found.after - found.before, exact.after - exact.before
    norms = (found.norms - exact.norms).abs() / exact.norms
    log_probs = (found.before - exact.before).double().square().mean().sqrt()
    return [float(log_probs), float(norms.max()), float((moved - wanted).norm() / wanted.norm())]


def figures(backend: str, values: list[float], goals: list[float | None] | list[float]) -> Iterator[Figure]:
    names = (
        "log-probs, root mean square error against float32",
        "norm of the gradient, relative error",
        "what two updates change in log-probs, relative error",
    )
    for name, value, goal in zip(names, values, goals, strict=True):
        yield Figure(f"{backend}, bfloat16", name, value, "", goal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of kilobytes")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device here (--device cpu --tiny shows that it runs)")
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(torch.device(arguments.device), TINY if arguments.tiny else SHALLOW, Path(temporary))
        found = report("Megatron", measure(bench), arguments.json)
    sys.exit(any(figure.verdict == "miss" for figure in found))


if __name__ == "__main__":
    main()
