"""Several policies: what each inherits from the run, and what does not fit together."""

from collections.abc import Callable
from typing import Any

import pytest

from agentrl_core.api import ConfigError
from agentrl_core.config.writing import to_yaml
from tests.config.conftest import VALID

SERVES = "agentrl_core.config.schema.ResolvedConfig.serves_adapters"
ADAPTER = "model.adapter.rank=4"


@pytest.fixture(autouse=True)
def serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SERVES, True)


def test_a_policy_has_the_sections_of_the_run_but_for_its_own_keys(load: Callable[..., Any], tmp_path: Any) -> None:
    config = load(
        VALID, "model.adapter={rank: 4, alpha: 7}", "actor={epochs: 3, optimizer: {lr: 0.5}}", "algorithm.kl_coef=0.25",
        "policies={one: {}, two: {adapter: {rank: 2}, actor: {optimizer: {lr: 0.125}}, algorithm: {aggregation: "
        "token-sum}}, still: {frozen: true}}", check_files=False,
    )  # fmt: skip
    one, two = config.trained.values()
    assert list(config.trained) == ["one", "two"] and not config.policies["still"].is_trained
    assert (one.model.adapter.rank, one.actor.epochs, one.actor.optimizer.lr) == (4, 3, 0.5)
    assert (two.model.adapter.rank, two.model.adapter.alpha) == (2, 7)
    assert (two.actor.epochs, two.actor.optimizer.lr) == (3, 0.125)
    assert (one.algorithm.aggregation, two.algorithm.aggregation) == ("token-mean", "token-sum")
    assert one.algorithm.kl_coef == two.algorithm.kl_coef == 0.25
    # What a run writes down loads to the same.
    file = tmp_path / "written.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    again = load(file.read_text(encoding="utf-8"), check_files=False)
    assert again == config and again.trained["two"].actor.optimizer.lr == 0.125


def test_overrides_of_the_run_hold_for_policies_that_do_not_set_the_key(load: Callable[..., Any]) -> None:
    policies = "policies={one: {actor: {optimizer: {lr: 0.125}}}}"
    config = load(VALID, ADAPTER, policies, "actor.epochs=5", "actor.optimizer.lr=0.5", check_files=False)
    assert (config.trained["one"].actor.epochs, config.trained["one"].actor.optimizer.lr) == (5, 0.125)


def test_who_plays_an_agent(load: Callable[..., Any]) -> None:
    config = load(
        VALID, ADAPTER, "policies={still: {frozen: true}, one: {agents: [a, b]}, two: {}, old: {copy_of: one}}",
        check_files=False,
    )  # fmt: skip
    played = {agent: config.policy_of(agent) for agent in ("a", "b", "two", "old", "still", "one", "", None)}
    assert played == {
        "a": "one", "b": "one", "two": "two", "old": "old", "still": "still", "one": None, "": "one", None: "one",
    }  # fmt: skip
    adapters = {name: config.adapter_of(name) for name in config.policies}
    assert adapters == {"still": "", "one": "one", "two": "two", "old": "old"}
    single = load(VALID, check_files=False)
    assert single.policy_of("anyone") == single.policy_of(None) == "policy" and list(single.trained) == ["policy"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["policies={one: {}}"], "policies.one.adapter.*: a policy that is trained is an adapter of the model"),
        ([ADAPTER, "policies={one: {agents: [a]}, two: {agents: [a]}}"],
         "policies.two.agents.*: agent 'a' is played by the policy 'one' already"),
        ([ADAPTER, "policies={one: {agents: [two]}, two: {}}"],
         "policies.two.agents.*: agent 'two' is played by the policy 'one' already"),
        ([ADAPTER, "policies={no-name: {}}"], "'no-name' is no name for a policy; allowed are letters"),
        ([ADAPTER, "policies={one: {copy_of: two}}"], "policies.one.copy_of.*: found 'two'; allowed are .*: none"),
        ([ADAPTER, "policies={one: {}, old: {copy_of: one, frozen: true}}"],
         "policies.old.frozen.*: a copy of 'one' changes with it"),
        ([ADAPTER, "policies={one: {}, old: {copy_of: one, actor: {epochs: 2}}}"],
         "policies.old.actor.*: has no effect on a policy that is not trained"),
        ([ADAPTER, "policies={one: {}, still: {frozen: true, adapter: {rank: 4}}}"],
         "policies.still.adapter.path.*: a new adapter changes nothing"),
        ([ADAPTER, "policies={one: {algorithm: {advantage: gae}}}"],
         "policies.one.algorithm.advantage.*: advantage estimator 'gae' needs a critic"),
        ([ADAPTER, "policies={one: {actor: {offload_parameters: true}}}"],
         "policies.one.actor.offload_parameters.*: found true, but all policies are adapters of one model"),
        ([ADAPTER, "policies={one: {actor: {mini_batches: 1000}}}"],
         "policies.one.actor.mini_batches.*: found 1000, but a step has"),
        ([ADAPTER, "policies={one: {algorithm: {kl_target: 0.5}}}"],
         "policies.one.algorithm.kl_target.*: has no effect without"),
        ([ADAPTER, "policies={one: {updates_ago: 0}}"], "policies.one.updates_ago.*: expected an integer >= 1"),
        ([ADAPTER, "policies={one: {lr: 1}}"], "policies.one.lr.*: unknown key"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(load: Callable[..., Any], keys: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(VALID, *keys, check_files=False)


def test_an_adapter_that_is_not_there_is_named_with_its_policy(load: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="policies.one.adapter.path.*: no such directory: .*nowhere"):
        load(VALID, ADAPTER, "policies={one: {adapter: {path: nowhere}}}", check_files=True)


def test_an_engine_without_adapters_cannot_serve_several(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SERVES, False)
    with pytest.raises(ConfigError, match="policies .*: engine 'hf' takes no adapters"):
        load(VALID, ADAPTER, "policies={one: {}}", check_files=False)
