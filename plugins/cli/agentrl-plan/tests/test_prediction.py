"""What a step takes, from what was simulated of it."""

from collections.abc import Callable

import pytest

from agentrl_core.api.errors import ConfigError, SimulationError
from agentrl_core.config import ResolvedConfig
from agentrl_plan import prediction
from agentrl_plan.devices import DEVICES
from agentrl_plan.prediction import Prediction, predict

MakeConfig = Callable[..., ResolvedConfig]
ON_FOUR = ("cluster.runtime=ray", "cluster.processes_per_node=4", "rollout.engine.placement=standalone")
VLLM = ("cluster.runtime=ray", "rollout.engine.name=vllm")
EXPERTS = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16, "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}  # fmt: skip


def on_h100(config: ResolvedConfig) -> Prediction:
    return predict(config, DEVICES["h100-80g"])


@pytest.mark.parametrize("tokens", [128, 300, 512])
def test_each_micro_batch_gathers_parameters_and_sends_gradients(make_config: MakeConfig, tokens: int) -> None:
    """Rows of 128 tokens: 1, 2 or 4 in a micro-batch, of which 8 rows of each rank make 8, 4 or 2."""
    overrides = (*ON_FOUR, "data.batch_size=16", "model.gradient_checkpointing=false", "actor.offload_optimizer=false")
    config = make_config(*overrides, f"actor.micro_batch_tokens={tokens}")
    found = on_h100(config)
    count = 8 // (tokens // 128)
    sent = found.phases["update"].collectives
    # Gradients are summed in float32, parameters gathered in bfloat16.
    assert sent["reduce-scatter"] == pytest.approx(4 * found.parameters * count, rel=1e-3)
    embeddings = 512 * 128 + 128
    layers = found.parameters - embeddings
    assert sent["all-gather"] == pytest.approx(2 * (2 * layers + embeddings) * count, rel=1e-3)
    # Without a backward pass the embeddings stay.
    assert found.phases["log-probs"].collectives["all-gather"] == pytest.approx(
        2 * (layers * count + embeddings), rel=1e-3
    )


def test_rows_that_share_their_prompt_make_fewer_micro_batches(make_config: MakeConfig) -> None:
    """16 rows of a rank, 8 of each prompt, 96 + 32 tokens: 512 tokens are 4 padded rows, or 10 packed ones."""
    overrides = (*ON_FOUR, "data.batch_size=8", "rollout.n=8", "data.max_prompt_length=96")
    sent = {}
    for packing in ("true", "false"):
        config = make_config(*overrides, "rollout.max_response_length=32", f"model.packing={packing}")
        found = on_h100(config)
        sent[packing] = found.phases["update"].collectives["reduce-scatter"] / (4 * found.parameters)
    assert sent == pytest.approx({"true": 2, "false": 4}, rel=1e-3)


@pytest.mark.slow
def test_epochs_and_mini_batches_send_as_often(make_config: MakeConfig) -> None:
    overrides = (*ON_FOUR, "data.batch_size=16", "actor.micro_batch_tokens=512")
    once, more = (
        on_h100(make_config(*overrides, f"actor.epochs={epochs}", f"actor.mini_batches={mini}"))
        for epochs, mini in ((1, 1), (3, 8))
    )
    # 8 rows of a rank: 2 micro-batches of 4 rows, or one of each mini-batch.
    ratio = more.phases["update"].collectives["reduce-scatter"] / once.phases["update"].collectives["reduce-scatter"]
    assert ratio == pytest.approx(3 * 8 / 2, rel=1e-3)


def test_an_estimate_multiplies_a_token_with_the_experts_that_it_chooses(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("model.gradient_checkpointing=false", "model.packing=false", "model.dtype=bfloat16", **EXPERTS)
    simulated = on_h100(config)

    def fails(*arguments: object) -> None:
        raise SimulationError("aten.strange.default asks for a value")

    monkeypatch.setattr(prediction, "simulate", fails)
    estimated = on_h100(config)
    assert estimated.estimated and not simulated.estimated
    assert estimated.parameters == simulated.parameters
    ratio = estimated.phases["update"].operations / simulated.phases["update"].operations
    assert 0.8 < ratio < 1.2


def test_a_pass_reads_the_experts_that_requests_in_flight_choose(make_config: MakeConfig) -> None:
    """16 experts of which a token chooses 2: one request reads an eighth of them, 8 requests read all."""
    times = {}
    for rows in (1, 8):
        config = make_config(
            "cluster.runtime=ray", f"rollout.engine.max_in_flight={rows}", "data.batch_size=1", "rollout.n=8",
            "model.dtype=bfloat16", **EXPERTS,
        )  # fmt: skip
        found = on_h100(config)
        times[rows] = found.phases["rollout"].seconds / (8 / rows)
    experts = 2 * 3 * 128 * 256 * 16
    others = found.parameters - experts
    assert times[1] / times[8] == pytest.approx((others + experts / 8) / (others + experts), rel=1e-3)


@pytest.mark.parametrize(("split", "processes"), [(16, 8), (2, 1)])
def test_engines_that_need_more_gpus_than_the_trainer_has_do_not_fit(
    make_config: MakeConfig, split: int, processes: int
) -> None:
    config = make_config(
        *VLLM, f"cluster.processes_per_node={processes}", f"rollout.engine.tensor_parallel={split}",
        num_attention_heads=16, num_key_value_heads=16,
    )  # fmt: skip
    wanted = rf"tensor_parallel {split} .* have {processes} .*allowed are up to {processes}: lower rollout"
    with pytest.raises(ConfigError, match=wanted):
        on_h100(config)


def test_a_replica_needs_its_gpus_on_one_node(make_config: MakeConfig) -> None:
    config = make_config(*VLLM, "cluster.nodes=2", "cluster.processes_per_node=2", "rollout.engine.tensor_parallel=4")
    with pytest.raises(ConfigError, match="2 on one node and 2 on one node, not 4 on each of 1 node"):
        on_h100(config)
