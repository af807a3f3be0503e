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


@dataclass
class Phase:
    """What one phase of a worker did.

    Args:
        peak: bytes at the moment with the most.
        parts: bytes by part at that moment.
        operations: floating-point operations by dtype.
        collectives: bytes that this rank sends or receives, by collective.
        calls: number of calls, by collective.
    """

    peak: int = 0
    parts: Mapping[str, int] = field(default_factory=dict)
    operations: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)


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
        self._phases: dict[str, Phase] = {}
        self.phase = Phase()
        """The phase that runs."""

    @property
    def phases(self) -> Mapping[str, Phase]:
        """By name, in the order in which they ran."""
        return self._phases

    @property
    def total(self) -> int:
        """Bytes that are allocated now."""
        return self._total

    @contextmanager
    def during(self, name: str) -> Iterator[Phase]:
        """A phase; one that comes again adds to its operations, and keeps the higher peak."""
        outer, self.phase = self.phase, self._phases.setdefault(name, Phase())
        self._note_peak()
        try:
            yield self.phase
        finally:
            self.phase = outer

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
        if self._total > self.phase.peak:
            self._note_peak()

    def _note_peak(self) -> None:
        if self._total >= self.phase.peak:
            self.phase.peak = self._total
            self.phase.parts = dict(self._totals)

    def _forget(self, key: int) -> None:
        self._references.pop(key, None)
        block = self._blocks.pop(key, None)
        if block is not None:
            self._totals[block.part] -= block.nbytes
            self._total -= block.nbytes
