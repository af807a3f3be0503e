"""LoRA adapters on the linear layers of a module; those of a batch are computed together, each row with its own.

Shapes: B rows, T new tokens of a row, C ranks of all adapters of the batch together, I and O features of a layer.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any

import torch

from agentrl_core.api import AdapterSlots, EngineError, WeightUpdate
from agentrl_core.engine_kit.adapters import PREFIX, AdapterVersion, scaling

Pair = tuple[torch.Tensor, torch.Tensor]
"""``A [C, I]`` and ``B [O, C]``, the adapter's factor included."""
Pairs = list[Pair]
"""Of each layer, in the order of ``Lora.modules``."""
Mix = tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]
"""What a forward adds to the model's own weights: ``[B, 1, C]`` True where a rank is not the row's own, ``A`` and ``B``
of each layer."""
Entry = AdapterVersion[Pairs | None]
"""``held`` is None where the adapter lies in the module itself, as PEFT puts it there."""


class Lora:
    """The adapters of a module: the engine's own, or those that PEFT has put into the actor's.

    While the engine computes, each layer adds what :meth:`using` says. A module of the actor computes its base then,
    and later has the adapters active that the actor left active.

    Args:
        module: with linear layers of the names in ``slots.targets``.
        shared: it is the actor's.
        within: the part of the module whose layers are meant, where others have the same names; None: all of it. It is
            for a module of the engine's own.

    Raises:
        EngineError: the actor's module lacks an adapter, or has one that is not plain LoRA.
    """

    def __init__(self, module: Any, slots: AdapterSlots, shared: bool, within: Any = None) -> None:
        layers = {name: part for name, part in module.named_modules() if name.rpartition(".")[2] in slots.targets}
        if shared:
            layers = {name: part for name, part in layers.items() if hasattr(part, "lora_A")}
            _check_shared(layers, slots)
        else:
            meant = set((module if within is None else within).modules())
            linear = {name: part for name, part in layers.items() if isinstance(part, torch.nn.Linear)}
            layers = {name: part for name, part in linear.items() if part in meant}
        if not layers:
            raise EngineError(f"the model has no linear layers named {', '.join(slots.targets)}, which adapters change")
        self.modules = {name: (part.out_features, part.in_features) for name, part in layers.items()}
        self._shared = shared
        self._layers: list[Any] = list(layers.values())
        self._linears: list[Any] = [part.get_base_layer() if shared else part for part in self._layers]
        weight = next(iter(self._layers[0].lora_A.values())).weight if shared else self._linears[0].weight
        self.dtype: torch.dtype = weight.dtype
        self._disabled: list[bool] | None = None
        self._mix: Mix | None = None
        self._entries: list[Entry] = []
        self._ranks = torch.empty(0, dtype=torch.long)
        self._down: list[torch.Tensor] = []
        self._up: list[torch.Tensor] = []
        self._rows: list[Entry | None] = []
        self._mask: torch.Tensor | None = None

    # What a forward computes --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """From now on the layers add what :meth:`using` says; does nothing a second time."""
        if self._disabled is not None:
            return
        self._disabled = [bool(getattr(layer, "_disable_adapters", False)) for layer in self._layers]
        for number, (layer, linear) in enumerate(zip(self._layers, self._linears, strict=True)):
            if self._shared:
                # Not enable_adapters(): that switches requires_grad too.
                layer._disable_adapters = True
            linear.forward = partial(self._forward, number, linear.forward)

    def end(self) -> None:
        """The layers are again as :meth:`begin` found them."""
        if self._disabled is None:
            return
        for layer, linear, disabled in zip(self._layers, self._linears, self._disabled, strict=True):
            del linear.forward
            if self._shared:
                layer._disable_adapters = disabled
        self._disabled = None
        # The actor may train what lies in the module.
        self.forget()

    def _forward(self, number: int, base: Callable[[torch.Tensor], torch.Tensor], x_BTI: torch.Tensor) -> torch.Tensor:
        output = base(x_BTI)
        if self._mix is None:
            return output
        hidden, downs, ups = self._mix
        if x_BTI.dim() == 2:  # some models have all tokens in one dimension here
            x_BTI = x_BTI.view(hidden.shape[0], -1, x_BTI.shape[-1])
        ranks_BTC = torch.nn.functional.linear(x_BTI.to(self.dtype), downs[number]).masked_fill(hidden, 0.0)
        added = torch.nn.functional.linear(ranks_BTC, ups[number]).to(output.dtype)
        return output + (added if output.dim() == 3 else added.view(-1, added.shape[-1]))

    @contextlib.contextmanager
    def using(self, mix: "Mix | tuple[()]") -> Iterator[None]:
        """Forwards add this; an empty one: nothing."""
        self._mix = mix or None
        try:
            yield
        finally:
            self._mix = None

    # The adapters of a batch --------------------------------------------------------------------------------------

    def mix(self, rows: SequenceOf[Entry | None]) -> "Mix | tuple[()]":
        """For rows with these adapters; empty where none has one."""
        used = list(dict.fromkeys(entry for entry in rows if entry is not None))
        if not used:
            return ()
        if used != self._entries:
            pairs = [self._pairs(entry) for entry in used]
            layers = list(zip(*pairs, strict=True))
            self._down = [_joined([a for a, _ in layer], 0) for layer in layers]
            self._up = [_joined([b for _, b in layer], 1) for layer in layers]
            self._entries, self._rows = used, []
            self._ranks = torch.tensor([each[0][0].shape[0] for each in pairs])
        if self._mask is None or self._rows != rows:
            self._rows, self._mask = list(rows), self._hide(rows)
        return self._mask, self._down, self._up

    def _hide(self, rows: SequenceOf[Entry | None]) -> torch.Tensor:
        numbers = {entry: number for number, entry in enumerate(self._entries)}
        owners_C = torch.repeat_interleave(torch.arange(len(self._entries)), self._ranks)
        rows_B = torch.tensor([-1 if entry is None else numbers[entry] for entry in rows])
        return (owners_C != rows_B[:, None, None]).to(self._down[0].device)

    def _pairs(self, entry: Entry) -> Pairs:
        if entry.held is not None:
            return entry.held
        rank = next(layer.r[entry.name] for layer in self._layers if entry.name in layer.lora_A)
        pairs = []
        for layer, linear in zip(self._layers, self._linears, strict=True):
            if entry.name in layer.lora_A:
                a, b = layer.lora_A[entry.name].weight.detach(), layer.lora_B[entry.name].weight.detach()
                pairs.append((a.to(self.dtype), (b * layer.scaling[entry.name]).to(self.dtype)))
            else:
                pairs.append(self._zeros(linear, rank))
        return pairs

    def forget(self, entry: Entry | None = None) -> None:
        """Nothing refers to it any more; None: all must be put together from the module again."""
        if entry is None or entry in self._entries:
            self._entries, self._down, self._up, self._rows, self._mask = [], [], [], [], None

    def example(self, rows: int) -> Mix:
        """Two adapters and rows with either or none, to record a forward with: the same for the same number of rows."""
        rank = 1 + rows % 3
        hidden = (torch.arange(2 * rank) // rank) != (torch.arange(rows) % 3)[:, None, None]
        place = {"device": self._linears[0].weight.device, "dtype": self.dtype}
        downs = [_waves(2 * rank, in_features).to(**place) for _, in_features in self.modules.values()]
        ups = [_waves(out_features, 2 * rank).to(**place) for out_features, _ in self.modules.values()]
        return hidden.to(place["device"]), downs, ups

    # The engine's own ---------------------------------------------------------------------------------------------

    def load(self, update: WeightUpdate, tensors: Iterator[tuple[str, torch.Tensor]]) -> Pairs:
        """The tensors of a checked update, in the dtype and on the device of the module."""
        assert update.adapter is not None
        config = update.adapter.config
        given = dict(tensors)
        pairs = []
        for name, linear in zip(self.modules, self._linears, strict=True):
            a, b = (given.get(f"{PREFIX}{name}.lora_{part}.weight") for part in "AB")
            if a is None or b is None:
                pairs.append(self._zeros(linear, int(config["r"])))
            else:
                pairs.append((a.to(linear.weight), (b.float() * scaling(config)).to(linear.weight)))
        return pairs

    def _zeros(self, linear: Any, rank: int) -> Pair:
        """Of a layer that the adapter leaves as it is."""
        place = {"device": linear.weight.device, "dtype": self.dtype}
        return torch.zeros(rank, linear.in_features, **place), torch.zeros(linear.out_features, rank, **place)


def move(entries: "Iterator[Entry]", device: torch.device | str) -> None:
    """Bring the engine's own adapters to a device."""
    for entry in entries:
        if entry.held is not None:
            entry.held = [(a.to(device), b.to(device)) for a, b in entry.held]


def _joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _waves(rows: int, columns: int) -> torch.Tensor:
    return (torch.arange(rows * columns) * 0.7).sin().view(rows, columns) * 0.1


def _check_shared(layers: Mapping[str, Any], slots: AdapterSlots) -> None:
    there = {name for layer in layers.values() for name in layer.lora_A}
    if missing := sorted(set(slots.names) - there):
        raise EngineError(
            f"the actor's module has no adapter {', '.join(map(repr, missing))} on layers named "
            f"{', '.join(slots.targets)}; it has: {', '.join(sorted(there)) or 'none'}"
        )
    for name, layer in layers.items():
        if special := sorted(set(slots.names) & layer.lora_variant.keys()):
            raise EngineError(
                f"{name}: adapter {special[0]!r} is not plain LoRA ({type(layer.lora_variant[special[0]]).__name__}); "
                "the hf engine serves plain LoRA only: switch use_dora and its like off"
            )
