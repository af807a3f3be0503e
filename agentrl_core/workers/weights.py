"""Weights and training state on their way: to engines, to checkpoints, and back."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agentrl_core.api.errors import CheckpointError
from agentrl_core.api.weights import ArrayBucket
from agentrl_core.workers.models import quiet_progress
from agentrl_core.workers.optimizer import ScheduledAdamW

OPTIMIZER_FILE = "optimizer.pt"


def iter_weight_buckets(model: nn.Module, bucket_bytes: int) -> Iterator[ArrayBucket]:
    """All weights as raw bytes on the host, in order, under the names of ``model.state_dict()``.

    Tied weights come once, under the first of their names. A bucket holds at most ``bucket_bytes``, or one tensor; a
    single tensor that is on the host already is not copied.
    """
    pending: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in _untied(model):
        if pending and size + tensor.nbytes > bucket_bytes:
            yield _bucket(pending)
            pending, size = [], 0
        pending.append((name, tensor))
        size += tensor.nbytes
    if pending:
        yield _bucket(pending)


def _untied(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if place not in seen:
            seen.add(place)
            yield name, tensor


def _bucket(tensors: list[tuple[str, Tensor]]) -> ArrayBucket:
    raw = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for _, tensor in tensors]
    return ArrayBucket(
        names=tuple(name for name, _ in tensors),
        shapes=tuple(tuple(tensor.shape) for _, tensor in tensors),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors),
        data=raw[0] if len(raw) == 1 else np.concatenate(raw),
    )


def save_model(model: Any, path: str) -> None:
    """Config and safetensors in Hugging Face layout, in the weights' own dtype."""
    with quiet_progress():
        model.save_pretrained(path)


def save_training_state(path: str, optimizer: ScheduledAdamW) -> None:
    """Optimizer, schedule and torch's generators, beside the weights."""
    generators = {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}
    torch.save({"optimizer": optimizer.state_dict(), "generators": generators}, Path(path) / OPTIMIZER_FILE)


def load_training_state(path: str, optimizer: ScheduledAdamW) -> None:
    """Take over what :func:`save_training_state` wrote. Raises CheckpointError where it does not fit."""
    file = Path(path) / OPTIMIZER_FILE
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["generators"]["cpu"])
        if state["generators"]["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["generators"]["cuda"])
    except (OSError, RuntimeError, EOFError, KeyError, ValueError, TypeError, pickle.UnpicklingError) as error:
        raise unreadable(str(file), error) from error


def copy_weights(target: nn.Module, source: nn.Module, path: str) -> None:
    """Overwrite ``target``'s weights in place, so that whoever shares the module sees them."""
    try:
        target.load_state_dict(source.state_dict())
    except RuntimeError as error:
        raise unreadable(path, error) from error


def unreadable(path: str, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path}: cannot be read or does not belong to this model ({error}); "
        "resume from another one (trainer.resume=PATH)"
    )
