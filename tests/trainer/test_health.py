"""A run that learns nothing says so once, with causes; a healthy one is silent."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from agentrl_core.cli.main import app
from agentrl_core.config import load_config
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.trainer.health import CHECKS, Health

Fit = Callable[..., RunDir]
PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
CODE = '''
"""Answers, rewards and algorithms of these runs."""
import random

from agentrl_core.api import AdvantageEstimator, AdvantageOutput, PolicyLoss, PolicyLossOutput
from agentrl_testing.tiny_model import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def encode(text):
    return TOKENIZER.encode(text + "<|im_end|>", add_special_tokens=False)


def varied(request_id, turn, prompt_ids):
    number = random.Random(f"{request_id} {turn}").randrange(10**10)
    return encode("a" * (number % 4) + f"{number:010d}")


def same(request_id, turn, prompt_ids):
    return encode("same")


def broken_call(request_id, turn, prompt_ids):
    answer = varied(request_id, turn, prompt_ids)
    return answer if turn else encode('<tool_call>{"name": </tool_call>')


def letters(trajectory):
    text = trajectory.model_text
    return sum(letter.islower() for letter in text) / max(len(text), 1)


def huge(trajectory):
    return 1e30 * letters(trajectory)


def constant(trajectory):
    return 0.5


def by_prompt(trajectory):
    return float(trajectory.extra_info["index"])


class Zeros(AdvantageEstimator):
    def __call__(self, batch):
        return AdvantageOutput(0 * batch.token_rewards, batch.token_rewards)


class Rounded(AdvantageEstimator):
    """What a float32 mean of equal rewards leaves."""

    def __call__(self, batch):
        noise = batch.response_mask * 1e-9
        return AdvantageOutput(noise, noise)


class Regularised(PolicyLoss):
    """Has a gradient without an advantage."""

    def __call__(self, batch):
        return PolicyLossOutput(-batch.advantages * batch.log_probs + 0.1 * batch.log_probs**2, {})


class AllMasked(PolicyLoss):
    def __call__(self, batch):
        return PolicyLossOutput(0 * batch.advantages * batch.log_probs, {})
'''
TOOLS = {"rollout.agent.loops": ["tool_agent"], "tools": ["calculator"], "data.max_prompt_length": 512}


def scripted(script: str) -> dict[str, Any]:
    return {"rollout.engine": {"name": "scripted", "config": {"script": f"health_code:{script}"}}}


def reward(name: str) -> dict[str, Any]:
    return {"reward.functions": [{"name": f"./health_code.py:{name}", "isolation": "inline"}]}


HEALTHY = {**scripted("varied"), **reward("letters"), "rollout.max_response_length": 256, "trainer.warn_after": 3}
ILL: dict[str, tuple[str, Mapping[str, Any]]] = {
    "equal samples": ("equal_samples", {**scripted("same"), **reward("by_prompt")}),
    "a constant reward": ("constant_reward", reward("constant")),
    "a constant reward, whatever the advantages": (
        "constant_reward", {**reward("constant"), "algorithm.advantage": "gae"},
    ),
    "equal rewards in each group": ("no_signal", reward("by_prompt")),
    "somebody's estimator of zeros": ("no_signal", {"algorithm.advantage": "./health_code.py:Zeros"}),
    "somebody's estimator of rounding errors": ("no_signal", {"algorithm.advantage": "./health_code.py:Rounded"}),
    "no signal, but somebody's loss moves": (
        "no_signal", {**reward("by_prompt"), "algorithm.loss": "./health_code.py:Regularised"},
    ),
    "gradients that are not finite": (
        "skipped_steps",
        {
            **reward("huge"), "actor.max_skipped_updates": 10,
            "algorithm.advantage": {"name": "grpo", "config": {"norm_by_std": False}},
        },
    ),
    "a loss that masks everything": ("zero_gradient", {"algorithm.loss": "./health_code.py:AllMasked"}),
    "no entropy": ("no_entropy", {"model.path": "sharp"}),
    "responses at the limit": ("length_limit", {"rollout.max_response_length": 5}),
    "calls that nobody can read": ("parse_errors", {**TOOLS, **scripted("broken_call")}),
    "tools that nobody calls": ("no_tool_calls", TOOLS),
}  # fmt: skip


@pytest.fixture(autouse=True)
def code(tiny_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tiny_run.folder / "health_code.py").write_text(CODE)
    sharp = shutil.copytree(tiny_run.model, tiny_run.folder / "sharp") / "model.safetensors"
    weights = load_file(sharp)
    save_file({**weights, "model.norm.weight": 1e5 * weights["model.norm.weight"]}, sharp, {"format": "pt"})
    monkeypatch.syspath_prepend(str(tiny_run.folder))


def warned(run: RunDir) -> list[str]:
    state = run.read_state()
    assert state is not None
    return [warning["check"] for warning in state.warnings]


@pytest.mark.parametrize("illness", ILL)
def test_an_illness_is_warned_of_once(
    illness: str, fit: Fit, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    name, changes = ILL[illness]
    run = fit({**HEALTHY, **changes, "trainer.steps": 5})
    check = next(check for check in CHECKS if check.name == name)
    texts = [record.getMessage() for record in caplog.records if "Usual causes" in record.getMessage()]
    assert [text.partition(":")[0] for text in texts] == [name]
    assert texts[0].startswith(f"{name}: in steps 1 to 3 {check.finding}. Usual causes: {check.causes[0]}; ")
    assert "`agentrl " in texts[0] and "{" not in texts[0]
    (stored,) = json.loads(run.state_file.read_text())["warnings"]
    assert (stored["check"], stored["first"], stored["last"], stored["over"]) == (name, 1, 5, False)
    assert stored["message"] == texts[0].replace("1 to 3", "1 to 5").replace("--step 3", "--step 5")
    assert all(set(check.metrics) <= row.keys() for row in run.read_metrics())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {**TOOLS, "tools": []},
        {"algorithm.advantage": "gae", "critic.warmup_steps": 4},
        {"rollout.n": 1, "data.batch_size": 1, "algorithm.advantage": "reinforce_plus_plus", **reward("constant")},
        {**reward("constant"), "algorithm.loss": "sft"},
        {**reward("constant"), "trainer.warn_after": 0},
    ],
    ids=["plain", "no tools", "critic warm-up", "one trajectory a step", "a loss without advantages", "turned off"],
)
def test_a_healthy_run_is_silent(changes: Mapping[str, Any], fit: Fit, caplog: pytest.LogCaptureFixture) -> None:
    run = fit({**HEALTHY, "trainer.steps": 5, **changes})
    assert [name for name in warned(run) if name != "no_signal" or "rollout.n" not in changes] == []
    assert "constant_reward" not in caplog.text


def test_a_streak_survives_a_resume(fit: Fit, caplog: pytest.LogCaptureFixture) -> None:
    ill = {**HEALTHY, **TOOLS, "trainer.resume": "auto", "trainer.warn_after": 3}
    assert warned(fit({**ill, "trainer.steps": 2})) == []
    assert warned(fit({**ill, "trainer.steps": 3})) == ["no_tool_calls"]
    assert caplog.text.count("no_tool_calls: in steps 1 to 3") == 1
    caplog.clear()
    assert warned(fit({**ill, "trainer.steps": 4})) == ["no_tool_calls"]
    assert "no_tool_calls" not in caplog.text


def test_the_end_of_a_run_lists_its_warnings(tiny_run: Any) -> None:
    changes = {**HEALTHY, **TOOLS, "trainer.steps": 4, "trainer.trackers": ["jsonl"]}
    result = CliRunner().invoke(app, ["train", str(tiny_run(changes))])
    assert result.exit_code == 0, result.output
    listed = result.output.partition("Warnings of this run")[2]
    assert listed.count("no_tool_calls: in steps 1 to 4 no trajectory called a tool.") == 1


# Streaks, with the metrics of a run


@pytest.fixture
def health(tiny_run: Any) -> Health:
    config = load_config(tiny_run({**HEALTHY, "trainer.warn_after": 2}))
    return Health(config, Path("runs/of mine"), reads_advantages=True)


def silent(share: float) -> dict[str, float]:
    return {"advantage/groups_without_signal": share}


def test_an_illness_that_comes_back_is_warned_of_again(health: Health, caplog: pytest.LogCaptureFixture) -> None:
    for step, share in enumerate([1, 1, 1, 0.5, 1, 0.5, 1, 1, 1], start=1):
        health.note(step, silent(share))
    starts = re.findall(r"no_signal: in (steps \d+ to \d+)", caplog.text)
    assert starts == ["steps 1 to 2", "steps 7 to 8"]
    assert [(each["first"], each["last"], each["over"]) for each in health.warnings] == [(1, 3, True), (7, 9, False)]
    assert "agentrl rollouts show 'runs/of mine' --step 2 -n 3" in caplog.text


def test_a_step_that_cannot_tell_neither_ends_a_streak_nor_counts(health: Health) -> None:
    health.note(1, silent(1))
    health.note(2, {})
    assert health.warnings == []
    health.note(3, silent(1))
    assert [(each["first"], each["last"], each["steps"]) for each in health.warnings] == [(1, 3, 2)]


def test_each_policy_is_watched_and_named(health: Health, caplog: pytest.LogCaptureFixture) -> None:
    def step(**norms: float) -> dict[str, float]:
        pairs = {"grad_norm": 1.0, "skipped_steps": 0.0}
        own = {f"policy/{name}/actor/{key}": value for name in ("one", "two") for key, value in pairs.items()}
        return own | {f"policy/{name}/actor/grad_norm": norm for name, norm in norms.items()}

    for number in range(1, 15):
        health.note(number, step(two=0.0))
    (warning,) = caplog.messages
    assert warning.startswith("zero_gradient: policy 'two', in steps 1 to ")
    health.note(15, step())
    assert [(streak.policy, streak.over) for streak in health.streaks] == [("two", True)]


def test_a_short_run_that_trained_nothing_says_so_at_its_end(health: Health) -> None:
    health.note(1, silent(1) | {"reward/max": 0.0, "reward/min": 0.0}, last=True)
    assert [each["check"] for each in health.warnings] == ["no_signal"]


def test_a_run_that_trained_at_first_ends_in_silence(health: Health) -> None:
    health.note(1, silent(0.5))
    health.note(2, silent(1), last=True)
    assert health.warnings == []


# Documentation


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_the_documentation_has_each_check_with_its_causes(check: Any) -> None:
    section = re.search(
        rf"^### `{check.name}`\n(.*?)(?=^##)", PAGE.read_text() + "\n## End\n", re.DOTALL | re.MULTILINE
    )
    assert section is not None, f"docs/troubleshooting.md has no section for {check.name}"
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", section[1], re.MULTILINE)
    causes = [cause for cause, _ in rows if cause not in ("usual cause", "---")]
    assert causes == [cause.replace("{model}", "MODEL") for cause in check.causes]
    assert all(f"`{metric}`" in section[1] for metric in check.metrics)
    assert f"`{check.command.format(run='RUN', step='N', model='MODEL')}`" in section[1]
    assert all(metric in (PAGE.parent / "metrics.md").read_text() for metric in check.metrics)


def test_the_documentation_has_no_other_check() -> None:
    assert re.findall(r"^### `(\w+)`", PAGE.read_text(), re.MULTILINE) == [check.name for check in CHECKS]
