"""Weights, moments and steps on disk, under names of the hub: any mesh reads what another one wrote.

Every rank brings together some of the parameters that it has pieces of, the same number as the others, and writes
these: weights as the hub has them, and below ``training`` a checkpoint of torch (DCP) with the entries of the built-in
backend, so that a model moves from one to the other with its moments. There the experts of a layer are stacked, as
transformers has them.
"""

import json
import pickle
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from agentrl_backend_megatron.exchange import Piece, Pieces
from agentrl_backend_megatron.files import INDEX, WHOLE, HubFiles
from agentrl_backend_megatron.mesh import Mesh
from agentrl_backend_megatron.names import EMBEDDING, OUTPUT, Unit
from agentrl_backend_megatron.optimizer import MOMENTS, Optimizer
from agentrl_core.api.errors import CheckpointError
from agentrl_core.api.training_backend import TrainingContext
from agentrl_core.fsdp2.checkpoints import MetadataReader

FOLDER = "training"
HOST = torch.device("cpu")
_LM_HEAD = "lm_head.weight"


class Checkpoints:
    """Args:
    names: this rank's parameters, with the units that they are.
    units: of the whole model.
    index: of this rank among those that split a layer.

    All ranks must make this together.
    """

    def __init__(
        self, optimizer: Optimizer, names: Mapping[str, Unit], units: Sequence[Unit], mesh: Mesh, hub: HubFiles,
        context: TrainingContext, index: int,
    ) -> None:  # fmt: skip
        self._optimizer, self._names, self._units = optimizer, names, units
        self._mesh, self._hub, self._context, self._index = mesh, hub, context, index
        self._rank, self._size = context.rank, context.world_size
        # Of a thread of its own: its messages must not meet those of training.
        self._group = dist.new_group(backend="gloo") if self._size > 1 else None
        self._parameters = dict(optimizer.trained())
        self._pieces = Pieces(self._own_pieces(), mesh.tensor, self._rank, self._size)
        self._writers = self._spread()

    def _own_pieces(self) -> dict[str, Piece]:
        found = {}
        for name, unit in self._names.items():
            if (name == OUTPUT and unit.name == EMBEDDING) or (unit.cut == "whole" and not self._gives(unit)):
                continue
            index = 0 if unit.cut == "whole" else self._index
            if (piece := self._optimizer.piece_of(self._parameters[name], self._rank, index)) is not None:
                found[unit.hub[0]] = piece
        return found

    def _gives(self, unit: Unit) -> bool:
        """Of ranks that split a layer, all have what is not cut, but one gives it."""
        return unit.expert is not None or self._index == 0

    def _holders(self, unit: Unit) -> list[int]:
        return sorted({piece.rank for piece in self._pieces.by_unit[unit.hub[0]]})

    def _spread(self) -> dict[str, int]:
        """Who writes which unit; a stack has one writer."""
        found: dict[str, int] = {}
        by_stack: dict[str, int] = {}
        for number, unit in enumerate(self._units):
            holders = self._holders(unit)
            found[unit.hub[0]] = by_stack.setdefault(unit.stack or unit.hub[0], holders[number % len(holders)])
        return found

    # Writing ------------------------------------------------------------------------------------------------------

    def copied(self, steps: int) -> Callable[[str], Sequence[str]]:
        """Copy what this rank has to host memory; what is returned writes it, see
        :meth:`agentrl_core.api.training_backend.TrainingBackend.snapshot`."""
        own = {
            unit.hub[0]: {key: tensor.to(HOST, copy=True) for key, tensor in self._state(name).items()}
            for name, unit in self._names.items()
            if unit.hub[0] in self._own_keys and not (name == OUTPUT and unit.name == EMBEDDING)
        }
        updates = self._optimizer.updates

        def write(path: str) -> Sequence[str]:
            return self._write(path, own, steps, updates)

        return write

    @property
    def _own_keys(self) -> set[str]:
        pieces = self._pieces.by_unit
        return {key for key in pieces if any(piece.rank == self._rank for piece in pieces[key])}

    def _state(self, name: str) -> dict[str, Tensor]:
        return self._optimizer.state_of(self._parameters[name])

    def _write(self, path: str, own: Mapping[str, dict[str, Tensor]], steps: int, updates: int) -> list[str]:
        weights: dict[str, Tensor] = {}
        state: dict[str, Tensor] = {}
        stacks: dict[str, list[Tensor]] = defaultdict(list)
        dtype = getattr(torch, self._context.model.dtype)
        for unit in self._units:
            key = unit.hub[0]
            for part in ("param", *MOMENTS):
                whole = self._pieces.whole(
                    unit, key, self._writers[key], lambda key=key, part=part: own[key][part],  # type: ignore[misc]
                    torch.float32, HOST, self._group,
                )  # fmt: skip
                if whole is None:
                    continue
                tensors = unit.separated(whole)
                if part == "param":
                    weights |= {name: tensor.to(dtype) for name, tensor in tensors.items()}
                    names = [unit.stack] if unit.stack else list(unit.hub)
                    state |= {_entry(name, "step"): torch.tensor(float(updates)) for name in names}
                    if unit.name == EMBEDDING and self._is_tied:
                        state[_entry(_LM_HEAD, part)] = whole.clone()
                if unit.stack:
                    stacks[_entry(unit.stack, part)].append(whole)
                else:
                    state |= {_entry(name, part): tensor for name, tensor in tensors.items()}
        for name in list(stacks):
            state[name] = torch.stack(stacks.pop(name))
        state |= {"steps": torch.tensor(steps), "updates": torch.tensor(updates)}
        written = self._write_weights(path, weights)
        folder = str(Path(path) / FOLDER)
        try:
            with _quiet():
                save(state, checkpoint_id=folder, process_group=self._group, no_dist=self._group is None)
        except CheckpointException as error:  # a BaseException, which a caller's "except Exception" would miss
            raise CheckpointError(f"{folder}: {error}") from error
        own_files = {f"__{self._rank}_", *([".metadata"] if self._rank == 0 else [])}
        shards = (file.name for file in Path(folder).iterdir())
        return written + [f"{FOLDER}/{name}" for name in shards if name.startswith(tuple(own_files))]

    @property
    def _weights(self) -> set[str]:
        """The entries of all weights."""
        return {_entry(name, "param") for unit in self._units for name in ([unit.stack] if unit.stack else unit.hub)}

    @property
    def _is_tied(self) -> bool:
        return all(unit.name != OUTPUT for unit in self._units)

    def _write_weights(self, path: str, weights: Mapping[str, Tensor]) -> list[str]:
        written, writers = [], sorted(set(self._writers.values()))
        files = {
            rank: WHOLE if len(writers) == 1 else f"model-{place:05d}-of-{len(writers):05d}.safetensors"
            for place, rank in enumerate(writers, 1)
        }
        Path(path).mkdir(parents=True, exist_ok=True)
        if weights:
            save_file(dict(weights), Path(path) / files[self._rank], metadata={"format": "pt"})
            written.append(files[self._rank])
        if self._rank == 0:
            self._hub.copy_config(path, self._context.model.dtype)
            written += [name for name in ("config.json", "generation_config.json") if (Path(path) / name).is_file()]
            if len(writers) > 1:
                map_ = {name: files[self._writers[unit.hub[0]]] for unit in self._units for name in unit.hub}
                index = {"metadata": {}, "weight_map": map_}
                (Path(path) / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
                written.append(INDEX)
        return written

    # Reading ------------------------------------------------------------------------------------------------------

    def restore(self, path: str, take: Callable[[Callable[[str], Tensor]], None]) -> int:
        """Take over a snapshot of any mesh, or of the built-in backend; returns the steps.

        Args:
            take: sets this rank's weights from those of the hub by name.

        Raises:
            CheckpointError: it is damaged, or of another model.
        """
        folder = str(Path(path) / FOLDER)
        try:
            reader = _Reader(folder, self._units)
            if beyond := reader.weights - {_entry(_LM_HEAD, "param")} - self._weights:
                raise ValueError(f"it has {len(beyond)} weights that the model has not: {sorted(beyond)[:3]}")
            take(lambda name: reader.of_hub(name, "param"))
            self._take_state(reader)
            updates = int(reader.tensor(_entry(self._units[0].hub[0], "step")))
            self._optimizer.set_updates(updates)
            return int(reader.tensor("steps"))
        except (
            OSError, RuntimeError, EOFError, KeyError, ValueError, TypeError, AttributeError, pickle.UnpicklingError,
            CheckpointException,
        ) as error:  # fmt: skip
            raise CheckpointError(
                f"checkpoint {folder}: cannot be read or does not belong to this model ({error}); "
                "resume from another one (trainer.resume=PATH)"
            ) from error

    def _take_state(self, reader: "_Reader") -> None:
        for name, unit in self._names.items():
            parameter = self._parameters[name]
            piece = self._optimizer.piece_of(parameter, self._rank, self._index)
            if piece is None:
                continue
            for part, own in self._optimizer.state_of(parameter).items():
                whole = unit.joined([reader.of_hub(each, part) for each in unit.hub])
                shard = unit.shard(whole, self._index, self._pieces.count(unit)).flatten()
                own.copy_(shard[piece.start : piece.stop])


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # What one rank does alone is no mistake.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _entry(name: str, part: str) -> str:
    """What the checkpoint calls a part of a parameter's state."""
    return f"model.{name}" if part == "param" else f"optimizer.{name}.{part}"


class _Reader:
    """Reads tensors of a checkpoint one at a time, on this rank alone.

    Args:
        units: of the model.
    """

    def __init__(self, folder: str, units: Sequence[Unit]) -> None:
        self._folder = folder
        self._stored: Mapping[str, Any] = MetadataReader(folder).read_metadata().state_dict_metadata
        self._in_stack: dict[str, tuple[str, ChunkStorageMetadata]] = {}
        """Where tensors of the hub are that are stacked."""
        for unit in units:
            row = 0
            for name, shape in zip(unit.hub, unit.shapes, strict=True) if unit.stack else ():
                place = torch.Size((unit.expert or 0, row, 0)), torch.Size((1, *shape))
                self._in_stack[name] = unit.stack, ChunkStorageMetadata(*place)
                row += shape[0]

    @property
    def weights(self) -> set[str]:
        """The entries of the checkpoint that are weights."""
        return {name for name in self._stored if name.startswith(_entry("", "param"))}

    def of_hub(self, name: str, part: str) -> Tensor:
        """A part of the state of a tensor of the hub. Raises KeyError where it is not there."""
        if name not in self._in_stack:
            return self.tensor(_entry(name, part))
        stack, chunk = self._in_stack[name]
        return self.tensor(_entry(stack, part), chunk).squeeze(0)

    def tensor(self, name: str, chunk: ChunkStorageMetadata | None = None) -> Tensor:
        """An entry, or a chunk of it alone. Raises KeyError where it is not there."""
        if name not in self._stored:
            raise KeyError(f"it has no {name}")
        found: TensorStorageMetadata = self._stored[name]
        chunk = chunk or ChunkStorageMetadata(torch.Size([0] * len(found.size)), found.size)
        own = torch.empty(chunk.sizes, dtype=found.properties.dtype)
        with _quiet():
            load(
                {name: own}, checkpoint_id=self._folder, storage_reader=MetadataReader(self._folder),
                planner=_ChunkPlanner(name, found, chunk, own), no_dist=True,
            )  # fmt: skip
        return own


class _ChunkPlanner(DefaultLoadPlanner):
    """Reads a chunk of one entry, which may lie in several files."""

    def __init__(self, name: str, stored: TensorStorageMetadata, chunk: ChunkStorageMetadata, into: Tensor) -> None:
        super().__init__()
        self._name, self._stored, self._chunk, self._into = name, stored, chunk, into

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(create_read_items_for_chunk_list(self._name, self._stored, [self._chunk]))

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._into
