"""Compares what a GPU computes and holds with a reference, one check after the other.

    python benchmarks/gpu_checks.py [CHECK ...] [--device cpu --tiny] [--json FILE]

Each figure with a goal is compared with a bound that follows from the arithmetic, or from the rounding that another
figure measures. The file has every figure as soon as it is known.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from _gpu_bench import BUCKET_BYTES, SHALLOW, TINY, VOCABULARY, Bench, largest
from _gpu_ipc import ipc
from _gpu_memory import offload, sleep
from _report import Figure, report
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from agentrl_core.algorithms.token_log_probs import token_log_probs
from agentrl_core.api.training_backend import DataShare
from agentrl_core.engine_kit.ports import free_port
from agentrl_core.fsdp2.backend import Fsdp2
from agentrl_core.fsdp2.log_probs import MOST_LOGITS, chunks_logits, response_log_probs
from agentrl_core.fsdp2.mesh import DP_AXIS, Mesh
from agentrl_core.protocol import DataProto
from agentrl_core.workers.actor import ActorWorker
from agentrl_core.workers.micro_batching import columns_of, micro_batches

UNIT = 2.0**-24
"""Largest relative error of one float32 operation."""


def log_probs(bench: Bench) -> Iterator[Figure]:
    """Log-probs, entropies and gradients of sampled tokens against float64."""
    tokens = 2048 if bench.device.type == "cuda" else 16
    generator = torch.Generator(bench.device).manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        case = f"{tokens} tokens, vocabulary of {VOCABULARY}, {str(dtype).removeprefix('torch.')}"
        logits_nV = (torch.randn(tokens, VOCABULARY, generator=generator, device=bench.device) * 4).to(dtype)
        labels_n = torch.randint(VOCABULARY, (tokens,), generator=generator, device=bench.device)
        logits_nV.requires_grad_()
        memory = bench.memory
        memory.settle()
        start = time.perf_counter()
        found_n, entropies_n = token_log_probs(logits_nV, labels_n, 0.7, "gradient")
        (found_n.sum() + 0.1 * entropies_n.sum()).backward()
        growth = memory.growth
        yield Figure(case, "forward and backward, with the first call's start", time.perf_counter() - start, "s")
        if growth is not None:
            # The gradient, and blocks of 2**26 float32 logits of which at most four exist.
            goal = logits_nV.numel() * logits_nV.element_size() / 2**30 + 1
            yield Figure(case, "memory at the peak, above the logits", growth, "GiB", goal)
        assert logits_nV.grad is not None
        errors = [_errors(*each) for each in zip(
            logits_nV.detach().split(16), logits_nV.grad.split(16), labels_n.split(16), found_n.detach().split(16),
            entropies_n.detach().split(16), strict=True)]  # fmt: skip
        of_log_probs, of_entropies, of_gradients, steepest = torch.tensor(errors).amax(0).tolist()
        # Some tens of roundings in a row of numbers up to 50; a gradient is rounded once more, to the logits' dtype.
        bound = 50 * 40 * UNIT
        yield Figure(case, "log-probs, largest error against float64", of_log_probs, "", bound)
        yield Figure(case, "entropies, largest error", of_entropies, "", bound)
        yield Figure(case, "gradients, largest error", of_gradients, "", bound + steepest * torch.finfo(dtype).eps / 2)


def _errors(
    logits_cV: Tensor, gradient_cV: Tensor, labels_c: Tensor, found_c: Tensor, entropies_c: Tensor
) -> list[float]:
    """The largest errors of log-probs, entropies and gradients, and the largest gradient."""
    exact_cV = logits_cV.double().requires_grad_()
    log_cV = torch.log_softmax(exact_cV / 0.7, -1)
    chosen_c = log_cV.gather(-1, labels_c.unsqueeze(-1)).squeeze(-1)
    entropy_c = -(log_cV.exp() * log_cV).sum(-1)
    (expected_cV,) = torch.autograd.grad(chosen_c.sum() + 0.1 * entropy_c.sum(), exact_cV)
    pairs = ((found_c, chosen_c), (entropies_c, entropy_c), (gradient_cV, expected_cV))
    return [*(largest(found - expected) for found, expected in pairs), largest(expected_cV)]


def packing(bench: Bench) -> Iterator[Figure]:
    """Packed rows, with whole logits and with chunks of them, against padded ones in bfloat16: all of these may differ
    from float32 by as much rounding."""
    batch = bench.batch()
    variants = {
        "padded, float32": ("model.compute_dtype=float32", "model.packing=false"),
        "padded, bfloat16": ("model.compute_dtype=bfloat16", "model.packing=false"),
        "packed, bfloat16": ("model.compute_dtype=bfloat16", "model.packing=true"),
        "packed, bfloat16, in chunks": ("model.compute_dtype=bfloat16", "model.packing=true"),
    }
    exact: tuple[Tensor, Tensor] | None = None
    of_log_probs = of_gradient = math.inf
    for case, overrides in variants.items():
        with bench.actor(*overrides) as actor:
            if "packed" in case:
                yield Figure(case, "the model packs", float(actor._backend._packing.is_possible), "", 1, at_least=True)
            if in_chunks := "in chunks" in case:
                chunks = chunks_logits(actor.module, MOST_LOGITS + 1, bench.device)
                yield Figure(case, "the model computes logits in chunks", float(chunks), "", 1, at_least=True)
            found_n, gradient = _log_probs_of(actor, batch), _gradient_of(actor, batch, in_chunks)
            memory = bench.memory
            memory.settle()
            start = time.perf_counter()
            _gradient_of(actor, batch, in_chunks)
            yield Figure(case, "forward and backward of the batch, second time", time.perf_counter() - start, "s")
            if memory.growth is not None:
                yield Figure(case, "memory of it at the peak", memory.growth, "GiB")
        if exact is None:
            exact = found_n, gradient
            continue
        error, distance = _rms(found_n - exact[0]), float((gradient - exact[1]).norm() / exact[1].norm())
        goals = (2 * of_log_probs, 2 * of_gradient) if "packed" in case else (None, None)
        of_log_probs, of_gradient = error, distance
        yield Figure(case, "log-probs, root mean square error against float32", error, "", goals[0])
        yield Figure(case, "gradient, distance from float32 in parts of its norm", distance, "", goals[1])


def _log_probs_of(actor: ActorWorker, batch: DataProto) -> Tensor:
    """[n] of the sampled tokens."""
    return actor.compute_log_prob(batch).batch["old_log_probs"][batch.batch["response_mask"]]


def _gradient_of(actor: ActorWorker, batch: DataProto, in_chunks: bool = False) -> Tensor:
    """[parameters] of the log-probs, weighted with the advantages; on the host."""
    columns = columns_of(batch, ("advantages",), "update")
    tokens, packs = actor.config.actor.micro_batch_tokens, actor._backend._packing.is_possible
    with actor._computing():
        for micro in micro_batches(columns, tokens, by_prefix=packs):
            micro = micro.to(actor._device)
            (log_probs_br,) = response_log_probs(actor.module, micro, 1.0, in_chunks=in_chunks)
            (log_probs_br * micro["advantages"] * micro["response_mask"]).sum().backward()
        gradients = [parameter.grad.float().cpu().flatten() for parameter in actor.module.parameters()]
        actor.module.zero_grad()
    return torch.cat(gradients)


def _rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


@dataclass(frozen=True)
class Trained:
    """What a worker did with a batch.

    Args:
        log_probs: [n] before the updates.
        moved: [parameters] by the updates.
        norms: of the gradients before clipping, one for each update.
        clipped: the first one after clipping, in parts of the limit.
        on_host: moments of AdamW that are in host memory, in parts of all.
        wrong: tensors that were gathered and are not the shards.
        growth: memory of gathering; None without CUDA.
    """

    log_probs: Tensor
    moved: Tensor
    norms: Tensor
    clipped: float
    on_host: float
    wrong: int
    growth: float | None


CLIP = 1e-3
"""Below any gradient's norm here, so that all are clipped."""


