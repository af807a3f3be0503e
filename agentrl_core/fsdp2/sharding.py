"""A model over several ranks: FSDP2 (``torch.distributed.fsdp.fully_shard``).

Every decoder layer is its own unit, what is left (embeddings, final norm, head) belongs to the root. Gradients
are summed over the ranks, not averaged: the loss of a micro-batch is already divided by the denominator of the whole
mini-batch.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from agentrl_core.api.errors import WorkerError
from agentrl_core.fsdp2.mesh import Mesh
from agentrl_core.fsdp2.tensor_parallel import expert_modules, split_layers
from agentrl_core.workers.ranks import TrainingRanks

ComputeDtype = Literal["float32", "bfloat16"]


def precision(compute_dtype: ComputeDtype | None, device: torch.device) -> MixedPrecisionPolicy:
    """Forward and backward in ``compute_dtype`` (None: bfloat16 on CUDA, as stored elsewhere), sums in float32."""
    if compute_dtype is None and device.type == "cuda":
        compute_dtype = "bfloat16"
    param_dtype = getattr(torch, compute_dtype) if compute_dtype is not None else None
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)


def place(
    load: Callable[[], nn.Module],
    skeleton: Callable[[], nn.Module],
    ranks: TrainingRanks,
    mesh: Mesh | None,
    compute_dtype: ComputeDtype | None,
    device: torch.device,
) -> Any:
    """The model on its device, in eval mode; over several ranks its parameters are shards.

    Rank 0 reads the weights and sends each to the others, so that a node's memory holds one copy of them, however many
    ranks it has.

    Args:
        load: gives the model with its weights, on the host.
        skeleton: gives the same model without weights, on torch's meta device.
        mesh: of the ranks; None: there is one.
    """
    if mesh is None:
        whole = load().eval()
        is_quantized = getattr(_language_model(whole), "is_quantized", False)
        # Quantized weights are there already, and cannot be moved.
        for part in _float32_units(whole) if is_quantized else [whole]:
            part.to(device)
        arrange(whole, mesh, compute_dtype, device)
        return whole
    source = ranks.on_first(load)
    model = skeleton()
    arrange(model, mesh, compute_dtype, device)
    model.to_empty(device=device)
    copy_from_rank_zero(model, source, device)
    # What transformers changed in names and shapes as it read the files, and changes back when they are written.
    read = [getattr(_language_model(source), "_weight_conversions", None)]
    dist.broadcast_object_list(read, src=0)
    _language_model(model)._weight_conversions = read[0]
    return model.eval()


def _language_model(model: Any) -> Any:
    """The model of transformers, which a critic has inside."""
    return getattr(model, "backbone", model)


def arrange(model: Any, mesh: Mesh | None, compute_dtype: ComputeDtype | None, device: torch.device) -> None:
    """Split and shard a model over the ranks, or let a whole one compute in ``compute_dtype``."""
    policy = precision(compute_dtype, device)
    if mesh is None:
        compute_in(_language_model(model), policy.param_dtype, device)
        return
    split_layers(_language_model(model), mesh)
    for experts in expert_modules(_language_model(model), mesh):
        fully_shard(experts, mesh=mesh.expert_data, mp_policy=policy)
    shard(model, mesh.data, policy)


def compute_in(model: Any, dtype: torch.dtype | None, device: torch.device) -> None:
    """Let a model with weights in float32 compute in bfloat16, also for an engine that shares it.

    Weights, gradients and the optimizer stay float32: at small learning rates most steps are too small to change a
    bfloat16 weight.
    """
    if dtype == torch.bfloat16 and any(parameter.dtype == torch.float32 for parameter in model.parameters()):
        # Without its cache, which would hold the casts of all weights until the end of the forward pass: each is used
        # once there.
        model.forward = torch.autocast(device.type, dtype=dtype, cache_enabled=False)(model.forward)


def shard(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Apply FSDP2 in place. Raises WorkerError for a model that does not name its decoder layers."""
    layers = decoder_layers(model)
    for unit in (*layers, *_float32_units(model)):
        fully_shard(unit, mesh=mesh, mp_policy=policy if unit in layers else MixedPrecisionPolicy())
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # A division inside of the reduction is something that gloo cannot do.
            module.set_force_sum_reduction_for_comms(True)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The modules that transformers names in ``_no_split_modules``, the blocks of a model."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise WorkerError(
            f"{type(model).__name__} cannot be trained by several processes: it names no decoder layers in "
            "_no_split_modules; use a model of transformers, or cluster.processes_per_node=1 and cluster.nodes=1"
        )
    return layers


def _float32_units(model: nn.Module) -> list[nn.Module]:
    """Parts that compute in float32 whatever the policy is: a value head."""
    head = getattr(model, "value_head", None)
    return [head] if isinstance(head, nn.Module) else []


def copy_from_rank_zero(model: nn.Module, source: nn.Module | None, device: torch.device) -> None:
    """Give a sharded model the parameters and buffers of ``source``, which only rank 0 has.

    One tensor at a time is whole on the device.
    """
    parameters = dict(source.named_parameters(remove_duplicate=False)) if source is not None else {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            if parameters:
                whole.copy_(parameters[name])
            dist.broadcast(whole, src=0)
            set_from_whole(parameter, whole)
    # Also those that no checkpoint holds, such as rotary frequencies, which are computed where the weights are read.
    originals = dict(source.named_buffers()) if source is not None else {}
    for name, buffer in model.named_buffers():
        if originals:
            buffer.copy_(originals[name])
        dist.broadcast(buffer, src=0)


def set_from_whole(tensor: Tensor, whole: Tensor) -> None:
    """Write a whole tensor, or this rank's part of it, into a tensor."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(whole)
        return
    own = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.to_local().copy_(own.to_local())


def rest(model: nn.Module) -> None:
    """Give back the gathered parameters that FSDP2 keeps after a forward pass without a backward one."""
    if isinstance(model, FSDPModule):
        model.reshard()
