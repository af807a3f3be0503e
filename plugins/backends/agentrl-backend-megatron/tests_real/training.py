"""What the ranks of the tests do, each in its process."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from reference import BETAS, DECAY, LR, NORM, TEMPERATURE, loss_of, make_rows

from agentrl_backend_megatron.backend import Megatron
from agentrl_backend_megatron.config import MegatronConfig
from agentrl_core.api.errors import ConfigError
from agentrl_core.api.training_backend import MicroBatch, Outputs, TrainingContext, Wanted, described

WANTED = Wanted(TEMPERATURE, "gradient")


def backend_of(rank: int, size: int, path: str, trains: bool = True, **options: Any) -> Megatron:
    recomputes = options.pop("recomputes", False)
    model = SimpleNamespace(dtype="float32", compute_dtype=None, gradient_checkpointing=recomputes)
    engine_dtype = options.pop("engine_dtype", "float32")
    optimizer = SimpleNamespace(lr=LR, betas=list(BETAS), weight_decay=DECAY)
    context = TrainingContext(
        "actor", "tokens", trains, path, "model.path", model, SimpleNamespace(optimizer=optimizer), rank=rank,
        world_size=size, longest=64, engine_dtype=engine_dtype,
    )  # fmt: skip
    backend = Megatron(MegatronConfig(**options), context)
    try:
        backend.load()
    except ConfigError:
        # Its process is used again, with other groups of ranks.
        backend.close()
        raise
    return backend


def own_micros(backend: Megatron, rows_each: int = 2) -> list[MicroBatch]:
    """Those of this rank's part, as many on each part."""
    share, rows = backend.share, make_rows()
    own = torch.arange(len(rows["input_ids"]))[share.index :: share.count]
    return [MicroBatch(part, {name: column[part] for name, column in rows.items()}) for part in own.split(rows_each)]


def step(backend: Megatron, rows_each: int = 2, scale: float = 1.0) -> float:
    """One optimizer step; the norm."""
    micros = own_micros(backend, rows_each)
    tokens = int(make_rows()["response_mask"].sum())

    def loss(number: int, outputs: Outputs) -> torch.Tensor:
        assert outputs.log_probs is not None and outputs.entropies is not None
        return scale * loss_of(outputs.log_probs, outputs.entropies, micros[number].columns, tokens)

    with backend.updating(0):
        # In two calls, whose gradients add up.
        backend.forward_backward(micros[:1], WANTED, loss)
        backend.forward_backward(micros[1:], WANTED, lambda number, outputs: loss(number + 1, outputs))
        return backend.optimizer_step(LR, NORM)


def weights(backend: Megatron, everywhere: bool = True, bucket_bytes: int = 4096) -> dict[str, torch.Tensor]:
    found = {}
    for bucket in backend.weights(bucket_bytes, everywhere=everywhere):
        found |= {name: tensor.clone() for name, tensor in bucket.items()}
    return found


def run(rank: int, size: int, path: str, options: dict[str, Any], steps: int, folder: str = "") -> dict[str, Any]:
    """Log-probs of this rank's rows, norms of the steps and the weights; a snapshot after the first and the last."""
    backend = backend_of(rank, size, path, **options)
    try:
        micros = own_micros(backend)
        with torch.no_grad():
            outputs = list(backend.forward(micros, WANTED))
        share = backend.share
        found: dict[str, Any] = {"share": share, "loaded": weights(backend), "norms": []}
        if share.counts:
            found["rows"] = torch.cat([micro.rows for micro in micros])
            found["log_probs"] = torch.cat([each.log_probs for each in outputs])
            found["entropies"] = torch.cat([each.entropies for each in outputs])
        for number in range(steps):
            found["norms"].append(step(backend))
            backend.steps += 1
            if folder and number in (0, steps - 1):
                backend.snapshot()(f"{folder}/{number + 1}")
        found["trained"] = weights(backend)
        found["layout"] = backend.weight_layout(4096)
        return found
    finally:
        backend.close()


def resumed(rank: int, size: int, path: str, options: dict[str, Any], checkpoint: str, steps: int) -> dict[str, Any]:
    """More steps after a checkpoint."""
    backend = backend_of(rank, size, path, **options)
    try:
        backend.restore(checkpoint)
        before = backend.steps
        norms = [step(backend) for _ in range(steps)]
        return {"steps": before, "norms": norms, "trained": weights(backend)}
    finally:
        backend.close()


def layout(rank: int, size: int, path: str, options: dict[str, Any]) -> dict[str, Any]:
    """What is announced of the weights, what comes, and how many tensors come where they need not."""
    backend = backend_of(rank, size, path, **options)
    try:
        return {
            "layout": backend.weight_layout(4096),
            "described": [described(bucket) for bucket in backend.weights(4096, everywhere=True)],
            "elsewhere": len(weights(backend, everywhere=False)),
        }
    finally:
        backend.close()


def not_finite(rank: int, size: int, path: str, options: dict[str, Any]) -> dict[str, Any]:
    """A step whose loss is infinite, and one that is not."""
    backend = backend_of(rank, size, path, **options)
    try:
        before = weights(backend)
        norm = step(backend, scale=float("inf"))
        return {"norm": norm, "before": before, "after": weights(backend), "next": step(backend)}
    finally:
        backend.close()


def refused(rank: int, size: int, path: str, options: dict[str, Any]) -> str:
    """What loading raises."""
    try:
        backend_of(rank, size, path, **options)
    except ConfigError as error:
        return str(error)
    return ""


def refused_by_megatron(rank: int, size: int, path: str, options: dict[str, Any]) -> str:
    """The same with Megatron-Core's own attention."""
    from megatron_cpu_attention import OWN_INIT, DotProductAttention

    with patch.object(DotProductAttention, "__init__", OWN_INIT):
        return refused(rank, size, path, options)
