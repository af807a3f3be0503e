"""Meshes that do not divide the model or the ranks are refused, with the nearest that do."""

from typing import Any

import pytest

from agentrl_backend_megatron.config import MegatronConfig
from agentrl_backend_megatron.families import Family
from agentrl_backend_megatron.mesh import Mesh
from agentrl_core.api.errors import ConfigError

DENSE = Family("qwen3", 12, 64, 96, 8, 4, 8, 100, 1e-6, 1e4, None, True, False, True)
EXPERTS = Family("qwen3_moe", 12, 64, 96, 8, 4, 8, 100, 1e-6, 1e4, None, True, False, True, 16, 6, 2)


@pytest.mark.parametrize(
    ("family", "size", "options", "message"),
    [
        (DENSE, 6, {"tensor_parallel": 3}, "3 does not divide the 4 key-value heads.*nearest that do are 2 and 4"),
        (DENSE, 8, {"tensor_parallel": 8}, "8 does not divide the 4 key-value heads.*nearest that do are 4"),
        (DENSE, 5, {"pipeline_parallel": 5}, "5 does not divide the model's 12 layers; .* that do are 4 and 6"),
        (DENSE, 4, {"tensor_parallel": 2, "context_parallel": 4}, "x context_parallel 4 does not divide the 4 tr"),
        (EXPERTS, 4, {"expert_parallel": 4}, "4 does not divide the 6 experts of a layer; .* that do are 3 and 6"),
        (DENSE, 2, {"expert_parallel": 2}, "expert_parallel: found 2, but qwen3 has no experts; set it to 1"),
        (DENSE, 6, {"tensor_parallel": 4}, r"does not divide the 6 training processes .*one of \[1, 2, 3, 6\]"),
        (EXPERTS, 2, {"expert_parallel": 3}, "3 does not divide the 2 ranks of a pipeline stage .* that do are 2"),
        (EXPERTS, 2, {"tensor_parallel": 2, "sequence_parallel": False}, "sequence_parallel: experts .* need it"),
    ],
)  # fmt: skip
def test_a_mesh_that_does_not_divide(family: Family, size: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mesh.of(MegatronConfig(**options), family, size)


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        Mesh.of(MegatronConfig(tensor_parallel=3, pipeline_parallel=5), DENSE, 15)
    assert "key-value heads" in str(caught.value) and "layers" in str(caught.value)


def test_a_mesh_that_divides() -> None:
    assert Mesh.of(MegatronConfig(2, 2, 3, 3), EXPERTS, 12) == Mesh(2, 2, 3, 3, 12)
