"""The routers of a model of experts in transformers: which experts they choose, written down and given back.

A router computes a score for each expert and takes the largest ones with ``torch.topk``. That call is watched: its
choice is kept, or replaced by another one, whose scores then become weights as the router's own do.

Shapes: T tokens of a forward pass, N layers of the model, E experts, k chosen ones of each token.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from agentrl_core.api.errors import ConfigError

_ROUTER = re.compile(r"Top[kK]Router$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_CHOICES = (torch.topk, Tensor.topk)


class _Choice(TorchFunctionMode):
    """What a router chooses, and what it is given instead.

    Args:
        experts: E.
        given: [T, k] int64; where it is not below E the router chooses. None: everywhere.
    """

    def __init__(self, experts: int, given: Tensor | None) -> None:
        super().__init__()
        self._experts, self._given = experts, given
        self.own: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Groups of experts may be chosen before.
        if func not in _CHOICES or result.indices.ndim != 2 or args[0].shape[-1] != self._experts:
            return result
        if self._given is not None and self._given.shape != result.indices.shape:
            return result
        self.own = result.indices
        if self._given is None:
            return result
        chosen = torch.where(self._given < self._experts, self._given, result.indices)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


class Routers:
    """The routers of a model of transformers, which get another ``forward``: it does the same until :attr:`given` is
    set.

    Attributes:
        given: [T, N, k] integers, the experts of the tokens of forward passes, and of their backward passes; those
            that are not below E are left to the router. None: all are.
        layers: N.
        experts: E.

    Args:
        key: that asked for it, for messages.

    Raises:
        ConfigError: the model has no such routers.
    """

    def __init__(self, model: Any, key: str) -> None:
        self.given: Tensor | None = None
        self.layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
        self.experts = 0
        self._kept: dict[int, Tensor] | None = None
        self._differing: list[Tensor] = []
        for name, module in model.named_modules():
            if (layer := _LAYER.search(name)) and _ROUTER.search(type(module).__name__):
                self.experts = int(module.weight.shape[0])
                module.forward = partial(self._forward, int(layer[1]), module.forward)
        if not self.experts:
            raise ConfigError(
                f"{key}: {type(model).__name__} has no routers that choose experts for each token; remove the key"
            )

    def _forward(self, layer: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if self.given is None and self._kept is None:
            return forward(*args, **kwargs)
        choice = _Choice(self.experts, None if self.given is None else self.given[:, layer].long())
        with choice:
            result = forward(*args, **kwargs)
        own, given = choice.own, choice._given
        if own is not None and self._kept is not None:
            self._kept[layer] = own
        if own is not None and given is not None:
            known = given < self.experts
            missed = known & (given.unsqueeze(-1) != own.unsqueeze(-2)).all(-1)
            self._differing.append(torch.stack([missed.sum(), known.sum()]))
        return result

    @contextmanager
    def kept(self) -> Iterator[dict[int, Tensor]]:
        """Inside, forward passes leave here what each layer's router chose itself, [T, k]."""
        self._kept = {}
        try:
            yield self._kept
        finally:
            self._kept = None

    def stacked(self, kept: dict[int, Tensor]) -> Tensor:
        """[T, N, k] int16 of what :meth:`kept` gives; 0 for layers without experts."""
        known = next(iter(kept.values()))
        nothing = torch.zeros_like(known)
        return torch.stack([kept.get(layer, nothing) for layer in range(self.layers)], 1).to(torch.int16)

    def share_that_differs(self) -> float | None:
        """Of the experts that were given since the last call, those that the routers would not have chosen."""
        if not self._differing:
            return None
        missed, known = torch.stack(self._differing).sum(0).tolist()
        self._differing.clear()
        return float(missed / max(known, 1))
