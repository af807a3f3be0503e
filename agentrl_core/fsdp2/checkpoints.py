"""The state of a training worker on disk: torch's distributed checkpoint (DCP).

Each rank writes its own shards of model and optimizer, and a checkpoint is read by any number of ranks, one included.
It is written from a copy in host memory, so that training goes on meanwhile and nothing comes back to the device.
Frozen weights have a separate DCP next to the other one. Later checkpoints take it over as it is.
"""

import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, empty

from agentrl_core.api.errors import CheckpointError
from agentrl_core.api.training_backend import TRAINING_FOLDER
from agentrl_core.fsdp2.adapters import has_adapter
from agentrl_core.fsdp2.optimizer import AdamW
from agentrl_core.fsdp2.sharding import set_from_whole
from agentrl_core.workers.ranks import TrainingRanks

METADATA_CLASSES = (
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
    "TensorStorageMetadata", "_MEM_FORMAT_ENCODING", "_StorageInfo",
)  # fmt: skip
METADATA_GLOBALS = (
    ("torch", "Size"), ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
)  # fmt: skip
FROZEN_FOLDER = "frozen"
"""Below :data:`TRAINING_FOLDER`. Older checkpoints have frozen weights among the others."""
_WEIGHTS = "model."
_SHARD = re.compile(r"__(?P<rank>\d+)_\d+\.distcp")


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the classes of torch's checkpoint metadata and no others, so that a pickle cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        is_metadata = module.startswith("torch.distributed.checkpoint.") and name in METADATA_CLASSES
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_metadata or is_dtype or (module, name) in METADATA_GLOBALS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its .metadata contains {module}.{name}, which no checkpoint of torch does")


class MetadataReader(FileSystemReader):
    """Reads a checkpoint whose ``.metadata``, a pickle, may come from anywhere; tensors are read without pickle."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = _MetadataUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def copied_state(model: nn.Module, optimizer: AdamW, steps: int, group: ProcessGroup | None) -> dict[str, Tensor]:
    """Copies in host memory of weights that are not frozen and moments, and the number of steps.

    Args:
        group: of all ranks, for what is done with the copies; None for a single rank.
    """
    trained = {name: tensor for name, tensor in _weights(model).items() if not _is_frozen(tensor)}
    return copied({**trained, **_moments(optimizer), "steps": torch.tensor(steps)}, group)


def copied(state: Mapping[str, Tensor], group: ProcessGroup | None) -> dict[str, Tensor]:
    """The tensors in host memory, as :func:`copied_state` has them."""
    mesh = None if group is None else DeviceMesh.from_group(group, "cpu")
    # With the variables themselves tied weights are one object, and stay one.
    copies = {id(tensor): _copy(tensor, mesh) for tensor in {id(each): each for each in state.values()}.values()}
    return {name: copies[id(tensor)] for name, tensor in state.items()}


def frozen_weights(model: nn.Module) -> dict[str, Tensor]:
    """Those of ``model.freeze``, themselves, named as in :func:`copied_state`. What is below an adapter is in no
    checkpoint, and not among them."""
    return {name: tensor for name, tensor in _weights(model).items() if _is_frozen(tensor)}


def _is_frozen(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def copied_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's weights in a state, by their names in the model."""
    return {name.removeprefix(_WEIGHTS): tensor for name, tensor in state.items() if name.startswith(_WEIGHTS)}


def _copy(tensor: Tensor, mesh: DeviceMesh | None) -> Tensor:
    own = tensor.detach()
    if not isinstance(own, DTensor):
        return own.to("cpu", copy=True)
    assert mesh is not None, "sharded tensors have several ranks"
    if _is_over_all_ranks(own):
        local = own.to_local().to("cpu", copy=True)
        return DTensor.from_local(local, mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride())
    # Whatever the mesh is: as if all ranks sharded it. So it is read on every other one.
    rows = -(-own.shape[0] // mesh.size())
    start = rows * mesh.get_local_rank()
    local = own.full_tensor()[start : start + rows].to("cpu", copy=True)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=own.shape, stride=own.stride())


def _is_over_all_ranks(tensor: DTensor) -> bool:
    """Sharded as FSDP2 does it, with a part for every rank."""
    return tensor.device_mesh.ndim == 1 and tensor.device_mesh.size() == dist.get_world_size()


def files_of_rank(path: str, rank: int) -> list[str]:
    """The files below ``path`` that a rank has written, by their relative path."""
    found = []
    for file in sorted(Path(path).rglob("*")):
        shard = _SHARD.fullmatch(file.name)
        if file.is_file() and rank == (int(shard["rank"]) if shard else 0):
            found.append(str(file.relative_to(path)))
    return found


