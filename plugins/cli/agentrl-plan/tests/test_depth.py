"""A few layers say exactly what all of them take."""

from collections.abc import Callable
from typing import Any

import pytest

from agentrl_core.config import ResolvedConfig
from agentrl_plan import depth
from agentrl_plan.workers import simulate

MakeConfig = Callable[..., ResolvedConfig]
SMALL = ("data.max_prompt_length=8", "rollout.max_response_length=16", "actor.micro_batch_tokens=64")
ALIKE = {"num_hidden_layers": 7}
EXPERTS_AFTER_TWO = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 8,
    "mlp_only_layers": [0, 1], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
ALTERNATING = {
    "num_hidden_layers": 11, "sliding_window": 16, "use_sliding_window": True,
    "layer_types": ["full_attention", *["sliding_attention", "full_attention"] * 5],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "overrides", "ranks"),
    [
        (ALIKE, ["model.gradient_checkpointing=false"], 1),
        (ALIKE, ["actor.offload_optimizer=true"], 4),
        (EXPERTS_AFTER_TWO, [], 4),
        (ALTERNATING, ["model.packing=false"], 1),
    ],
    ids=["alike", "alike, four ranks", "experts after two layers", "alternating"],
)
def test_a_few_layers_say_what_all_of_them_take(
    make_config: MakeConfig, model: dict[str, Any], overrides: list[str], ranks: int
) -> None:
    config = make_config(*SMALL, *overrides, **model)
    few, every = simulate(config, ranks=ranks), simulate(config, ranks=ranks, every_layer=True)
    assert few.layers < every.layers == model["num_hidden_layers"]
    assert few.resting == every.resting
    for name, phase in every.phases.items():
        assert few.phases[name].peak == phase.peak, name
        assert {k: v for k, v in few.phases[name].parts.items() if v} == {k: v for k, v in phase.parts.items() if v}
        assert few.phases[name].operations == phase.operations
        assert few.phases[name].collectives == phase.collectives and few.phases[name].calls == phase.calls


def test_a_model_that_ignores_its_number_of_layers_is_simulated_with_all_of_them(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depth.Layers, "compute", lambda self, count: setattr(self, "_count", count))
    config = make_config(*SMALL, **ALIKE)
    assert simulate(config).layers == 7
