"""Files that no person would write: reported like every other mistake, within a moment."""

import pytest

from agentrl_core.config import to_dict, to_yaml
from agentrl_core.config.writing import written

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "more than 100000 values; do aliases"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("a: \x01", "special characters are not allowed"),
        ("trainer: {seed: " + "9" * 5000 + "}", "Exceeds the limit"),
    ],
    ids=["alias bomb", "deep nesting", "control character", "huge integer"],
)
def test_a_hostile_file_is_a_problem_with_a_place(problems, text: str, message: str) -> None:
    (found,) = problems(text)
    assert found.startswith("config.yaml") and message in found


@pytest.mark.parametrize(
    "override",
    ["model.chat_template_kwargs=" + "{a: " * 200 + "1" + "}" * 200, "a." * 2000 + "b=1"],
    ids=["nested value", "path of many keys"],
)
def test_an_override_nested_too_deeply_is_a_problem(problems, valid, override: str) -> None:
    found = problems(f"{valid}trainer: {{name: 'x${{model.dtype}}'}}", override)
    assert any("nested too deeply" in each or "at most 64 keys" in each for each in found)


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", "9" * 400], ids=["inf", "-inf", "nan", "400 digits"])
def test_an_infinite_learning_rate_is_refused(problems, valid, value: str) -> None:
    (found,) = problems(valid, f"actor.optimizer.lr={value}")
    assert "actor.optimizer.lr" in found and "expected a number > 0" in found


def test_a_password_from_the_environment_is_not_written(load, valid, monkeypatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    text = f"""{valid.replace("single_turn", "tool_agent")}
tools: [{{name: search, config: {{secret: '${{oc.env:SECRET}}'}}}}]
trainer: {{name: 'run-${{tools.0.config.secret}}'}}
"""
    config = load(text)
    assert config.tools[0].config.secret == "hunter2"
    assert "hunter2" not in to_yaml(config) and "hunter2" not in str(to_dict(config))
    assert written(config)["tools"][0]["config"]["secret"] == "${oc.env:SECRET}"
    assert load(to_yaml(config)) == config
    config.tools[0].config.secret = "changed in Python"
    assert written(config)["tools"][0]["config"]["secret"] == "changed in Python"
