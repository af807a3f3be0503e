"""The routers of a model of experts in transformers: which experts they choose, written down and given back.

A router computes a score for each expert and takes the largest ones with ``torch.topk``. That call is watched: its
choice is kept, or replaced by another one, whose scores then become weights as the router's own do.

Shapes: T tokens of a forward pass, N layers of the model, E experts, k chosen ones of each token.
"""

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from agentrl_core.api.errors import ConfigError, WorkerError

if TYPE_CHECKING:
    from torch import Tensor

_ROUTER = re.compile(r"Top[kK]Router$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class _Choice:
    """What a router chooses, and what it is given instead.

    Args:
        experts: E.
        given: [T, k] int64; where it is not below E the router chooses. None: everywhere.
    """

    def __init__(self, experts: int, given: "Tensor | None") -> None:
        self._experts, self.given = experts, given
        self.own: Tensor | None = None

    def result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a call that the router makes to torch."""
        import torch

        result = func(*args, **kwargs)
        # Groups of experts may be chosen before.
        if func not in (torch.topk, torch.Tensor.topk) or args[0].shape[-1] != self._experts:
            return result
        if result.indices.ndim != 2 or (self.given is not None and self.given.shape != result.indices.shape):
            return result
        self.own = result.indices
        if self.given is None:
            return result
        chosen = torch.where(self.given < self._experts, self.given, result.indices)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


@functools.cache
def _watching() -> Any:
    """A context in which a :class:`_Choice` sees all calls of torch."""
    # Engines in other interpreters import this package without torch.
    from torch.overrides import TorchFunctionMode

    class Watching(TorchFunctionMode):
        def __init__(self, choice: _Choice) -> None:
            super().__init__()
            self._choice = choice

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return self._choice.result(func, args, kwargs or {})

    return Watching


class Routers:
    """The routers of a model of transformers, which get another ``forward``: it does the same until :attr:`given` is
    set.

    Attributes:
        given: [T, N, k] integers, the experts of the tokens of forward passes, and of their backward passes. The
            largest number of their type, and what is not below E, are left to the router. None: all are.
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
        self._differing: list[tuple[Tensor, Tensor]] = []
        for name, module in model.named_modules():
            if (layer := _LAYER.search(name)) and _ROUTER.search(type(module).__name__):
                self.experts = int(module.weight.shape[0])
                module.forward = functools.partial(self._forward, int(layer[1]), module.forward)
        if not self.experts:
            raise ConfigError(
                f"{key}: {type(model).__name__} has no routers that choose experts for each token; remove the key"
            )

    def _forward(self, layer: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if self.given is None and self._kept is None:
            return forward(*args, **kwargs)
        choice = _Choice(self.experts, self._given_to(layer))
        with _watching()(choice):
            result = forward(*args, **kwargs)
        own, given = choice.own, choice.given
        if own is None and given is not None:
            raise WorkerError(
                f"router replay: the router of layer {layer} did not take the experts of {len(given)} tokens; set "
                "actor.router_replay=false"
            )
        if own is not None and self._kept is not None:
            self._kept[layer] = own
        if own is not None and given is not None:
            known = given < self.experts
            missed = known & (given.unsqueeze(-1) != own.unsqueeze(-2)).all(-1)
            self._differing.append((missed.sum(), known.sum()))
        return result

    def _given_to(self, layer: int) -> "Tensor | None":
        if self.given is None:
            return None
        import torch

        own = self.given[:, layer]
        return own.long().masked_fill(own == torch.iinfo(own.dtype).max, self.experts)

    @contextmanager
    def kept(self) -> "Iterator[dict[int, Tensor]]":
        """Inside, forward passes leave here what each layer's router chose itself, [T, k]."""
        self._kept = {}
        try:
            yield self._kept
        finally:
            self._kept = None

    def stacked(self, kept: "dict[int, Tensor]") -> "Tensor":
        """[T, N, k] int16 of what :meth:`kept` gives; 0 for layers without experts."""
        import torch

        nothing = torch.zeros_like(next(iter(kept.values())))
        return torch.stack([kept.get(layer, nothing) for layer in range(self.layers)], 1).to(torch.int16)

    def share_that_differs(self) -> float | None:
        """Of the experts that were given since the last call, those that the routers would not have chosen."""
        if not self._differing:
            return None
        missed, known = (int(sum(each)) for each in zip(*self._differing, strict=True))
        self._differing.clear()
        return missed / max(known, 1)
