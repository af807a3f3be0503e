"""How weights that stay at the server reach its sampler: one tensor, whose bytes are their path there."""

from typing import TYPE_CHECKING

import numpy as np

from agentrl_core.api.errors import EngineError
from agentrl_core.api.weights import WeightUpdate

if TYPE_CHECKING:
    import torch

NAME = "tinker.path"
SIZE = 1024
"""Bytes, padded with zeros: all updates have the same layout."""


def path_tensor(path: str) -> "dict[str, torch.Tensor]":
    """By name, a tensor uint8 [SIZE]."""
    import torch

    return {NAME: torch.frombuffer(bytearray(path.encode().ljust(SIZE, b"\0")), dtype=torch.uint8)}


def path_of(update: WeightUpdate) -> str:
    """The path in an update.

    Raises:
        EngineError: it is an update of another training backend.
    """
    found = [each for bucket in update for each in bucket.tensors()]
    if update.broadcast is not None or len(found) != 1 or found[0][0] != NAME:
        raise EngineError(
            "the engine 'tinker' samples with weights that the training backend 'tinker' has at the server, and cannot "
            f"take others (found {len(found)} tensors). Set trainer.backend.name=tinker, or choose another engine"
        )
    return np.ascontiguousarray(found[0][3]).tobytes().rstrip(b"\0").decode()
