"""What ``model.adapter`` and ``model.quantize`` need of the rest of a configuration."""

from collections.abc import Callable
from typing import Any

import pytest

from agentrl_core.api import ConfigError
from agentrl_core.config.capabilities import missing_capabilities
from tests.config.conftest import VALID

NO_ADAPTERS = "agentrl_core.config.schema.ResolvedConfig.serves_adapters"


@pytest.mark.parametrize(
    ("served", "keys", "message"),
    [
        (False, ["rollout.on_new_weights=finish"], "rollout.on_new_weights .*: found finish, but only versions of an"),
        (
            True,
            ["model.adapter.rank=8", "rollout.on_new_weights=continue"],
            "rollout.on_new_weights .*: found continue, but engine 'hf' keeps the cache of each adapter version apart",
        ),
        (
            True,
            ["model.adapter.rank=8", "cluster.runtime=ray", "rollout.engine.weight_transfer=broadcast"],
            "rollout.engine.weight_transfer .*: found broadcast, but engines are sent the adapter alone",
        ),
        (False, ["model.quantize=4bit"], "model.quantize .*: found 4bit, but weights in so few bits cannot be trained"),
        (
            False,
            ["model.quantize=8bit", "model.adapter.rank=8"],
            "model.quantize .*: found 8bit, but engine 'hf' takes no adapters",
        ),
        (
            True,
            ["model.quantize=4bit", "model.adapter.rank=8", "cluster.runtime=ray", "cluster.nodes=2"],
            "model.quantize .*: found 4bit, but 2 processes cannot shard such weights",
        ),
        (
            True,
            ["model.quantize=4bit", "model.adapter.rank=8", "critic.offload_parameters=true"],
            "critic.offload_parameters .*: found true, but weights of model.quantize=4bit stay on the device",
        ),
        (True, ["model.adapter.rank=0"], "model.adapter.rank .*: expected an integer >= 1, found 0"),
        (
            True,
            ["model.adapter.path=nowhere"],
            "model.adapter.path .*: no such directory: .*nowhere; expected an adapter",
        ),
        (True, ["model.adapter.dropout=1.0"], "model.adapter.dropout .*: expected a number >= 0 and < 1"),
    ],
)
def test_what_does_not_fit_is_named(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, served: bool, keys: list[str], message: str
) -> None:
    monkeypatch.setattr(NO_ADAPTERS, served)
    with pytest.raises(ConfigError, match=message):
        load(VALID, *keys, check_files=any("path" in key for key in keys))


@pytest.mark.parametrize(
    ("mode", "needed"), [("recompute", {"pause"}), ("restart", {"pause"}), ("finish", {"adapters"})]
)
def test_what_modes_of_new_weights_need_of_an_engine(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, mode: str, needed: set[str]
) -> None:
    monkeypatch.setattr(NO_ADAPTERS, True)
    overlaps = ["rollout.max_staleness=1", "cluster.runtime=ray", "rollout.engine.placement=standalone"]
    keys = ["model.adapter.rank=8", f"rollout.on_new_weights={mode}", "algorithm.uncorrected_staleness=true"]
    config = load(VALID, *overlaps, *keys)
    missing = " ".join(text for _, text in missing_capabilities(config, training=True, alternatives=lambda *_: []))
    assert {name for name in ("pause", "adapters") if f"capability '{name}'" in missing} == needed


def test_one_key_is_enough(load: Callable[..., Any]) -> None:
    adapter = load(VALID, "model.adapter.rank=8").model.adapter
    assert (adapter.rank, adapter.alpha, adapter.targets, adapter.path) == (8, 32.0, "all-linear", None)
    assert load(VALID, "model.adapter.targets=[q_proj]").model.adapter.targets == ["q_proj"]
    assert load(VALID, "model.adapter={}").model.adapter.rank == 16
    assert load(VALID).model.adapter is None
