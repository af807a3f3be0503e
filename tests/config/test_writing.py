"""A configuration that is written loads back to the same configuration."""

import tempfile
from pathlib import Path

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_core.config import to_dict, to_yaml


def test_round_trip(load, write, valid):
    write("", "reward.py")
    config = load(
        valid.replace("[exact]", "[exact, ./reward.py:score]"),
        "rollout.agent.loops=[tool_agent]",
        "tools=[{name: search, config: {secret: '1e5'}}]",
        "rollout.engine.config={window: [3, 4], limits: {a: 1}, cache: {size: 3}, stop: '7'}",
        "model.chat_template_kwargs={deep: [1, {x: null}], '3': 2026-01-31}",
        "actor.optimizer.lr=1e-7",
        r"trainer.name=\${x}",
        "trainer.trackers=[]",
    )
    again = load(to_yaml(config))
    assert again == config
    assert again.tools[0].ref == config.tools[0].ref
    assert to_yaml(again) == to_yaml(config)


def test_plain_containers_only(load, valid):
    tree = to_dict(load(valid))
    assert yaml.safe_load(yaml.safe_dump(tree)) == tree
    assert tree["rollout"]["engine"]["config"]["cache"] == {"size": 1}
    assert {"name", "config", "python", "replicas"} <= set(tree["rollout"]["engine"])
    assert "ref" not in tree["rollout"]["engine"]


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)
tricky = st.text(alphabet="\x85\\${}:.#1e-+ \n\t'\"x", max_size=12) | st.text()


@settings(max_examples=25, deadline=None)
@given(name=tricky, kwargs=st.dictionaries(tricky, values | tricky, max_size=4))
def test_any_text_survives(name, kwargs):
    from agentrl_core.config.interpolation import interpolated
    from agentrl_core.config.nodes import read_file
    from agentrl_core.config.schema import AgentConfig, Config, DataConfig, ModelConfig, RolloutConfig

    model = ModelConfig(path="/m", chat_template_kwargs=kwargs)
    config = Config(model=model, data=DataConfig(train_files=[]), rollout=RolloutConfig(agent=AgentConfig(loops=[])))
    config.trainer.name = name
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(to_yaml(config), encoding="utf-8")
        tree, problems = interpolated(read_file(file, "config.yaml"))
    assert problems == []
    assert tree.plain() == to_dict(config)
