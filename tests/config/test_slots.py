"""Slots of a resolved configuration, here and in another process."""

import pickle
import subprocess
import sys

import pytest

from agentrl_core.api import ConfigError, NoConfig
from agentrl_core.api.algorithm import AlgorithmContext
from agentrl_core.config import AdvantageSlot, ResolvedConfig, RewardFunctionSlot, to_yaml
from agentrl_core.config.slots import all_slots
from agentrl_core.plugins.resolution import resolve
from tests.config.conftest import Cache


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


def test_a_file_with_options_of_its_own_works_in_another_process(tmp_path) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Options:\n"
        "    bonus: float = 2.0\n"
        "class Bonus:\n"
        "    config_class = Options\n"
        "    def __init__(self, config, context):\n"
        "        self.bonus = config.bonus\n"
        "    def __call__(self, trajectory):\n"
        "        return self.bonus\n"
    )
    plugin = resolve("reward_function", "./mine.py:Bonus", base_dir=tmp_path)
    slot = RewardFunctionSlot("./mine.py:Bonus", plugin.spec.config(bonus=3.0), resolved=plugin)
    pickled = tmp_path / "slot.pickle"
    pickled.write_bytes(pickle.dumps(slot))
    question = f"import pickle; print(pickle.load(open({str(pickled)!r}, 'rb')).build(None)(None))"
    done = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, done.returncode) == ("3.0\n", 0), done.stderr


@pytest.mark.parametrize(
    ("written", "overrides", "expected"),
    [
        ("", (), None),
        ("algorithm: {correction: null}\n", (), None),
        ("algorithm: {correction: truncated}\n", (), ("truncated", Cache(1))),
        ("", ("algorithm.correction=truncated", "algorithm.correction.config.size=3"), ("truncated", Cache(3))),
        ("algorithm: {correction: {name: truncated, config: {size: 2}}}\n", ("algorithm.correction=null",), None),
        (
            "algorithm: {correction: {name: truncated, config: {size: 2}}}\n",
            ("algorithm.correction=masked",),
            ("masked", NoConfig()),
        ),
    ],
)
def test_an_optional_slot_is_null_or_a_plugin(load, valid, written, overrides, expected) -> None:
    config = load(valid + written, "rollout.engine=fussy", *overrides)
    slot = config.algorithm.correction
    assert (slot and (slot.name, slot.config)) == expected
    assert load(to_yaml(config)) == config


def test_options_without_a_name_in_an_optional_slot(problems, valid) -> None:
    (message,) = problems(valid, "algorithm.correction.config.size=3")
    assert message.startswith("algorithm.correction.name") and "required key is missing" in message


def test_a_correction_needs_the_engines_log_probs(problems, valid) -> None:
    (message,) = problems(valid, "algorithm.correction=truncated")
    assert "'hf' lacks the capability 'logprobs', which algorithm.correction=truncated needs" in message