def fsdp(bench: Bench) -> Iterator[Figure]:
    """FSDP2 on a mesh of one rank, with NCCL on CUDA, against the same worker without a mesh."""
    batch, offload = bench.batch(), ("actor.offload_parameters=true", "actor.offload_optimizer=true")
    alone = {dtype: _trained(bench, batch, f"model.compute_dtype={dtype}") for dtype in ("float32", "bfloat16")}
    with mesh_of_one(bench.device):
        sharded = {dtype: _trained(bench, batch, f"model.compute_dtype={dtype}") for dtype in alone}
        moving = _trained(bench, batch, "model.compute_dtype=bfloat16", *offload)

    exact, rounded = alone["float32"], _distances(alone["bfloat16"], alone["float32"])
    # In float32 the same operations: a few roundings, and AdamW's steps where a gradient is nothing but rounding.
    yield from _compared("float32, sharded", _distances(sharded["float32"], exact), (1e-4, 1e-4, 1e-2))
    yield from _compared("bfloat16, one process", rounded, (None, None, None))
    yield from _compared("bfloat16, sharded", _distances(sharded["bfloat16"], exact), _twice(rounded))
    yield from _compared("bfloat16, offloaded against not", _distances(moving, sharded["bfloat16"]), rounded)
    yield Figure("offloaded", "moments that wait on the host, in parts of all", moving.on_host, "", 1, True)
    for case, trained in (("sharded", sharded["bfloat16"]), ("sharded and offloaded", moving)):
        yield Figure(case, "norm of the gradient in parts of the limit", float(trained.norms.min()) / CLIP, "", 1, True)
        yield Figure(case, "the same after clipping, distance from 1", abs(trained.clipped - 1), "", 1e-3)
        yield Figure(case, "gathered tensors that are not the shards", trained.wrong, "", 0)
        if trained.growth is not None:
            yield Figure(case, "memory of gathering", trained.growth, "GiB", 3 * _embedding_gib(bench))


