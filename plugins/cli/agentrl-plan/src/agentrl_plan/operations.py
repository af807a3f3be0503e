"""Floating-point operations, working memory and communication of torch's operations."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils.flop_counter import flop_registry

from agentrl_plan.known import known_of, no_dispatch

aten = torch.ops.aten
_ATTENTION = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default


def operations_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Multiplications and additions of matrix products and attention; others do not count."""
    if func in _ATTENTION:
        return _attention(func, args, kwargs)
    if func.namespace == "torch_attn":
        return _varlen_attention(func, args, kwargs)
    if func is aten._grouped_mm.default:
        return _grouped(*args[:2])
    formula = flop_registry.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


def _attention(func: Any, args: Any, kwargs: Any) -> int:
    """Scores and their products with values, 2 in the forward pass and 5 in the backward; half of them if causal."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    query, key, value = given["query"], given["key"], given["value"]
    rows, heads, queries, size = query.shape
    pairs = rows * heads * queries * key.shape[2]
    backward = "grad_out" in given or "grad_out_" in given
    count = 2 * pairs * (3 * size + 2 * value.shape[-1] if backward else size + value.shape[-1])
    return int(count // 2 if given.get("is_causal") else count)


def _grouped(one: Tensor, other: Tensor) -> int:
    """Operations of a product by groups: each row of ``one`` is multiplied by the matrix of its group only. In a
    gradient of weights it is each column."""
    count = 2 * one.shape[-2] * one.shape[-1] * other.shape[-1]
    return count * (one.shape[0] if one.dim() == other.dim() == 3 else 1)


def _varlen_attention(func: Any, args: Any, kwargs: Any) -> int:
    """Operations of attention over rows that follow each other, whose lengths are known."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    ends = [known_of(given[name]) for name in ("cu_seq_q", "cu_seq_k") if given.get(name) is not None]
    if not ends or None in ends:
        return 0
    with no_dispatch():
        lengths = [each.tensor.diff().tolist() for each in ends if each is not None]
    # Of a causal row, each query sees the keys up to its own place, counted from the end.
    hidden = 0.5 if given.get("is_causal") else 0.0
    seen = sum(queries * (keys - hidden * (queries - 1)) for queries, keys in zip(lengths[0], lengths[-1], strict=True))
    _, heads, size = given["query"].shape
    products = 5 if any(name.startswith("grad") for name in given) else 2
    return int(2 * seen * heads * size * products)


def workspace_bytes(func: Any, args: Any, tensors: list[Tensor]) -> int:
    """Memory that a CUDA kernel takes for itself: flash attention sums gradients of queries in float32, and makes
    those of keys and values for each head of the queries."""
    if func is not _FLASH_BACKWARD:
        return 0
    query, key = args[1], args[2]
    nbytes = 4 * query.numel() + 4 * query.numel() // query.shape[-1]
    if key.shape[1] != query.shape[1]:
        nbytes += 2 * key.element_size() * key.numel() // key.shape[1] * query.shape[1]
    return int(nbytes)


@dataclass(frozen=True)
class GroupRanks:
    """The ranks of a collective.

    Args:
        count: of them.
        are_neighbours: no other rank is between them.
        nodes: that they are on; of the groups of other ranks, which are the same further on, the most.
    """

    count: int
    are_neighbours: bool
    nodes: int


class Groups:
    """Finds the ranks of collectives.

    Args:
        per_node: ranks of a node.
    """

    def __init__(self, per_node: int) -> None:
        self._per_node = per_node
        self._known: dict[str, GroupRanks] = {}

    def ranks_of(self, args: Any) -> GroupRanks:
        """Of a collective with these arguments; of all ranks where they do not say it."""
        group = next((each for each in args if isinstance(each, torch.ScriptObject) and _is_group(each)), None)
        found = dist.group.WORLD if group is None else dist.ProcessGroup.unbox(group)
        if group is None and (names := [each for each in args if isinstance(each, str)]):
            resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
            found = resolve(names[-1])
        assert found is not None, "a collective has a group"
        if found.group_name not in self._known:
            ranks = dist.get_process_group_ranks(found)
            self._known[found.group_name] = GroupRanks(
                len(ranks), max(ranks) - min(ranks) < len(ranks), self._nodes_of(ranks, dist.get_world_size())
            )
        return self._known[found.group_name]

    def _nodes_of(self, ranks: list[int], size: int) -> int:
        """The ranks of a dimension of a mesh have one distance from each other; those between and behind them have
        groups alike."""
        distance = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        starts = [
            start + between
            for start in range(0, size - max(ranks), distance * len(ranks))
            for between in range(min(distance, size - max(ranks) - start))
        ]
        return max(len({(rank + start) // self._per_node for rank in ranks}) for start in starts)


def _is_group(value: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(value._type())


WAITED_FOR = ("all-to-all", "all-reduce")
"""Collectives that layers wait for; others run while something else is computed."""
BETWEEN = ", between nodes"
"""End of the name of a collective among ranks of several nodes."""


def collective_of(func: Any, tensors: list[Tensor], device: str, ranks: GroupRanks) -> tuple[str, int]:
    """Name of a collective, and the bytes of its larger side."""
    name = func._schema.name.partition("::")[2].strip("_")
    sizes = [each.numel() * each.element_size() for each in tensors if each.device.type == device]
    names = {
        "allgather_base": "all-gather",
        "all_gather_into_tensor": "all-gather",
        "reduce_scatter_base": "reduce-scatter",
        "reduce_scatter_tensor": "reduce-scatter",
        "allreduce": "all-reduce",
        "all_reduce": "all-reduce",
        "alltoall_base": "all-to-all",
        "all_to_all_single": "all-to-all",
        "broadcast": "broadcast",
    }
    if "wait" in name or not sizes:
        return name, 0
    shown = names.get(name, name.replace("_", " "))
    if shown == "all-reduce" and not ranks.are_neighbours:
        # Copies of a model are far apart, parts of its layers are not.
        shown += " of copies"
    return shown + (BETWEEN if ranks.nodes > 1 else ""), max(sizes)
