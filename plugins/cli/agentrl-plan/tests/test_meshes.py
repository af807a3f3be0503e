"""Which mesh is proposed, and why."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from agentrl_core.api.errors import ConfigError
from agentrl_core.config import ResolvedConfig
from agentrl_core.fsdp2.config import Fsdp2Config
from agentrl_core.fsdp2.models import empty_causal_lm
from agentrl_plan.devices import DEVICES, GIB, Device
from agentrl_plan.meshes import best_mesh, is_possible, with_options
from agentrl_plan.prediction import PhaseFigures, Prediction, predict

MakeConfig = Callable[..., ResolvedConfig]
ON_EIGHT = (
    "cluster.runtime=ray", "cluster.processes_per_node=4", "cluster.nodes=2", "rollout.engine.placement=standalone",
)  # fmt: skip
GPU = Device("gpu", 100 * GIB, 1e12, 1e12, 1e12, 1e12, "")


def predicted(gib: float, **seconds: float) -> Prediction:
    update = PhaseFigures({"weights": int(gib * GIB)}, sum(seconds.values()), seconds_of=seconds)
    return Prediction(GPU, 8, 1, {"rollout": PhaseFigures({}, 1000.0), "update": update}, "", {}, None)


def attempts(
    found: Mapping[tuple[tuple[str, int], ...], Prediction], otherwise: Prediction
) -> Callable[..., Prediction]:
    """Predictions by options that are not 1."""

    def attempt(options: Fsdp2Config) -> Prediction:
        return found.get(tuple((name, value) for name, value in vars(options).items() if value != 1), otherwise)

    return attempt


def test_the_fastest_that_fits_is_proposed_with_what_it_saves(make_config: MakeConfig) -> None:
    found = {
        (): predicted(50, computing=5.0, sending=20.0),
        (("replicas", 2),): predicted(80, computing=5.0, sending=4.0),
        (("tensor_parallel", 2),): predicted(60, computing=5.0, sending=6.0, waiting=9.0),
        (("tensor_parallel", 2), ("replicas", 2)): predicted(99, computing=5.0),
    }
    ranked, reason = best_mesh(make_config(*ON_EIGHT), attempts(found, predicted(60, computing=90.0)))
    assert ranked[0].options == Fsdp2Config(replicas=2)
    assert reason == (
        "cheapest that fits: trainer.backend.config.replicas=2: 80.0 GiB, 9 s. FSDP2 over all processes alone takes "
        "25.0 s: it waits for weights and gradients of other processes for 20.0 s, this one for 4 s"
    )
    # What is faster together does not fit.
    assert str(ranked[-1]).endswith("99.0 GiB, 5 s, does not fit")


def test_what_fits_is_better_than_what_is_fast(make_config: MakeConfig) -> None:
    found = {(): predicted(120, computing=1.0), (("sequence_parallel", 2),): predicted(90, computing=9.0)}
    _, reason = best_mesh(make_config(*ON_EIGHT), attempts(found, predicted(120, computing=1.0)))
    assert "sequence_parallel=2: 90.0 GiB" in reason and "alone takes 120.0 GiB" in reason


def test_nothing_is_split_for_nothing(make_config: MakeConfig) -> None:
    ranked, reason = best_mesh(make_config(*ON_EIGHT), attempts({}, predicted(10, computing=3.0)))
    assert ranked[0].options == Fsdp2Config() and reason.startswith("cheapest: FSDP2 over all processes: 10.0 GiB")


def test_what_divides_three_nodes_of_six_is_tried(make_config: MakeConfig) -> None:
    config = make_config(*ON_EIGHT, "cluster.nodes=3", "cluster.processes_per_node=6")
    found = {
        (("replicas", 3),): predicted(50, computing=1.0),
        (("sequence_parallel", 2),): predicted(50, computing=5.0),
    }
    ranked, _ = best_mesh(config, attempts(found, predicted(60, computing=9.0)))
    assert ranked[0].options == Fsdp2Config(replicas=3)
    tried = {(name, value) for each in ranked for name, value in vars(each.options).items() if value != 1}
    assert tried == {("replicas", 3), ("sequence_parallel", 2), ("tensor_parallel", 2)}


def test_where_nothing_fits_the_smallest_is_named(make_config: MakeConfig) -> None:
    found = {(("replicas", 2),): predicted(130, computing=1.0)}
    _, reason = best_mesh(make_config(*ON_EIGHT), attempts(found, predicted(200, computing=1.0)))
    assert reason.startswith("no mesh fits: the smallest is trainer.backend.config.replicas=2: 130.0 GiB")


@pytest.mark.parametrize(
    ("options", "model", "possible"),
    [
        ({"tensor_parallel": 2}, {}, True),
        ({"tensor_parallel": 4}, {}, False),  # two heads of keys
        ({"tensor_parallel": 3}, {}, False),
        ({"expert_parallel": 2}, {}, False),
        ({"expert_parallel": 8}, {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 64}, True),
        ({"expert_parallel": 8}, {"model_type": "qwen3_moe", "num_experts": 12, "moe_intermediate_size": 64}, False),
    ],
)
def test_only_what_divides_processes_and_model_is_tried(
    make_config: MakeConfig, options: dict[str, int], model: dict[str, int], possible: bool
) -> None:
    config = make_config(*ON_EIGHT, **model)
    assert is_possible(config, empty_causal_lm(config.model.path, config.model), Fsdp2Config(**options)) == possible


def test_adapters_are_not_split(make_config: MakeConfig) -> None:
    config = make_config(*ON_EIGHT, "model.adapter.rank=4")
    model = empty_causal_lm(config.model.path, config.model)
    assert is_possible(config, model, Fsdp2Config(replicas=2))
    assert not is_possible(config, model, Fsdp2Config(tensor_parallel=2))


def test_estimates_are_not_compared(make_config: MakeConfig) -> None:
    found = replace(predicted(10, computing=3.0), estimated="trainer.backend.name: tinker cannot be simulated")
    with pytest.raises(ConfigError, match=r"--mesh: meshes cannot be compared, .*tinker cannot be simulated"):
        best_mesh(make_config(*ON_EIGHT), attempts({}, found))


def test_a_mesh_that_is_an_estimate_is_not_the_best(make_config: MakeConfig) -> None:
    """It lacks what processes send each other."""
    estimate = replace(predicted(5, computing=0.1), estimated="RuntimeError: no data")
    found = {(): predicted(50, computing=5.0), (("tensor_parallel", 2),): estimate}
    ranked, reason = best_mesh(make_config(*ON_EIGHT), attempts(found, predicted(60, computing=90.0)))
    assert ranked[0].options == Fsdp2Config() and reason.startswith("cheapest: FSDP2 over all processes")
    shown = str(ranked[-1])
    assert shown.endswith("tensor_parallel=2: not compared, because it cannot be simulated: RuntimeError: no data")


@pytest.mark.slow
def test_a_prediction_does_not_depend_on_those_before_it(make_config: MakeConfig) -> None:
    """Torch remembers what it has found out for a mesh, and with it the mesh, whose groups are gone."""
    config = make_config(*ON_EIGHT)
    options = {"tensor_parallel": 2, "replicas": 2}
    each = [Fsdp2Config(**{name: value}) for name, value in options.items()]
    found = [predict(with_options(config, one), DEVICES["h100-80g"]) for one in (*each, Fsdp2Config(**options))]
    assert [one.estimated for one in found] == ["", "", ""]
