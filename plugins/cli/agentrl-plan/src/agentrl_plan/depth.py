"""How many of a model's layers are enough: what repeats costs the same each time.

A phase whose model computes with a few layers is simulated twice, the second time with a few more of them. At each
place of the code memory, operations and communication then grow by the same amount with every further repetition, so
those of all layers follow: see :meth:`agentrl_plan.ledger.Phase.deeper`. Weights, moments, optimizer steps
and sent weights are always those of all layers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from agentrl_plan.ledger import Ledger

_ENDS = 2
"""Repetitions at each end that differ from those between: nothing is gathered ahead of or kept from a neighbour."""
_SCALARS = (bool, int, float, str, torch.dtype)


class AllLayersNeeded(Exception):
    """A few layers do not say what all of them take; for one, if the model's code ignores the number of its config."""


@dataclass(frozen=True)
class Depth:
    """Numbers of layers to simulate.

    Args:
        layers: of the model.
        less: of the first simulation.
        more: of the second one, ``less`` and one repetition; the same where all layers are simulated.
        first: layers from the first one on whose places are kept apart.
        last: the same from the last one back.
    """

    layers: int
    less: int
    more: int
    first: int
    last: int

    @property
    def times(self) -> int:
        """Repetitions that the first simulation lacks."""
        return (self.layers - self.less) // max(self.more - self.less, 1)

    @classmethod
    def of(cls, layers: Sequence[nn.Module], every: bool = False) -> "Depth":
        """The fewest that are enough, where after some first layers one or several kinds of them repeat; or ``every``
        layer."""
        count, kinds = len(layers), [_kind(layer) for layer in layers]
        found = [cls(count, count, count, count, count)]
        for period in range(1, 0 if every else count // (2 * _ENDS) + 1):
            same = [kinds[place] == kinds[place + period] for place in range(count - period)]
            first = max((place + 1 for place, is_same in enumerate(same) if not is_same), default=0)
            first += (count - first) % period
            less = first + (2 * _ENDS - 1) * period
            found.append(cls(count, less, less + period, first + _ENDS * period, _ENDS * period))
        return min(found, key=lambda depth: depth.more)


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """Equal for layers that compute alike: their modules, settings and shapes, but for the layer's number."""
    modules = [
        (name, type(module), [(key, value) for key, value in vars(module).items()
                              if isinstance(value, _SCALARS) and "idx" not in key])
        for name, module in layer.named_modules()
    ]  # fmt: skip
    return (modules, [(name, each.shape, each.dtype) for name, each in layer.named_parameters()])


class Layers:
    """The layers of one model: how many compute, and where the code is among them.

    Args:
        model: of transformers. Its config says how many layers compute: from now on so many as the depth takes at most.
        layers: of the model, before they are sharded.
        ledger: where the code's place is noted.
        every: all layers compute.
    """

    def __init__(self, model: Any, layers: Sequence[nn.Module], ledger: Ledger, every: bool) -> None:
        self._config, self._layers, self._ledger = model.config.get_text_config(decoder=True), layers, ledger
        self._count = len(layers)
        self.depth = Depth.of(layers, every or self._config.num_hidden_layers != len(layers))
        self.compute(self.depth.more)
        model.register_forward_hook(lambda *_: ledger.at(("after", ledger.phase.passes, 0)))
        for place, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._entering(place))
            layer.register_forward_hook(self._leaving(place))

    def compute(self, count: int) -> None:
        """Let the first ``count`` layers compute."""
        if count != self._count:
            self._count = self._config.num_hidden_layers = count

    @property
    def idle(self) -> Iterator[nn.Parameter]:
        """Parameters of the layers that do not compute."""
        for layer in self._layers[self._count :]:
            yield from layer.parameters()

    def _entering(self, place: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if place >= self._count:
                raise AllLayersNeeded
            # Not where activations are computed once more, in the backward pass.
            if torch._C._current_graph_task_id() == -1:
                self._ledger.phase.passes += place == 0
                self._at("forward", place)

        return hook

    def _leaving(self, place: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            states = output if isinstance(output, Tensor) else output[0]
            if states.requires_grad and torch._C._current_graph_task_id() == -1:
                states.register_hook(lambda _: self._at("backward", place))

        return hook

    def _at(self, kind: str, place: int) -> None:
        depth = self.depth
        names = [each for each in (place, place - self._count) if -depth.last <= each < depth.first]
        self._ledger.at(*((kind, self._ledger.phase.passes, each) for each in names))