@contextmanager
def mesh_of_one(device: torch.device) -> Iterator[None]:
    """Inside, workers train as one of several ranks, of which there is one."""
    if device.type == "cuda":
        torch.cuda.set_device(0)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    mesh = Mesh(init_device_mesh(device.type, (1,), mesh_dim_names=(DP_AXIS,)), DataShare())
    try:
        with patch.object(Fsdp2, "_make_mesh", lambda backend: mesh):
            yield
    finally:
        dist.destroy_process_group()


def _trained(bench: Bench, batch: DataProto, *overrides: str) -> Trained:
    changes = ("actor.optimizer.lr=1e-3", f"actor.grad_clip={CLIP}", *overrides)
    batch = batch.slice()
    with bench.actor(*changes) as actor:
        before = _weights_of(actor)
        batch.union(actor.compute_log_prob(batch))
        norms = [actor.update(batch)["actor/grad_norm"]]
        # AdamW's first moment is a tenth of the first gradient.
        made = actor._backend._optimizer.moments()
        moments = [_local(each) for name, each in made.items() if name.endswith(".exp_avg")]
        clipped = float(torch.cat([each.cpu().flatten() for each in moments]).norm()) / (0.1 * CLIP)
        on_host = sum(each.device.type == "cpu" for each in moments) / len(moments)
        norms.append(actor.update(batch)["actor/grad_norm"])
        after = _weights_of(actor)
        memory = bench.memory
        memory.settle()
        buckets = actor.weight_buckets(BUCKET_BYTES)
        growth = memory.growth
        gathered = {name: (shape, dtype, data) for each in buckets for name, shape, dtype, data in each.tensors()}
        wrong = sum(
            not torch.equal(torch.from_numpy(data).view(getattr(torch, dtype)).view(shape),
                            after[name].to(getattr(torch, dtype)))
            for name, (shape, dtype, data) in gathered.items()
        )  # fmt: skip
        # Tied ones are sent once.
        assert gathered and gathered.keys() <= after.keys()
    moved = torch.cat([(after[name] - tensor).flatten() for name, tensor in before.items()])
    mask = batch.batch["response_mask"]
    return Trained(batch.batch["old_log_probs"][mask], moved, torch.tensor(norms), clipped, on_host, wrong, growth)


def _embedding_gib(bench: Bench) -> float:
    """The largest tensor, in float32."""
    return bench.shape.model.get("vocab_size", 0) * bench.shape.model.get("hidden_size", 0) * 4 / 2**30


def _weights_of(actor: ActorWorker) -> dict[str, Tensor]:
    """On the host; on a mesh of one rank a shard is the whole tensor."""
    return {name: _local(each).detach().to("cpu", copy=True) for name, each in actor.module.state_dict().items()}


def _local(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


Distances = tuple[float, float, float]


def _distances(found: Trained, expected: Trained) -> Distances:
    """Root mean square of log-probs, relative errors of norms and of what the weights have moved."""
    norms = (found.norms - expected.norms).abs() / expected.norms
    moved = (found.moved - expected.moved).norm() / expected.moved.norm()
    return _rms(found.log_probs - expected.log_probs), float(norms.max()), float(moved)


def _twice(distances: Distances) -> Distances:
    return 2 * distances[0], 2 * distances[1], 2 * distances[2]


def _compared(case: str, found: Distances, goals: tuple[float | None, ...]) -> Iterator[Figure]:
    names = ("log-probs, root mean square difference", "norm of the gradient, relative difference",
             "what the weights have moved, relative difference")  # fmt: skip
    for name, value, goal in zip(names, found, goals, strict=True):
        yield Figure(case, name, value, "", goal)


CHECKS: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "log-probs": log_probs,
    "packing": packing,
    "fsdp": fsdp,
    "ipc": ipc,
    "sleep": sleep,
    "offload": offload,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"all by default: {', '.join(CHECKS)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of kilobytes")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.checks if name not in CHECKS]
    if unknown:
        parser.error(f"unknown checks: {', '.join(unknown)}; allowed: {', '.join(CHECKS)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device here (--device cpu --tiny shows that the checks run)")
    shape = TINY if arguments.tiny else SHALLOW

    def measure() -> Iterator[Figure]:
        for name in arguments.checks or CHECKS:
            with tempfile.TemporaryDirectory() as temporary:
                yield from CHECKS[name](Bench(torch.device(arguments.device), shape, Path(temporary)))

    figures = report("Checks", measure(), arguments.json)
    sys.exit(any(figure.verdict == "miss" for figure in figures))


if __name__ == "__main__":
    main()
