"""How the ranks of a model share its work: copies of it, shards, parts of the rows, of the layers and of the experts.

Neighbours talk most. From the slowest to the fastest number of a rank:

    replica     copies of the sharded model; gradients are added up over them
    data        parts of the rows
    sequence    parts of the tokens of the same rows
    tensor      parts of the layers, for the same tokens

Weights are sharded over data and sequence, which have different tokens. Those of experts are split over neighbours of a
replica, whatever their tokens are, and sharded over the other ranks of the replica.
"""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from agentrl_core.api.errors import ConfigError
from agentrl_core.api.training_backend import DataShare
from agentrl_core.fsdp2.config import Fsdp2Config

DP_AXIS, REPLICAS, TENSOR, EXPERTS, SEQUENCE = "dp", "replicas", "tensor", "experts", "sequence"
KEY = "trainer.backend.config"


@dataclass(frozen=True)
class Peers:
    """The ranks of one group that this one belongs to.

    Args:
        index: of this rank among them.
    """

    group: ProcessGroup
    index: int
    size: int


@dataclass(frozen=True)
class Mesh:
    """The ranks of a model.

    Args:
        data: over which FSDP2 shards; with replicas the first of its two dimensions has these.
        share: what this rank computes of each batch.
        tensor: ranks with parts of the same layers; None: each has whole ones.
        experts: ranks with parts of the same experts; None: experts are like other weights.
        expert_data: over which FSDP2 shards the experts of a rank.
        sequence: ranks with parts of the same rows; None: each has whole ones.
    """

    data: DeviceMesh
    share: DataShare
    tensor: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    expert_data: DeviceMesh | None = None
    sequence: Peers | None = None

    @property
    def tensor_peers(self) -> Peers | None:
        """The ranks of :attr:`tensor`."""
        return None if self.tensor is None else _peers(self.tensor)

    @classmethod
    def of(cls, config: Fsdp2Config, device_type: str, rank: int, size: int) -> "Mesh | None":
        """The mesh of so many ranks, which all must call this; None for a single one.

        Raises:
            ConfigError: the options do not divide the number of ranks.
        """
        check_size(config, size)
        if size == 1:
            return None
        tensor, sequence, experts = config.tensor_parallel, config.sequence_parallel, config.expert_parallel
        per_replica = size // config.replicas
        same_rows = tensor * sequence
        share = DataShare(rank // same_rows, size // same_rows, counts=rank % same_rows == 0)
        dense = _split(device_type, config.replicas, per_replica // tensor, (TENSOR, tensor))
        expert: dict[str, DeviceMesh] = {}
        if experts > 1:
            expert = _split(device_type, config.replicas, per_replica // experts, (EXPERTS, experts))
        rows = None
        if sequence > 1:
            names = (DP_AXIS, SEQUENCE, TENSOR)
            whole = _mesh(device_type, dict(zip(names, (size // same_rows, sequence, tensor), strict=True)))
            rows = _peers(whole[SEQUENCE])
        return cls(dense[DP_AXIS], share, dense.get(TENSOR), expert.get(EXPERTS), expert.get(DP_AXIS), rows)


def _split(device_type: str, replicas: int, shards: int, last: tuple[str, int]) -> dict[str, DeviceMesh]:
    """The meshes of FSDP2 and of the ranks that split tensors, which torch must see as parts of one."""
    name, parts = last
    dims = {REPLICAS: replicas, DP_AXIS: shards, name: parts}
    dims = {key: count for key, count in dims.items() if count > 1 or key == DP_AXIS}
    whole = _mesh(device_type, dims)
    if len(dims) == 1:
        return {DP_AXIS: whole}
    data = whole[REPLICAS, DP_AXIS] if replicas > 1 else whole[DP_AXIS]
    return {DP_AXIS: data, **({name: whole[name]} if parts > 1 else {})}


def _mesh(device_type: str, dims: dict[str, int]) -> DeviceMesh:
    """Of these dimensions, the slowest first; models of a process share it, for its groups take memory of a device."""
    world = dist.group.WORLD
    if any(each is not world for each, *_ in _MESHES):
        _MESHES.clear()
    key = (world, device_type, *dims.items())
    if key not in _MESHES:
        _MESHES[key] = init_device_mesh(device_type, tuple(dims.values()), mesh_dim_names=tuple(dims))
    return _MESHES[key]


_MESHES: dict[tuple[Any, ...], DeviceMesh] = {}


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _peers(mesh: DeviceMesh) -> Peers:
    return Peers(mesh.get_group(), mesh.get_local_rank(), mesh.size())


def check_size(config: Fsdp2Config, size: int) -> None:
    """Refuse options that do not divide the ranks.

    Raises:
        ConfigError: what does not, and what to change.
    """
    tensor, sequence, experts = config.tensor_parallel, config.sequence_parallel, config.expert_parallel
    parts = tensor * sequence * config.replicas
    fix = "change them, or cluster.processes_per_node and cluster.nodes"
    if size % parts:
        raise ConfigError(
            f"{KEY}: tensor_parallel={tensor}, sequence_parallel={sequence} and replicas={config.replicas} make groups "
            f"of {parts} processes, and the run has {size}, which is no multiple of {parts}; {fix}"
        )
    if experts == 1:
        return
    if experts % tensor:
        raise ConfigError(
            f"{KEY}.expert_parallel: {experts} is no multiple of tensor_parallel={tensor}; set it to "
            f"{-(-experts // tensor) * tensor}, or tensor_parallel=1"
        )
    if (size // config.replicas) % experts:
        raise ConfigError(
            f"{KEY}.expert_parallel: {experts} does not divide the {size // config.replicas} processes of a replica; "
            f"{nearest(experts, size // config.replicas)}"
        )


def nearest(wanted: int, count: int, multiple: int = 1) -> str:
    """Which numbers near ``wanted`` divide ``count``, as the end of a message.

    Args:
        multiple: they are multiples of this.
    """
    divisors = [each for each in range(multiple, count + 1, multiple) if count % each == 0]
    below = [each for each in divisors if each < wanted][-1:]
    above = [each for each in divisors if each > wanted][:1]
    return f"nearest that do: {', '.join(map(str, below + above))}"
