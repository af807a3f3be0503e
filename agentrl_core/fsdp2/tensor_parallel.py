"""Layers and experts split over ranks, by the plans that transformers has for its models.

The vocabulary is split, too: output head and tied embeddings. Transformers would gather all logits on each rank.
"""

import logging
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional
from transformers.distributed.tensor_parallel import apply_expert_parallelism, apply_tensor_parallelism

from agentrl_core.api.errors import ConfigError
from agentrl_core.fsdp2.config import Fsdp2Config
from agentrl_core.fsdp2.mesh import KEY, Mesh, Peers, local_part, nearest
from agentrl_core.fsdp2.models import experts_of, vocabulary_of
from agentrl_core.fsdp2.sharded_log_probs import VocabularyPart

logger = logging.getLogger(__name__)

PARTIAL = "replicated_with_grad_allreduce"
"""Style of a weight that every rank has, and whose gradient on each rank comes from the heads of this rank alone."""
EMBEDDINGS = "embedding_rowwise"
"""Style of embeddings, whose gradients it would lose on some ranks for a token with the number of padding."""
DISPATCH = "ep_dispatch_experts"
_MLP = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
"""Keys of a model's config."""

Plan = dict[str, str]


def splits_model(config: Fsdp2Config) -> bool:
    """The options split what a rank computes, besides sharding its weights."""
    return max(config.tensor_parallel, config.expert_parallel, config.sequence_parallel) > 1


