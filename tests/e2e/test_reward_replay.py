"""``reward replay``: trajectories of a run, scored again in one process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from agentrl_core.api import RewardTrajectory
from agentrl_core.cli.main import app
from agentrl_core.runs.records import (
    RolloutRecord,
    RolloutWriter,
    records_of,
    reward_input,
    reward_trajectory_of,
    to_json,
)
from agentrl_core.runs.run_dir import RunDir

REWARD = """
import os
import threading

from agentrl_core.api import RewardResult


def same(trajectory):
    return float(trajectory.last_text == trajectory.ground_truth)


async def lenient(trajectory):
    assert threading.current_thread() is threading.main_thread()
    return RewardResult(1.0 if trajectory.ground_truth in trajectory.model_text else 0.0, {"pid": os.getpid()})


def raises(trajectory):
    return 1 / int(trajectory.extra_info["sample"])


def nothing(trajectory):
    return None
"""


def trajectory(sample: int, text: str) -> RewardTrajectory:
    return RewardTrajectory(
        messages=[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": text}],
        model_text=f"thinking\n{text}", last_text=text, full_text=f"thinking{text}", ground_truth="4",
        data_source="sums", extra_info={"sample": sample}, tool_rewards=[0.5], turn_scores=[1.0], num_turns=2,
        row={"level": 3}, sampled_tokens=5,
    )  # fmt: skip


def record(sample: int, text: str, **fields: Any) -> dict[str, Any]:
    seen = trajectory(sample, text)
    return RolloutRecord(
        **{
            "step": 1, "split": "train", "uid": "p", "trajectory_id": f"p-{sample}", "sample": sample,
            "prompt_ids": [1], "response_ids": [2], "response_mask": [1], "messages": list(seen.messages),
            "ground_truth": "4", "data_source": "sums", "tool_rewards": [0.5], "turn_scores": [1.0], "num_turns": 2,
            "reward": 0.0, "reward_input": reward_input(seen), **fields,
        }
    ).content  # fmt: skip


@pytest.fixture
def rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "reward.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rich._console", None)
    return RolloutWriter(tmp_path / "rollouts").write(
        1,
        "train",
        [
            record(0, "4", reward=1.0),
            record(1, "it is 4"),
            record(2, "5", reward=2.0, reward_metrics={"same": 0.0}),
            record(3, "4", reward=None, termination="reward_error"),
            record(4, "", reward=None, reward_input=None, termination="engine_error"),
        ],
    )


def replay(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["reward", "replay", *map(str, arguments)], env={"COLUMNS": "200"})


def rows(result: Result) -> list[list[str]]:
    assert result.exit_code == 0, result.output
    return [line.split() for line in result.stdout.splitlines() if line.startswith("p-")]


def test_old_and_new_scores(rollouts: Path) -> None:
    result = replay(rollouts, "--reward", "./reward.py:same")
    assert rows(result) == [
        ["p-0", "1", "1"],
        ["p-1", "0", "0"],
        ["p-2", "0", "0"],
        ["p-3", "none", "1", "reward"],
    ]
    assert result.stdout.splitlines()[-3:] == [
        "4 trajectories, 1 differ: reward 1",
        "mean reward 0.3333 -> 0.5",
        "1 more were never scored in the run and are left out",
    ]


def test_json_has_every_trajectory(rollouts: Path) -> None:
    result = replay(rollouts, "--reward", "./reward.py:same", "--json")
    content = json.loads(result.stdout)
    assert content["left_out"] == 1
    assert [(each["trajectory_id"], each["old"], each["new"]) for each in content["trajectories"]] == [
        ("p-0", 1, 1),
        ("p-1", 0, 0),
        ("p-2", 0, 0),
        ("p-3", None, 1),
    ]
    assert [bool(each["changes"]) for each in content["trajectories"]] == [False, False, False, True]


def test_a_coroutine_with_details_and_in_this_process(rollouts: Path) -> None:
    scores = [row[2] for row in rows(replay(rollouts, "--reward", "./reward.py:lenient"))]
    assert scores == ["1", "1", "0", "1"]


def test_a_reward_sees_what_it_saw_in_the_run() -> None:
    seen = trajectory(3, "4")
    again = reward_trajectory_of(records_of(to_json(record(3, "4")))[0])
    assert again == seen


def test_a_packaged_function_without_a_configuration(rollouts: Path) -> None:
    assert [row[2] for row in rows(replay(rollouts, "--reward", "exact_number"))] == ["1", "1", "0", "1"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--reward", "./reward.py:sam"], 2, "the file has no 'sam', did you mean 'same'?"),
        (["--reward", "./rewards.py:same"], 2, "there is no file"),
        (["--reward", "exact_numbr"], 2, "did you mean 'exact_number'?"),
        (
            ["--reward", "./reward.py:raises"],
            1,
            "reward function 'raises' raised ZeroDivisionError for trajectory p-0: division by zero (`agentrl "
            "--verbose …` shows where)",
        ),
        (
            ["--reward", "./reward.py:nothing"],
            1,
            "reward function 'nothing' for trajectory p-0 returned None; allowed are a number, a bool or a "
            "RewardResult",
        ),
    ],
)
def test_messages(rollouts: Path, arguments: list[str], code: int, message: str) -> None:
    result = replay(rollouts, *arguments)
    assert (result.exit_code, message in result.stderr) == (code, True), result.stderr


def test_a_large_step_shows_only_what_changed_and_all_on_request(rollouts: Path) -> None:
    records = [record(sample, "5" if sample % 8 else "4") for sample in range(256)]
    RolloutWriter(rollouts.parent).write(1, "train", records)
    few = replay(rollouts, "--reward", "./reward.py:same")
    assert [row[0] for row in rows(few)] == [f"p-{sample}" for sample in range(0, 160, 8)]
    assert "12 more that differ are not shown: --all" in few.stdout
    assert few.stdout.splitlines()[-2:] == ["256 trajectories, 32 differ: reward 32", "mean reward 0 -> 0.125"]
    assert len(rows(replay(rollouts, "--reward", "./reward.py:same", "--all"))) == 256


def test_missing_and_empty_files(rollouts: Path) -> None:
    missing = replay("absent.jsonl", "--reward", "./reward.py:same")
    assert "absent.jsonl: no such file; expected rollouts/step-….jsonl of a run directory" in missing.stderr
    empty = rollouts.with_name("empty.jsonl")
    empty.write_text(to_json(record(0, "", reward_input=None)) + "\n")
    assert "holds no trajectory that a reward has seen" in replay(empty, "--reward", "./reward.py:same").stderr
    empty.write_text("{}\n")
    assert f"{empty}:1: a rollout record of schema version None" in replay(empty, "--reward", "./reward.py:same").stderr


def test_of_a_run_with_the_options_of_its_configuration(
    fit: Callable[..., RunDir], tiny_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rich._console", None)
    run = fit({"trainer.steps": 1})
    config = tiny_run.folder / "config.yaml"
    monkeypatch.chdir(tiny_run.folder.parent)
    rollouts = run.rollout_file(1, "train")
    result = replay(rollouts, "--reward", "lower", "--config", config)
    assert result.exit_code == 0, result.output
    assert "4 trajectories, 0 differ" in result.stdout
    arguments = ["replay", str(run.path), "--reward", "lower", "--config", str(config)]
    same = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert same.stdout == result.stdout
    both = CliRunner().invoke(app, ["replay", str(run.path), "--reward", "lower", "--set", "rollout.n=2"])
    assert both.exit_code == 2 and "--reward" in both.output
    other = replay(rollouts, "--reward", "upper", "--config", config)
    assert f"--reward: 'upper' is not in reward.functions of {config}; listed: lower" in other.stderr
