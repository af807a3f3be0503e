import json
import platform
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import agentrl_core
from agentrl_core.api import KINDS, PluginError, PluginRef
from agentrl_core.plugins.lock import diff_lock, lock_of, read_lock, write_lock

HERMES = PluginRef("tool_parser", "hermes", "agentrl-tool-parsers", "0.1.0")
GRPO = PluginRef("advantage_estimator", "grpo", "agentrl-algorithms", "0.1.0")
SCORE = PluginRef("reward_function", "reward.py:score", "file", "a" * 64, source="def score(t): ...")

refs = st.lists(
    st.builds(PluginRef, st.sampled_from(sorted(KINDS)), st.text("ab", min_size=1), st.text("cd"), st.text("12."))
)


def test_lock_file(tmp_path: Path) -> None:
    path = tmp_path / "plugins.lock.json"
    write_lock(path, [HERMES, SCORE, GRPO, HERMES])
    assert json.loads(path.read_text(encoding="utf-8")) == {
        "schema_version": 1,
        "agentrl_core": agentrl_core.__version__,
        "python": platform.python_version(),
        "plugins": [
            {"kind": "advantage_estimator", "name": "grpo", "dist": "agentrl-algorithms", "version": "0.1.0"},
            {"kind": "reward_function", "name": "reward.py:score", "dist": "file", "version": "a" * 64},
            {"kind": "tool_parser", "name": "hermes", "dist": "agentrl-tool-parsers", "version": "0.1.0"},
        ],
    }
    assert [each.name for each in tmp_path.iterdir()] == ["plugins.lock.json"]
    assert read_lock(path) == lock_of([GRPO, HERMES, SCORE])


# A machine that is busy makes examples slowly.
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(refs)
def test_lock_does_not_depend_on_the_order(found: list[PluginRef]) -> None:
    assert lock_of(found) == lock_of(reversed(found))
    assert diff_lock(lock_of(found), lock_of(reversed(found))) == []


def test_diff_names_every_other_version_but_no_other_choice() -> None:
    old = replace(lock_of([HERMES, SCORE, GRPO]), agentrl_core="0.1.0", python="3.11.2")
    changed = [
        replace(HERMES, version="0.2.0"),
        replace(SCORE, version="b" * 64),
        PluginRef("hook", "bell", "acme", "1"),
    ]
    new = replace(lock_of(changed), agentrl_core="0.2.0", python="3.12.0")
    assert diff_lock(old, new) == [
        "agentrl-core: 0.1.0 -> 0.2.0",
        "python: 3.11.2 -> 3.12.0",
        f"reward function 'reward.py:score': file {'a' * 64} -> file {'b' * 64}",
        "tool-call parser 'hermes': agentrl-tool-parsers 0.1.0 -> agentrl-tool-parsers 0.2.0",
    ]


def test_patch_release_of_python_is_no_difference() -> None:
    lock = replace(lock_of([]), python="3.11.2")
    assert diff_lock(lock, replace(lock, python="3.11.13")) == []


@pytest.mark.parametrize("text", [None, "{", "[]", '{"schema_version": 1}', '{"schema_version": 2}'])
def test_unreadable_lock_names_the_file(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "plugins.lock.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(PluginError, match="plugins.lock.json"):
        read_lock(path)