def check_model(model: Any, config: Fsdp2Config, key: str) -> None:
    """Refuse a model of transformers that cannot be split as the options say.

    Args:
        model: without weights.
        key: the config key that it comes from, for messages.

    Raises:
        ConfigError: it has no plan, or the options do not divide its heads, its MLP or its experts.
    """
    name, text = type(model).__name__, model.config.get_text_config(decoder=True)
    tensor, sequence, experts = config.tensor_parallel, config.sequence_parallel, config.expert_parallel
    if tensor > 1 and not _layer_plan(model):
        raise ConfigError(
            f"{KEY}.tensor_parallel: transformers has no plan for splitting the layers of {name} ({key}): its config "
            "class has no base_model_tp_plan; set it to 1, or train another model"
        )
    if experts > 1 and DISPATCH not in model.ep_plan.values():
        raise ConfigError(
            f"{KEY}.expert_parallel: transformers has no plan for sending tokens to the experts of {name} ({key}): its "
            f"base_model_ep_plan has no {DISPATCH!r}; set it to 1"
        )
    for count_of in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(text, count_of, None)
        if not count:
            continue
        if count % tensor:
            raise _indivisible("tensor_parallel", tensor, count_of, count, name)
        if (count // tensor) % sequence:
            per_rank = "" if tensor == 1 else f" / tensor_parallel ({tensor})"
            raise _indivisible("sequence_parallel", sequence, count_of + per_rank, count // tensor, name)
    for size_of in _MLP:
        size = getattr(text, size_of, None)
        if isinstance(size, int) and size % tensor:
            raise _indivisible("tensor_parallel", tensor, size_of, size, name)
    if (count := experts_of(text)) % experts:
        raise _indivisible("expert_parallel", experts, "number of experts", count, name)


def _indivisible(option: str, found: int, what: str, count: int, name: str) -> ConfigError:
    return ConfigError(f"{KEY}.{option}: {found} does not divide {what} = {count} of {name}; {nearest(found, count)}")


def _layer_plan(model: Any) -> Plan:
    """The plan of a model but for its output head."""
    head = _name_of(model, model.get_output_embeddings())
    return {name: style for name, style in model.tp_plan.items() if name != head}


def split_layers(model: Any, mesh: Mesh) -> None:
    """Split a model of transformers that has no weights yet, in place."""
    expert_plan: Plan = dict(model.ep_plan) if mesh.experts is not None else {}
    if mesh.tensor is not None:
        plan = {name: style for name, style in _layer_plan(model).items() if style not in (PARTIAL, EMBEDDINGS)}
        if expert_plan:
            of_experts = re.compile(rf"(?:{'|'.join(map(re.escape, expert_plan))})(?:\..+)?")
            plan = {name: style for name, style in plan.items() if not of_experts.fullmatch(name)}
        peers = mesh.tensor_peers
        assert peers is not None, "there is a mesh of these ranks"
        apply_tensor_parallelism(model, mesh.tensor, plan)
        head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        if head is not None and _splits_vocabulary(model, peers.size):
            _split_head(head, mesh.tensor, peers)
            if _is_tied(model):
                embeddings.weight = head.weight
                _split_embeddings(embeddings, peers)
    if mesh.experts is not None:
        apply_expert_parallelism(model, mesh.experts, mesh.tensor, expert_plan)


def expert_modules(model: Any, mesh: Mesh) -> list[nn.Module]:
    """The modules whose weights are split over :attr:`Mesh.experts`."""
    if mesh.experts is None:
        return []
    names = [
        name.replace(".", r"\.").replace("*", r"\d+") for name, style in model.ep_plan.items() if style == DISPATCH
    ]
    pattern = re.compile("|".join(names))
    return [module for name, module in model.named_modules() if pattern.fullmatch(name)]


def partial_gradients(model: Any, mesh: Mesh | None) -> list[nn.Parameter]:
    """The trained weights whose gradients must be added up over :attr:`Mesh.tensor`, once before each step.

    Transformers would do so in each backward pass, also with what the passes before have left.
    """
    if mesh is None or mesh.tensor is None:
        return []
    pattern = _names_of(model.tp_plan, PARTIAL)
    named = model.named_parameters()
    return [each for name, each in named if each.requires_grad and pattern.fullmatch(name.rpartition(".")[0])]


def _names_of(plan: Plan, style: str) -> re.Pattern[str]:
    """Of the modules that have this style."""
    names = [name.replace(".", r"\.").replace("*", r"\d+") for name, each in plan.items() if each == style]
    return re.compile("|".join(names) or "(?!)")


def sum_gradients(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Add up the gradients over the ranks of a group, in place; each of these has the same shards of them."""
    local = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not local:
        return
    whole = torch.cat([each.flatten() for each in local])
    dist.all_reduce(whole, group=group)
    parts = torch.split(whole, [each.numel() for each in local])
    for gradient, part in zip(local, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def vocabulary_part(model: Any, mesh: Mesh | None) -> VocabularyPart | None:
    """The logits that this rank computes; None: all of them."""
    peers = None if mesh is None else mesh.tensor_peers
    if peers is None or model.get_output_embeddings() is None or not _splits_vocabulary(model, peers.size):
        return None
    size = vocabulary_of(model) // peers.size
    return VocabularyPart(peers.group, peers.index * size, size)


def _splits_vocabulary(model: Any, ranks: int) -> bool:
    reason, vocabulary = "", vocabulary_of(model)
    if vocabulary % ranks:
        reason = f"its {vocabulary} tokens are no multiple of tensor_parallel={ranks}"
    elif type(model.get_output_embeddings()) is not nn.Linear:
        reason = f"its head is a {type(model.get_output_embeddings()).__name__}"
    elif _is_tied(model) and type(model.get_input_embeddings()) is not nn.Embedding:
        reason = f"its {type(model.get_input_embeddings()).__name__}, which is tied to the head, computes more"
    if reason:
        logger.info("%s: every rank computes the logits of the whole vocabulary: %s", type(model).__name__, reason)
    return not reason


def _is_tied(model: Any) -> bool:
    return bool(model.config.get_text_config(decoder=True).tie_word_embeddings)


def _split_head(module: nn.Linear, mesh: DeviceMesh, peers: Peers) -> None:
    """Let each rank compute a part of the logits."""
    for name, parameter in module.named_parameters():
        part = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))

    def forward(states: Tensor) -> Tensor:
        states = _Shared.apply(states, peers.group)  # type: ignore[no-untyped-call]
        bias = None if module.bias is None else local_part(module.bias)
        return functional.linear(states, local_part(module.weight), bias)

    module.forward = forward  # type: ignore[method-assign, assignment]


def _split_embeddings(module: nn.Embedding, peers: Peers) -> None:
    """Let each rank look up the tokens that its rows of the table, which is split already, are of."""
    padding = module.padding_idx

    def forward(ids: Tensor) -> Tensor:
        rows_vH = local_part(module.weight)
        own = ids - peers.index * rows_vH.shape[0]
        is_own = (own >= 0) & (own < rows_vH.shape[0])
        found = functional.embedding(torch.where(is_own, own, 0), rows_vH)
        found = torch.where(is_own.unsqueeze(-1), found, 0.0)
        if padding is not None:
            # As in torch's own: it gets no gradient.
            found = torch.where((ids == padding).unsqueeze(-1), found.detach(), found)
        summed: Tensor = _Summed.apply(found, peers.group)  # type: ignore[no-untyped-call]
        return summed

    module.forward = forward  # type: ignore[method-assign, assignment]


class _Shared(torch.autograd.Function):
    """What all ranks have, and each computes something else from: gradients are added up."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        summed = gradient.contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class _Summed(torch.autograd.Function):
    """The sum over ranks, all of which compute the same from it: each has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        summed = values.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _name_of(model: nn.Module, part: nn.Module | None) -> str | None:
    return next((name for name, module in model.named_modules() if module is part), None) if part is not None else None
