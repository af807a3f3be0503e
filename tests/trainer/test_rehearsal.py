"""What a dry run reports, which a run would find out only after it has moved an earlier run and loaded models."""

import shutil
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from agentrl_core.api import AgentRLError
from agentrl_core.cli.main import app
from agentrl_core.config import load_config
from agentrl_core.trainer.preparation import Preparation

PLUGINS = '''
from agentrl_core.api import Tool, ToolResponse, ToolResult, function_schema, hookimpl


def same(text: str) -> str:
    """Says it."""
    return text


class Same(Tool):
    """Has the function name of `same`."""
    schema = function_schema("same", "Says it.", {"text": {"type": "string"}})

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResult(ToolResponse(parameters["text"]))


class Forgetful(Tool):
    schema = function_schema("forgetful", "Takes no parameters.", {})

    async def execute(self, instance_id):
        return ToolResult(ToolResponse(""))


class Blocking(Tool):
    schema = function_schema("blocking", "Is not async.", {})

    def execute(self, instance_id, parameters, **kwargs):
        return ToolResult(ToolResponse(""))


def two_arguments(trajectory, expected):
    return 0.0


class Broken:
    def __init__(self, config, context):
        raise RuntimeError("cannot be built")


class Misspelt:
    def __init__(self, config, context):
        pass

    @hookimpl
    def on_step_ends(self, step):
        pass
'''
LOOPS = {"rollout.agent.loops": ["tool_agent"], "data.max_prompt_length": 1024}


def dry_run(path: Path) -> Result:
    return CliRunner().invoke(app, ["train", str(path), "--dry-run"], env={"COLUMNS": "300"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tools": ["./odd.py:same", "./odd.py:Same"], **LOOPS},
            "tools.1: another tool has the function name 'same' too",
        ),
        (
            {"tools": ["./odd.py:Forgetful"], **LOOPS},
            "tools.0: execute(instance_id) cannot be called with (instance_id, parameters): too many positional",
        ),
        ({"tools": ["./odd.py:Blocking"], **LOOPS}, "tools.0: execute is not a coroutine function"),
        (
            {"tools": ["./odd.py:same"], "rollout.tool_parser": "qwen3_coder", **LOOPS},
            "rollout.tool_parser: qwen3_coder does not read the calls that the model's chat template writes, such as",
        ),
        (
            {"tools": ["./odd.py:same"], "rollout.tool_parser": "qwen3_coder", **LOOPS},
            "Set rollout.tool_parser to hermes",
        ),
        (
            {"reward.functions": ["./odd.py:two_arguments"]},
            "reward.functions.0: two_arguments(trajectory, expected) cannot be called with (trajectory): missing",
        ),
        ({"rollout.agent.loops": ["./odd.py:Broken"]}, "building agent loop 'odd.py:Broken' raised RuntimeError"),
        ({"rollout.tool_parser": "./odd.py:Broken"}, "RuntimeError: cannot be built"),
        ({"trainer.trackers": ["./odd.py:Broken"]}, "building tracker 'odd.py:Broken' raised RuntimeError"),
        ({"hooks": ["./odd.py:Misspelt"]}, "hooks.0: hook 'Misspelt' implements 'on_step_ends', which is no hook"),
        (
            {"cluster.device": "cuda"},
            "cluster.device is 'cuda', or Ray gave this process a GPU, and torch",
        ),
        ({"rollout.engine.name": "sglang"}, "needs sglang"),
        ({"trainer.resume": "runs/nope"}, "runs/nope"),
        (
            {
                "data.validation_files": ["validation.jsonl"],
                "trainer.checkpoint.best_metric": "validation/tiny/acuracy_greedy",
            },
            "'validation/tiny/acuracy_greedy' is never measured; allowed: validation/tiny/accuracy_greedy, ",
        ),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else None,
)
def test_a_dry_run_reports_what_would_fail_later(tiny_run: Any, changes: dict[str, Any], message: str) -> None:
    path = tiny_run(changes)
    (tiny_run.folder / "odd.py").write_text(PLUGINS)
    result = dry_run(path)
    assert result.exit_code != 0
    shown = result.output + str(result.exception if isinstance(result.exception, AgentRLError) else "")
    assert message in " ".join(shown.split()), shown
    assert not (tiny_run.folder / "runs").exists()


