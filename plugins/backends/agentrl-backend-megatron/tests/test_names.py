"""Parameters of Megatron-Core become tensors of the hub and return, cut into any number of shards."""

import pytest
import torch

from agentrl_backend_megatron.families import Family
from agentrl_backend_megatron.names import units_of

DENSE = Family("qwen2", 2, 16, 24, 4, 2, 4, 51, 1e-6, 1e4, None, False, True, False)
EXPERTS = Family("qwen3_moe", 2, 16, 24, 4, 2, 4, 51, 1e-6, 1e4, None, True, False, True, 8, 4, 2)


@pytest.mark.parametrize("family", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("count", [1, 2])
def test_shards_and_back(family: Family, count: int) -> None:
    for unit in units_of(family):
        tensors = [torch.randn(shape) for shape in unit.shapes]
        whole = unit.joined(tensors)
        own = 1 if unit.cut == "whole" else count
        shards = [unit.shard(whole, index, own) for index in range(own)]
        assert {tuple(shard.shape) for shard in shards} == {unit.shard_shape(own)}
        found = unit.separated(unit.unsharded(shards))
        for name, tensor in zip(unit.hub, tensors, strict=True):
            assert torch.equal(found[name], tensor), name


def test_queries_stand_beside_their_key_and_value() -> None:
    unit = next(each for each in units_of(DENSE) if each.name.endswith("linear_qkv.bias"))
    q, k, v = torch.arange(16.0), torch.arange(100.0, 108), torch.arange(200.0, 208)
    first = unit.shard(unit.joined([q, k, v]), 0, 2)
    assert first.tolist() == [*range(8), *range(100, 104), *range(200, 204)]


def test_tied_weights_leave_once() -> None:
    names = [name for unit in units_of(EXPERTS) for name in unit.hub]
    assert len(names) == len(set(names)) and "lm_head.weight" not in names
