"""The memory that is allocated while workers run, by what it is for."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

WEIGHTS, GRADIENTS, MOMENTS = "weights", "gradients", "moments"
GATHERED, LOGITS, ACTIVATIONS = "gathered", "logits", "activations"
PARTS = (WEIGHTS, GRADIENTS, MOMENTS, GATHERED, LOGITS, ACTIVATIONS)
"""``gathered``: parameters of other ranks, and the buffers of collectives. ``activations`` is everything else."""


Place = tuple[str, int, int]
"""Where code is: forward or backward pass, its number, and a layer; counted from the last layer where negative."""
START: Place = ("start", 0, 0)
STEP: Place = ("step", 0, 0)


@dataclass
class Phase:
    """What one phase of a worker did.

    Args:
        parts_at: bytes by part at the fullest moment of each place.
        passes: forward passes that entered the first layer.
        operations: floating-point operations by dtype.
        collectives: bytes that this rank sends or receives, by collective.
        each_pass: those of them between the first layer's first forward pass and its second: what one more
            micro-batch adds. What is gathered once for a phase, and what an optimizer step sends, does not grow.
        calls: number of calls, by collective.
    """

    parts_at: dict[Place, Mapping[str, int]] = field(default_factory=dict)
    passes: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)
    each_pass: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def parts(self) -> Mapping[str, int]:
        """Bytes by part at the moment with the most."""
        return max(self.parts_at.values(), key=_total, default={})

    @property
    def peak(self) -> int:
        """Bytes at that moment."""
        return _total(self.parts)

    def deeper(self, more: "Phase", times: int) -> "Phase":
        """The phase of a model with more layers, where ``more`` is that of one with a few more.

        At each place every figure grows by the same amount with each further layer.
        """

        def grown(less: Mapping[str, int], more: Mapping[str, int]) -> Counter[str]:
            return Counter({key: less.get(key, 0) + times * (more[key] - less.get(key, 0)) for key in more})

        return Phase(
            {place: grown(parts, more.parts_at[place]) for place, parts in self.parts_at.items()}, self.passes,
            grown(self.operations, more.operations), grown(self.collectives, more.collectives),
            grown(self.each_pass, more.each_pass), grown(self.calls, more.calls),
        )  # fmt: skip


def _total(parts: Mapping[str, int]) -> int:
    return sum(parts.values())


@dataclass
class _Block:
    nbytes: int
    part: str


class Ledger:
    """Bytes of the storages that live on one device.

    Args:
        round_up: gives what the device's allocator takes for a number of bytes.
    """

    def __init__(self, round_up: Callable[[int], int] = lambda nbytes: nbytes) -> None:
        self._round_up = round_up
        self._blocks: dict[int, _Block] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._totals: Counter[str] = Counter()
        self._total = 0
        self._peak = 0
        self._places: tuple[Place, ...] = (START,)
        self.phase = Phase()
        """The phase that runs."""

    @property
    def total(self) -> int:
        """Bytes that are allocated now."""
        return self._total

    @contextmanager
    def during(self) -> Iterator[Phase]:
        """A new phase."""
        outer, self.phase = self.phase, Phase()
        self.at(START)
        try:
            yield self.phase
        finally:
            self.phase = outer
            self.at(START)

    def at(self, *places: Place) -> None:
        """Code comes to a place, which may have several names."""
        self._places, self._peak = places, -1
        self._note_peak()

    def allocate(self, storage: torch.UntypedStorage, part: str = ACTIVATIONS) -> None:
        """Note a storage, unless it is known."""
        key = storage._cdata
        if key in self._blocks:
            return
        self._blocks[key] = block = _Block(self._round_up(storage.nbytes()), part)
        self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
        self._add(part, block.nbytes)

    def name(self, storage: torch.UntypedStorage, part: str) -> None:
        """Say what a storage is for."""
        block = self._blocks.get(storage._cdata)
        if block is None:
            self.allocate(storage, part)
        elif block.part != part:
            self._totals[block.part] -= block.nbytes
            self._totals[part] += block.nbytes
            block.part = part

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Note a storage's new size. What FSDP2 grows and shrinks are gathered parameters."""
        block = self._blocks.get(storage._cdata)
        if block is None:
            return
        self.name(storage, GATHERED)
        nbytes = self._round_up(storage.nbytes())
        change, block.nbytes = nbytes - block.nbytes, nbytes
        self._add(block.part, change)

    def passing(self, nbytes: int, part: str = ACTIVATIONS) -> None:
        """Memory that an operation takes and gives back before it returns."""
        self._add(part, nbytes)
        self._add(part, -nbytes)

    def _add(self, part: str, nbytes: int) -> None:
        self._totals[part] += nbytes
        self._total += nbytes
        if self._total > self._peak:
            self._note_peak()

    def _note_peak(self) -> None:
        self._peak = self._total
        for place in self._places:
            if self._total >= _total(self.phase.parts_at.get(place, {})):
                self.phase.parts_at[place] = dict(self._totals)

    def _forget(self, key: int) -> None:
        self._references.pop(key, None)
        block = self._blocks.pop(key, None)
        if block is not None:
            self._totals[block.part] -= block.nbytes
            self._total -= block.nbytes
