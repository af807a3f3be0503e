"""Where each value of a resolved configuration comes from, and the YAML that says so."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_core.config import load_config, load_with_origins, to_commented_yaml, to_dict
from agentrl_core.config.nodes import dotted
from agentrl_core.config.writing import leaves
from tests.config.conftest import VALID, resolve

OVERRIDES = ("rollout.n=4", "trainer.trackers.0.name=curve", "model.chat_template_kwargs={a: [{b: 1}]}")


@pytest.fixture
def origins(write):
    def of(text=VALID, *overrides):
        return load_with_origins(write(text), overrides, resolve)[1]

    return of


@pytest.mark.parametrize(
    ("key", "origin"),
    [
        ("model.path", "config.yaml:2"),
        ("model.dtype", "default"),
        ("data.train_files.0", "config.yaml:4"),
        ("rollout.engine.name", "default"),
        ("rollout.agent.loops.0.name", "config.yaml:7"),
        ("rollout.agent.loops.0.config", "default"),
        ("rollout.n", "override 'rollout.n=4'"),
        ("trainer.trackers.0.name", "override 'trainer.trackers.0.name=curve'"),
        ("trainer.trackers.1.name", "default"),
        ("model.chat_template_kwargs.a.0.b", "override 'model.chat_template_kwargs={a: [{b: 1}]}'"),
        ("actor.optimizer.betas.1", "default"),
        ("trainer.name", "config.yaml:11"),
    ],
)
def test_origin(origins, key, origin):
    text = VALID + "interactions: []\ntrainer: {name: '${model.dtype}'}\n"
    assert origins(text, *OVERRIDES)[key] == origin


def test_the_file_that_is_extended_is_named(origins, write):
    write(VALID, "base.yaml")
    found = origins("extends: base.yaml\nrollout:\n  n: 2\n")
    assert (found["rollout.n"], found["model.path"]) == ("config.yaml:3", "base.yaml:2")


def test_every_value_has_an_origin_and_a_line(write):
    path = write(VALID + "tools: []\n")
    config, found = load_with_origins(path, (), resolve)
    assert list(found) == [dotted(path) for path, _ in leaves(to_dict(config))]
    lines = to_commented_yaml(config, found).splitlines()
    assert sum("  # " in line for line in lines) == len(found)


TEXT = st.text(" ab1:#-'\"\n\t\\${}é\u2028\x85", max_size=12) | st.sampled_from(
    ["a\nb", "${x}", "# no", "null", "1e-4", " x ", "a: b", "- c", "é\u2028"]
)


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.text("abc", min_size=1),
        st.recursive(
            TEXT | st.integers() | st.booleans() | st.none(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", min_size=1), inner, max_size=3),
        ),
        max_size=3,
    )
)
def test_commented_yaml_loads_back(tmp_path_factory, tree):
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.yaml").write_text(VALID, encoding="utf-8")
    config, found = load_with_origins(folder / "config.yaml", (), resolve)
    config.model.chat_template_kwargs = tree
    comments = {dotted(path): found.get(dotted(path), "here") for path, _ in leaves(to_dict(config))}
    (folder / "again.yaml").write_text(to_commented_yaml(config, comments), encoding="utf-8")
    assert load_config(folder / "again.yaml", check_files=False, resolver=resolve) == config