def test_a_parser_of_control_tokens_hints_at_the_renderer_that_reads_them(tiny_run: Any) -> None:
    templates = Path(str(distribution("trl").locate_file("trl/chat_templates")))
    path = tiny_run(
        {
            "tools": ["./odd.py:same"],
            "rollout.tool_parser": "harmony",
            "model.chat_template": str(templates / "gptoss.jinja"),
            **LOOPS,
            "data.max_prompt_length": 4000,
        }
    )
    (tiny_run.folder / "odd.py").write_text(PLUGINS)
    assert "set rollout.renderer to harmony, which reads the tokens" in " ".join(dry_run(path).output.split())


def copied_model(tiny_run: Any) -> Path:
    model = tiny_run.folder / "copied"
    shutil.copytree(tiny_run.model, model)
    return model


def cut_weights(model: Path) -> None:
    weights = next(model.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])


def without_tokenizer(model: Path) -> None:
    for file in model.glob("*token*"):
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [(cut_weights, "model.safetensors cannot be read, copy it again"), (without_tokenizer, "has no tokenizer")],
)
def test_a_dry_run_reports_a_damaged_model(tiny_run: Any, damage: Callable[[Path], None], message: str) -> None:
    model = copied_model(tiny_run)
    damage(model)
    result = dry_run(tiny_run({"model.path": str(model)}))
    assert result.exit_code != 0
    assert message in " ".join(result.output.split()), result.output


def test_a_dry_run_reports_a_damaged_teacher(tiny_run: Any) -> None:
    model = copied_model(tiny_run)
    changes = {"algorithm.advantage": "on_policy_distillation", "teacher.path": str(model)}
    cut_weights(model)
    result = dry_run(tiny_run(changes))
    assert result.exit_code == 2 and f"weights in {model}: " in " ".join(result.output.split()), result.output
    shutil.rmtree(model)
    assert "teacher.path" in (output := dry_run(tiny_run(changes)).output) and "no such directory" in output


def test_a_dry_run_compares_options_with_those_of_the_checkpoint(fit: Any, tiny_run: Any) -> None:
    fit({"trainer.steps": 1, "trainer.checkpoint.interval": 1})
    changes = {"trainer.steps": 2, "trainer.resume": "auto"}
    assert dry_run(tiny_run(changes)).exit_code == 0
    result = dry_run(tiny_run({**changes, "data.batch_size": 1}))
    assert result.exit_code == 2
    assert "was made with another order of the data: data.batch_size: 2 -> 1" in " ".join(result.output.split())


COUNTED = """
from agentrl_core.api import Tool, ToolResponse, ToolResult, function_schema

def note(what):
    with open({path!r}, "a") as file:
        file.write(what + "\\n")

class Noted(Tool):
    schema = function_schema("noted", "Notes each build.", {{}})

    def __init__(self, config, context):
        note("tool")

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResult(ToolResponse(""))

class Score:
    isolation = "inline"

    def __init__(self, config, context):
        note("check" if context.check_only else "weights")

    def __call__(self, trajectory):
        return 1.0
"""


def test_checking_builds_tools_and_rewards_once_and_no_weights(tiny_run: Any, tmp_path: Path) -> None:
    """The workers of the run build theirs; here is nothing but a check."""
    built = tmp_path / "built"
    (tiny_run.folder / "counted.py").write_text(COUNTED.format(path=str(built)))
    config = load_config(tiny_run({
        "tools": [{"name": "./counted.py:Noted", "isolation": "inline"}],
        "rollout.agent.loops": ["tool_agent"],
        "data.max_prompt_length": 2048,
        "reward.functions": ["./counted.py:Score"],
    }))  # fmt: skip
    Preparation.of(config)
    assert sorted(built.read_text().split()) == ["check", "tool"]
