"""``agentrl init``: what it writes is a configuration that trains; what it cannot use is an error."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner, Result

from agentrl_core.cli.main import app
from agentrl_core.config import load_config
from agentrl_testing import cli
from agentrl_testing.tiny_model import save_tiny_model

REWARD = "def mine(trajectory):\n    return 0.5\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "a model"
    save_tiny_model(path)
    return path


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(REWARD)
    Path("rows 1.jsonl").write_text('{"prompt": "1 + 1?", "reward_model": {"ground_truth": "2"}}\n')


def agentrl(*arguments: object, answers: str = "") -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=answers)


def test_the_example_passes_the_dry_run(model: Path) -> None:
    assert agentrl("init", "letters", "--model", model).exit_code == 0
    assert sorted(path.name for path in Path("letters").iterdir()) == [
        "config.yaml", "reward.py", "rows.jsonl", "tool.py",
    ]  # fmt: skip
    result = agentrl("train", "letters/config.yaml", "--dry-run", "data.max_prompt_length=2048")
    assert result.exit_code == 0, result.output
    assert "The configuration is valid" in result.output


@pytest.mark.parametrize(
    "algorithm, advantage, loss", [("grpo", "grpo", "ppo"), ("ppo", "gae", "ppo"), ("gspo", "grpo", "gspo")]
)
@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_own_parts(model: Path, algorithm: str, advantage: str, loss: str, engine: str) -> None:
    python = Path(".engines/vllm/bin/python")
    python.parent.mkdir(parents=True)
    python.touch(mode=0o755)
    options = ("--data", "rows 1.jsonl", "--tool", "calculator", "--reward", "./mine.py:mine")
    result = agentrl("init", "1", "--model", model, *options, "--engine", engine, "--algorithm", algorithm)
    assert result.exit_code == 0, result.output
    assert [path.name for path in Path("1").iterdir()] == ["config.yaml"]
    config = load_config(Path("1/config.yaml"))
    assert (config.algorithm.advantage.name, config.algorithm.loss.name) == (advantage, loss)
    assert (config.rollout.engine.name, config.trainer.name) == (engine, "1")
    assert config.cluster.runtime == ("ray" if engine == "vllm" else "local")


def test_the_parser_is_that_of_the_chat_template(model: Path) -> None:
    agentrl("init", "letters", "--model", model)
    assert yaml.safe_load(Path("letters/config.yaml").read_text())["rollout"]["tool_parser"] == "hermes"


def test_nothing_is_overwritten_without_force(model: Path) -> None:
    Path("letters").mkdir()
    Path("letters/reward.py").write_text("precious")
    result = agentrl("init", "letters", "--model", model)
    assert (result.exit_code, [path.name for path in Path("letters").iterdir()]) == (2, ["reward.py"])
    assert "letters/reward.py: exists already" in result.output
    assert agentrl("init", "letters", "--model", model, "--force").exit_code == 0
    assert "precious" not in Path("letters/reward.py").read_text()


@pytest.mark.parametrize(
    "options, message",
    [
        ((), "--model is missing"),
        (("--model", "nowhere"), "no such directory: nowhere"),
        (("--model", "."), "has no config.json"),
        (("--model", "org/name", "--data", "none.jsonl"), "no such file: none.jsonl"),
        (("--model", "org/name", "--tool", "calculatr"), "did you mean 'calculator'?"),
        (("--model", "org/name", "--reward", "./mine.py:yours"), "yours"),
        (("--model", "org/name", "--algorithm", "grpoo"), "did you mean 'grpo'?"),
        (("--model", "org/name", "--engine", "vlm"), "did you mean 'vllm'?"),
    ],
)
def test_what_cannot_be_used_is_an_error(options: tuple[str, ...], message: str) -> None:
    result = agentrl("init", "new", *options)
    assert (result.exit_code, Path("new").exists()) == (2, False)
    assert message in result.output


def test_questions_on_a_terminal(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    result = agentrl("init", "new", answers=f"{model}\n\n\n./mine.py:mine\n\nrloo\n")
    assert result.exit_code == 0, result.output
    config = load_config(Path("new/config.yaml"))
    assert (config.algorithm.advantage.name, config.rollout.engine.name) == ("rloo", "hf")
    assert [slot.registered_name for slot in config.reward.functions] == ["mine"]
