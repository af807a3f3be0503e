"""Slots of a resolved configuration, here and in another process."""

import pickle

import pytest

from agentrl_core.api import ConfigError
from agentrl_core.api.algorithm import AlgorithmContext
from agentrl_core.config import AdvantageSlot, ResolvedConfig
from agentrl_core.config.slots import all_slots
from agentrl_core.plugins import resolve


def test_a_loaded_configuration_knows_the_plugin_of_each_slot(load) -> None:
    config = load()
    assert type(config) is ResolvedConfig
    assert all(slot.plugin.spec.kind == slot.kind for slot in all_slots(config))
    assert config.rollout.engine.has("shared_module") and not config.rollout.engine.has("logprobs")


def test_a_slot_that_nobody_resolved_says_how_to_resolve_it() -> None:
    for use in (lambda slot: slot.build(None), lambda slot: slot.has("groups"), lambda slot: slot.ref):
        with pytest.raises(ConfigError, match=r"advantage_estimator slot 'grpo' is not resolved.*load_config.*bind"):
            use(AdvantageSlot())


def test_a_slot_builds_its_plugin_in_another_process_too() -> None:
    plugin = resolve("advantage_estimator", "grpo")
    slot = AdvantageSlot("grpo", plugin.spec.config(), resolved=plugin)
    copy = pickle.loads(pickle.dumps(slot))
    assert copy == slot and copy.resolved == plugin.ref
    assert copy.has("groups") and type(copy.build(AlgorithmContext(4))) is type(slot.build(AlgorithmContext(4)))
