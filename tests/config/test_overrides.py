"""Overrides on the command line."""

import pytest


def test_values_are_yaml(load, valid):
    config = load(valid, "trainer.steps=20", "rollout.deterministic=true", "actor.optimizer.betas=[0.5, 0.6]")
    assert config.trainer.steps == 20
    assert config.rollout.deterministic is True
    assert config.actor.optimizer.betas == [0.5, 0.6]
    assert load(valid, "trainer.steps=20", "trainer.steps=null").trainer.steps is None


def test_the_value_may_hold_an_equals_sign(load, valid):
    assert load(valid, "trainer.name=a=b").trainer.name == "a=b"


def test_the_last_one_wins(load, valid):
    assert load(valid, "rollout.n=4", "rollout.n=5").rollout.n == 5


def test_list_elements_by_index(load, valid):
    text = (
        valid.replace("[single_turn]", "[tool_agent]")
        + "tools:\n  - calculator\n  - {name: search, config: {secret: x}}\n"
    )
    config = load(text, "tools.0.timeout=3", "tools.1.config.secret=y")
    assert [tool.timeout for tool in config.tools] == [3.0, 30.0]
    assert config.tools[1].config.secret == "y"


def test_elements_of_a_default_list(load, valid):
    config = load(valid, "trainer.trackers.1=console", "actor.optimizer.betas.0=0.5")
    assert [slot.name for slot in config.trainer.trackers] == ["console", "console", "tensorboard", "curve"]
    assert config.actor.optimizer.betas == [0.5, 0.999]


@pytest.mark.parametrize("override", ["trainer.trackers=[console]", "trainer.trackers=[{name: console}]"])
def test_whole_lists_of_slots(load, valid, override):
    assert [slot.name for slot in load(valid, override).trainer.trackers] == ["console"]


@pytest.mark.parametrize(
    "override", ["rollout.engine=fussy", "rollout.engine.name=fussy", "rollout.engine={name: fussy}"]
)
def test_another_slot_name_drops_the_old_options(load, valid, override):
    text = valid.replace("rollout:\n", "rollout:\n  engine: {name: hf, replicas: 2, config: {max_num_seqs: 2}}\n")
    engine = load(text, override).rollout.engine
    assert (engine.name, engine.replicas, engine.config.high) == ("fussy", 2, 1)


def test_the_same_slot_name_keeps_the_options(load, valid):
    text = valid.replace("rollout:\n", "rollout:\n  engine: {config: {max_num_seqs: 2}}\n")
    assert load(text, "rollout.engine=hf").rollout.engine.config.max_num_seqs == 2


@pytest.mark.parametrize("order", [1, -1])
def test_name_and_options_in_any_order(load, valid, order):
    text = valid.replace("rollout:\n", "rollout:\n  engine: {config: {max_num_seqs: 2}}\n")
    engine = load(text, *["rollout.engine=fussy", "rollout.engine.config.high=9"][::order]).rollout.engine
    assert (engine.name, engine.config.high) == ("fussy", 9)


def test_options_of_a_slot_written_as_a_name(load, valid):
    text = valid.replace("rollout:\n", "rollout:\n  engine: hf\n")
    assert load(text, "rollout.engine.config.max_num_seqs=2").rollout.engine.config.max_num_seqs == 2


def test_sections_are_merged(load, valid):
    optimizer = load(valid, "actor.optimizer.lr=0.5", "actor.optimizer={weight_decay: 0.25}").actor.optimizer
    assert (optimizer.lr, optimizer.weight_decay) == (0.5, 0.25)
