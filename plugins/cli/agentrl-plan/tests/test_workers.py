"""The workers' phases on tensors without data."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from agentrl_core.api.errors import ConfigError, SimulationError
from agentrl_core.config import ResolvedConfig
from agentrl_core.fsdp2 import backend, log_probs
from agentrl_plan.batches import MICRO_BATCHES
from agentrl_plan.ledger import GATHERED, GRADIENTS, MOMENTS, WEIGHTS
from agentrl_plan.workers import simulate

MakeConfig = Callable[..., ResolvedConfig]
FEW_TOKENS = ("data.max_prompt_length=8", "rollout.max_response_length=16", "actor.micro_batch_tokens=64")


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MESHES = {
    "plain": ({}, {}),
    "tensor": ({"tensor_parallel": 2}, {}),
    "sequence": ({"sequence_parallel": 2}, {}),
    "tensor and sequence": ({"tensor_parallel": 2, "sequence_parallel": 2}, {"num_key_value_heads": 4}),
    "copies": ({"replicas": 2}, {}),
    "experts": ({"expert_parallel": 4}, EXPERTS),
    "tensor and experts": ({"tensor_parallel": 2, "expert_parallel": 4}, EXPERTS),
}


@pytest.mark.parametrize(("options", "model"), MESHES.values(), ids=MESHES.keys())
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_rank_of_a_mesh_has_its_share(
    make_config: MakeConfig, options: dict[str, int], model: dict[str, Any], device: str
) -> None:
    overrides = [f"trainer.backend.config.{name}={value}" for name, value in options.items()]
    found = simulate(make_config(*overrides, *FEW_TOKENS, "model.packing=false", **model), device, ranks=4)
    copies, same_rows = options.get("replicas", 1), options.get("tensor_parallel", 1)
    same_rows *= options.get("sequence_parallel", 1)
    # Weights and two moments; whatever splits them, each rank of a copy has as much.
    assert found.resting == pytest.approx(3 * found.parameter_bytes * copies / 4, rel=0.08)
    assert found.shares == 4 // same_rows
    calls = found.phases["update"].calls
    assert ("all-to-all" in calls) == bool({"sequence_parallel", "expert_parallel"} & options.keys())
    assert ("all-reduce of copies" in calls) == (
        copies > 1 or {"tensor_parallel", "sequence_parallel"} <= options.keys()
    )
    assert not dist.is_initialized()


def test_a_mesh_divides_operations_and_logits(make_config: MakeConfig) -> None:
    few = (*FEW_TOKENS, "model.packing=false", "model.gradient_checkpointing=false")
    whole = simulate(make_config(*few), ranks=4)
    split = simulate(make_config(*few, "trainer.backend.config.tensor_parallel=2"), ranks=4)
    assert {shape[-1] for shape in split.logits.values()} == {512 // 2} and {512} == {
        shape[-1] for shape in whole.logits.values()
    }
    for name in ("log-probs", "update"):
        computed, all_of_it = (sum(each.phases[name].operations.values()) for each in (split, whole))
        # Each rank of two has half of the layers; both have as many rows as one had.
        assert computed == pytest.approx(all_of_it / 2, rel=0.01)


def test_collectives_say_whether_they_cross_nodes(make_config: MakeConfig) -> None:
    options = ("trainer.backend.config.replicas=2", "cluster.processes_per_node=2", "cluster.nodes=2")
    config = make_config(*options, *FEW_TOKENS, "cluster.runtime=ray", "rollout.engine.placement=standalone")
    calls = simulate(config).phases["update"].calls
    # Weights are gathered within a node, gradients added up over both.
    assert calls["all-gather"] and calls["reduce-scatter"] and calls["all-reduce of copies, between nodes"]
    assert "all-gather, between nodes" not in calls and "reduce-scatter, between nodes" not in calls


def test_a_pair_of_any_rank_on_two_nodes_keeps_all_ranks_waiting(make_config: MakeConfig) -> None:
    options = ("trainer.backend.config.tensor_parallel=2", "cluster.processes_per_node=3", "cluster.nodes=2")
    config = make_config(*options, *FEW_TOKENS, "cluster.runtime=ray", "rollout.engine.placement=standalone")
    calls = simulate(config).phases["update"].calls
    # The pairs are 0 and 1, 2 and 3, 4 and 5; the first rank of the second node is 3.
    assert calls["all-reduce, between nodes"] and "all-reduce" not in calls


def test_a_mesh_that_divides_nothing_is_a_configuration_error(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"which is no multiple of 3"):
        simulate(make_config("trainer.backend.config.tensor_parallel=3"), ranks=4)


def test_other_backends_are_refused_by_name(make_config: MakeConfig) -> None:
    with pytest.raises(SimulationError, match=r"trainer\.backend\.name: tinker cannot be simulated; only fsdp2 can"):
        simulate(make_config("trainer.backend.name=tinker"))


def test_so_many_ranks_are_not_simulated(make_config: MakeConfig) -> None:
    """A dry run with a million of them took minutes: torch cuts every parameter into so many pieces."""
    with pytest.raises(SimulationError, match="1000000 training processes are more than the 2048 that are simulated"):
        simulate(make_config(), ranks=1_000_000)


def test_weights_gradients_and_moments_are_those_of_the_parameters(make_config: MakeConfig) -> None:
    found = simulate(make_config())
    update = found.phases["update"].parts
    assert update[WEIGHTS] == pytest.approx(found.parameter_bytes, rel=0.02)
    assert update[MOMENTS] == pytest.approx(2 * found.parameter_bytes, rel=0.02)
    assert 0 < update[GRADIENTS] <= 1.02 * found.parameter_bytes


def test_operations_are_six_for_each_parameter_and_token(make_config: MakeConfig) -> None:
    config = make_config("model.gradient_checkpointing=false", "model.packing=false", tie_word_embeddings=False)
    found = simulate(config)
    linear = found.parameters - 512 * 128  # input embeddings are looked up
    # Logits are computed for response tokens only, attention comes on top.
    expected = 6 * linear * found.tokens
    assert 0.8 * expected < sum(found.phases["update"].operations.values()) < 1.2 * expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_expert_computes_the_tokens_that_chose_it(make_config: MakeConfig, ranks: int) -> None:
    config = make_config(
        "model.gradient_checkpointing=false", "model.packing=false", "model.dtype=bfloat16",
        model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64,
    )  # fmt: skip
    found = simulate(config, ranks=ranks)
    attention, router, experts = 128 * 32 * (4 + 2 + 2 + 4), 8 * 128, 2 * 3 * 128 * 64
    head, shape = 512 * 128, found.shape
    rows, length = MICRO_BATCHES * shape.rows, shape.prompt + shape.response
    scores = 4 * 4 * 32 * rows * length**2 / 2
    products = 2 * (attention + router + experts) * rows * length
    of_head = 2 * head * rows * shape.response
    for name, times, passes in (("log-probs", 1, 1), ("update", 3, 3.5)):
        expected = times * (2 * products + of_head) + passes * 2 * scores
        assert sum(found.phases[name].operations.values()) == pytest.approx(expected, rel=1e-3)


def test_a_rank_of_four_holds_a_quarter_and_gathers_the_rest(make_config: MakeConfig) -> None:
    config = make_config()
    alone, shared = simulate(config, ranks=1), simulate(config, ranks=4)
    assert shared.resting == pytest.approx(alone.resting / 4, rel=0.05)
    assert shared.phases["update"].parts[GATHERED] > 0
    calls = shared.phases["update"].calls
    assert calls["all-gather"] > 0 and calls["reduce-scatter"] > 0
    assert not alone.phases["update"].calls
    assert not dist.is_initialized()


def test_an_update_of_shards_never_holds_whole_gradients_or_moments(make_config: MakeConfig) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 64}
    shards = simulate(make_config("actor.micro_batch_tokens=128", "model.packing=false", **wide), ranks=4)
    # A quarter of weights, gradients and moments is one time the model; gathered layers and activations come on top.
    assert shards.parameter_bytes < shards.phases["update"].peak < 2 * shards.parameter_bytes


@pytest.mark.parametrize("ranks", [1, 4])
def test_logits_come_in_chunks(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    vocabulary, width = 8192, 128
    config = make_config("model.packing=false", vocab_size=vocabulary)
    whole = simulate(config, ranks=ranks)
    tokens = whole.shape.rows * whole.shape.response
    assert whole.logits["bfloat16"] == (tokens, vocabulary)
    monkeypatch.setattr(log_probs, "MOST_LOGITS", 50 * vocabulary)
    cut = simulate(config, ranks=ranks)
    # The gradient of the head counts too, as large as 128 tokens.
    assert max(shape[-2] for shape in cut.logits.values()) == width < tokens / 2
    assert cut.phases["update"].peak < whole.phases["update"].peak - tokens * vocabulary
    # The head's product with hidden states comes once more, in the backward pass.
    for name, operations in {"log-probs": 0, "update": 2 * width * vocabulary * tokens * MICRO_BATCHES}.items():
        found, before = (sum(each.phases[name].operations.values()) for each in (cut, whole))
        assert found - before == pytest.approx(operations, rel=0.01)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_tensor_of_the_host_among_those_of_the_gpu_is_an_error(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    def planted(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        result = log_probs.response_log_probs(*args, **kwargs)
        return (result[0] + torch.ones(result[0].shape), *result[1:])

    monkeypatch.setattr(backend, "response_log_probs", planted)
    with pytest.raises(SimulationError, match="same device"):
        simulate(make_config(), ranks=ranks)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda values: values[values > 0], "mask of"),
        (lambda values: values.detach().cpu().numpy(), "values of a tensor"),
    ],
)
def test_a_value_that_only_data_has_is_an_error_that_names_the_operation(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, read: Callable[[torch.Tensor], Any], message: str
) -> None:
    def planted(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        result = log_probs.response_log_probs(*args, **kwargs)
        return (read(result[0]), *result[1:])

    monkeypatch.setattr(backend, "response_log_probs", planted)
    with pytest.raises(SimulationError, match=message):
        simulate(make_config())


def test_a_simulation_leaves_torch_as_it_was(make_config: MakeConfig) -> None:
    before = torch.UntypedStorage.resize_, torch.cuda.current_device, torch.autograd._engine_run_backward
    simulate(make_config())
    assert before == (torch.UntypedStorage.resize_, torch.cuda.current_device, torch.autograd._engine_run_backward)
    value = torch.ones(2, requires_grad=True)
    (value * 2).sum().backward()
    assert value.grad is not None and value.grad.tolist() == [2.0, 2.0]


def test_the_optimizer_s_moments_wait_on_the_host(make_config: MakeConfig) -> None:
    kept, waiting = simulate(make_config()), simulate(make_config("actor.offload_optimizer=true"))
    assert waiting.resting == pytest.approx(kept.resting / 3, rel=0.05)
    assert waiting.phases["log-probs"].parts.get(MOMENTS, 0) < 0.1 * kept.phases["log-probs"].parts[MOMENTS]


def test_a_critic_and_a_reference_have_phases_and_weights_of_their_own(make_config: MakeConfig) -> None:
    config = make_config("algorithm.advantage.name=gae", "algorithm.kl_coef=0.01", *FEW_TOKENS, num_hidden_layers=1)
    found = simulate(config)
    assert list(found.phases) == ["log-probs", "reference", "values", "critic update", "update", "send weights"]
    # The critic has no output head, which is tied to the embeddings here.
    assert found.phases["update"].parts[WEIGHTS] == pytest.approx(3 * found.parameter_bytes, rel=0.02)
    assert found.phases["update"].parts[MOMENTS] == pytest.approx(4 * found.parameter_bytes, rel=0.02)


@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_wait_on_the_host_outside_of_their_phases(make_config: MakeConfig, ranks: int) -> None:
    waits = ("actor.offload_parameters=true", "reference.offload_parameters=true")
    overrides = ("cluster.runtime=ray", *waits, "algorithm.kl_coef=0.01")
    found = simulate(make_config(*overrides, *FEW_TOKENS, num_hidden_layers=1), ranks=ranks)
    share = found.parameter_bytes / ranks
    assert found.resting == pytest.approx(2 * share, rel=0.05)  # the moments
    for name in ("log-probs", "reference", "update"):
        assert found.phases[name].parts[WEIGHTS] == pytest.approx(share, rel=0.05), name


def test_a_forward_pass_keeps_no_copies_of_the_weights_in_bfloat16(make_config: MakeConfig) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 3}
    found = simulate(make_config(*FEW_TOKENS, **wide))
    assert found.phases["log-probs"].peak - found.resting < found.parameter_bytes / 4


def test_packed_rows_attend_with_the_kernel_that_a_gpu_has(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    found = simulate(make_config(num_hidden_layers=1))
    assert found.packs and "cannot use" not in caplog.text