def save_training_state(path: str, state: Mapping[str, Tensor], group: ProcessGroup | None, below: str = "") -> None:
    """Write what :func:`copied_state` returns, or :func:`copied` into a folder ``below``; all ranks must call this."""
    folder = str(Path(_folder(path)) / below)
    try:
        with _quiet():
            save(dict(state), checkpoint_id=folder, process_group=group, no_dist=group is None)
    except CheckpointException as error:  # a BaseException, which a caller's "except Exception" would miss
        raise CheckpointError(f"{folder}: {_cause(error)}") from error


def frozen_names(path: str) -> set[str]:
    """The names of the weights that a checkpoint has apart because they were frozen."""
    folder = Path(_folder(path)) / FROZEN_FOLDER
    return _names(folder) if folder.is_dir() else set()


def _names(folder: str | Path) -> set[str]:
    return set(MetadataReader(folder).read_metadata().state_dict_metadata)


def load_training_state(path: str, model: nn.Module, optimizer: AdamW, ranks: TrainingRanks) -> int:
    """Take over what :func:`save_training_state` wrote, in place, so that whoever shares the module sees it; returns
    the number of steps.

    Raises CheckpointError where it does not fit; all ranks must call this.
    """
    steps, folder = torch.tensor(0), _folder(path)
    try:
        apart = frozen_names(path)
        weights = {name: tensor.detach() for name, tensor in _weights(model).items()}
        # Those that it lacks are missed when they are read.
        beyond = {name for name in _names(folder) | apart if name.startswith(_WEIGHTS)} - weights.keys()
        if beyond:
            shown = ", ".join(sorted(name.removeprefix(_WEIGHTS) for name in beyond)[:3])
            raise ValueError(f"it has {len(beyond)} weights that the model has not: {shown}")
        state = {**weights, **_moments(optimizer), "steps": steps}
        split = {
            name: each for name, each in state.items() if isinstance(each, DTensor) and not _is_over_all_ranks(each)
        }  # fmt: skip
        if split:
            mesh = init_device_mesh("cpu", (ranks.size,))
            state |= {name: _over_all_ranks(each, mesh) for name, each in split.items()}
        for below, is_there in (folder, False), (f"{folder}/{FROZEN_FOLDER}", True):
            if part := {name: tensor for name, tensor in state.items() if (name in apart) == is_there}:
                with _quiet():
                    load(part, checkpoint_id=below, storage_reader=MetadataReader(below), no_dist=ranks.size == 1)
        for name, tensor in split.items():
            whole: Any = state[name]
            set_from_whole(tensor, whole.full_tensor().to(tensor.device_mesh.device_type))
    except (
        OSError, RuntimeError, EOFError, KeyError, ValueError, TypeError, AttributeError, pickle.UnpicklingError,
        CheckpointException,
    ) as error:  # fmt: skip
        raise unreadable(folder, error) from error
    return int(steps)


def _over_all_ranks(tensor: DTensor, mesh: DeviceMesh) -> DTensor:
    """Like a tensor, on the host, with a part for every rank, and without its data."""
    return empty(
        tuple(tensor.shape), dtype=tensor.dtype, device_mesh=mesh, placements=[Shard(0)]
    )  # fmt: skip


def unreadable(path: str, error: BaseException) -> CheckpointError:
    """The error for a checkpoint that is damaged, or another model's."""
    return CheckpointError(
        f"checkpoint {path}: cannot be read or does not belong to this model ({_cause(error)}); "
        "resume from another one (trainer.resume=PATH)"
    )


def _cause(error: BaseException) -> BaseException:
    """What DCP wraps: the failure of the lowest rank, without its traceback."""
    if isinstance(error, CheckpointException) and error.failures:
        return error.failures[min(error.failures)][0]
    return error


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # One process without a process group is what a run on one device is, not a mistake.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _folder(path: str) -> str:
    return str(Path(path) / TRAINING_FOLDER)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """All of them, or those that are trained where the others are frozen below an adapter."""
    keeps_all = not has_adapter(model)
    own = model.state_dict(keep_vars=True).items()
    return {_WEIGHTS + name: tensor for name, tensor in own if keeps_all or tensor.requires_grad}


def _moments(optimizer: AdamW) -> dict[str, Tensor]:
    return {f"optimizer.{name}": tensor for name, tensor in optimizer.moments().items()}
