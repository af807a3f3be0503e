"""Values of small tensors of a simulation: token ids, masks, lengths.

Shapes and decisions depend on a few integers that the host makes. They are computed beside the tensors without data;
what a model computes from its weights stays unknown.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

LARGEST = 2**24
"""Elements of the largest tensor whose values are computed."""
_ATTRIBUTE = "_agentrl_known"
no_dispatch = torch._C._DisableTorchDispatch


class Known:
    """The values of a tensor, until something unknown is written into them or into what they are a view of."""

    __slots__ = ("_valid", "tensor")

    def __init__(self, tensor: Tensor, valid: list[bool] | None = None) -> None:
        self.tensor = tensor
        self._valid = [True] if valid is None else valid

    @property
    def is_valid(self) -> bool:
        return self._valid[0]

    def spoil(self) -> None:
        self._valid[0] = False

    def same_memory(self, tensor: Tensor) -> "Known":
        """The values of a view: something unknown that is written into one spoils both."""
        return Known(tensor, self._valid)


def known_of(tensor: Tensor) -> Known | None:
    """The values of a fake tensor; None where they are unknown."""
    known: Known | None = getattr(tensor, _ATTRIBUTE, None)
    return known if known is not None and known.is_valid else None


def set_known(tensor: Any, known: Known) -> None:
    setattr(tensor, _ATTRIBUTE, known)


def forget(tensor: Tensor) -> None:
    """Something unknown was written into a tensor."""
    known: Known | None = getattr(tensor, _ATTRIBUTE, None)
    if known is not None:
        known.spoil()


def is_fake(tensor: Any) -> bool:
    return isinstance(tensor, FakeTensor)
