"""Megatron-Core's process groups, which a process has once: all models of a run have the same mesh.

The order is that of Megatron-Core, tensor before context before data before pipeline: ranks that split a layer are next
to each other.
"""

import gc

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from agentrl_backend_megatron.mesh import KEY, Mesh
from agentrl_core.api.errors import ConfigError
from agentrl_core.api.training_backend import DataShare

_users: list[Mesh] = []
_owns_ranks = False
"""This made torch's default process group, of one rank."""


def join(mesh: Mesh, device: torch.device, seed: int) -> None:
    """Make the groups, unless another model of this process has. All ranks must call this.

    Raises:
        ConfigError: the other model has another mesh.
    """
    global _owns_ranks
    if _users and _users[0] != mesh:
        raise ConfigError(f"{KEY}: models of one process need one mesh, found {_users[0]} and {mesh}")
    if not _users:
        _owns_ranks = not dist.is_initialized()
        if _owns_ranks:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(
            mesh.tensor, mesh.pipeline, context_parallel_size=mesh.context, expert_model_parallel_size=mesh.expert,
            expert_tensor_parallel_size=1, create_gloo_process_groups=False,
        )  # fmt: skip
        # Nothing is drawn, but the layers ask for the generators.
        model_parallel_cuda_manual_seed(seed)
    _users.append(mesh)


def leave(mesh: Mesh) -> None:
    """The last model ends the groups."""
    _users.remove(mesh)
    if not _users:
        # Megatron-Core only forgets them, and each has threads until the process ends.
        made = [group for group in parallel_state._global_process_group_list or [] if group is not None]
        parallel_state.destroy_model_parallel()
        # Modules that refer to each other hold them, too.
        gc.collect()
        for group in made:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        if _owns_ranks:
            dist.destroy_process_group()


def share() -> DataShare:
    """Of this rank."""
    state = parallel_state
    is_first = state.get_tensor_model_parallel_rank() == state.get_context_parallel_rank() == 0
    counts = is_first and state.is_pipeline_last_stage()
    return DataShare(state.get_data_parallel_rank(), state.get_data_parallel_world_size(), counts)
