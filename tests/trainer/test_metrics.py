"""The numbers of a step, against references in plain Python and numpy."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_core.api import AgentLoopOutput, RewardResult, Termination
from agentrl_core.api.tree import Node, Tree, paths_of
from agentrl_core.protocol import DataProto
from agentrl_core.rollout.loop_output import TreeRow, adopt
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.trainer.metrics import batch_metrics, rollout_metrics, signal_metrics, source_metrics, throughput

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.mark.parametrize("seed", range(3))
def test_spread_over_sampled_tokens_is_that_of_numpy(seed: int) -> None:
    random = np.random.default_rng(seed)
    mask = random.random((5, 7)) < 0.5
    columns = {name: random.normal(size=(5, 7)).astype(np.float32) for name in ("advantages", "returns", "values")}
    batch = DataProto.from_dict(
        tensors={"response_mask": torch.from_numpy(mask), **{key: torch.from_numpy(x) for key, x in columns.items()}}
    )
    expected = {}
    for name, values in columns.items():
        picked = [float(values[row, column]) for row in range(5) for column in range(7) if mask[row, column]]
        mean = sum(picked) / len(picked)
        std = (sum((value - mean) ** 2 for value in picked) / len(picked)) ** 0.5
        for statistic, value in {"mean": mean, "max": max(picked), "min": min(picked), "std": std}.items():
            expected[f"critic/{name}/{statistic}"] = value
    assert batch_metrics(batch) == pytest.approx(expected, rel=1e-9)


def test_a_batch_without_a_sampled_token_has_no_spread() -> None:
    zeros = torch.zeros(2, 3)
    assert batch_metrics(DataProto.from_dict(tensors={"response_mask": zeros.bool(), "advantages": zeros})) == {}


@pytest.mark.parametrize(
    ("advantages", "groups", "masks", "share"),
    [
        ([0, 0, 1, -1, 0, 0], "aabbcc", [[1, 1]] * 4 + [[0, 0]] * 2, 0.5),
        ([1, -1, 0, 0], "abab", [[1, 1]] * 4, 0.0),
        ([0, 0, 0], "aab", [[1, 1]] * 3, 1.0),
        ([1e-9, -1e-9], "aa", [[1, 1]] * 2, 1.0),
        ([1, 1], "aa", [[0, 0]] * 2, 1.0),
    ],
)
def test_share_of_groups_without_signal(
    advantages: list[float], groups: str, masks: list[list[int]], share: float
) -> None:
    mask = torch.tensor(masks).bool()
    batch = DataProto.from_dict(
        tensors={"response_mask": mask, "advantages": torch.tensor(advantages)[:, None] * torch.ones(2)},
        non_tensors={"uid": np.array(list(groups), dtype=object)},
    )
    assert signal_metrics(batch) == {"advantage/groups_without_signal": share}


def test_share_of_prompts_whose_samples_are_equal() -> None:
    def sample(uid: str, *rows: list[int]) -> TrajectoryResult:
        outputs = [AgentLoopOutput([1], row, [1] * len(row), None, Termination.COMPLETED) for row in rows]
        return TrajectoryResult({"uid": uid}, uid, Termination.COMPLETED, adopt("by hand", Tree(), outputs))

    alone, equal = [sample("a", [1])], [sample("b", [1], [2]), sample("b", [1], [2])]
    other = [sample("c", [1], [2]), sample("c", [1], [3])]
    name = "rollout/identical_groups_share"
    assert name not in rollout_metrics(alone, 8)
    assert rollout_metrics(alone + equal, 8)[name] == 1.0
    assert rollout_metrics(alone + equal + other, 8)[name] == 0.5


def test_throughput_counts_prompts_and_responses_by_second_and_device() -> None:
    batch = DataProto.from_dict(tensors={"attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])})
    assert throughput(batch, seconds=2.0, devices=3) == {"perf/total_num_tokens": 6.0, "perf/throughput": 1.0}


def result(source: str, score: float | None, **timings: float) -> TrajectoryResult:
    failed = score is None
    return TrajectoryResult(
        {"uid": "u", "data_source": source}, "t", Termination.ENGINE_ERROR if failed else Termination.COMPLETED,
        [] if failed else adopt("by hand", Tree(), AgentLoopOutput([1], [2], [1], None, Termination.COMPLETED)),
        None if failed else RewardResult(score), timings=timings,
    )  # fmt: skip


def test_accuracy_of_the_rollout_by_source_leaves_failed_trajectories_out() -> None:
    results = [result("math", 1.0), result("math", 0.2), result("math", None), result("", 0.5)]
    assert source_metrics(results, correct_above=0.5) == pytest.approx({
        "train/math/accuracy": 0.5, "train/math/score_mean": 0.6,
        "train/default/accuracy": 0.0, "train/default/score_mean": 0.5,
    })  # fmt: skip


def test_rewards_are_those_of_trained_trajectories_only() -> None:
    of_an_opponent = result("a", 9.0)
    of_an_opponent.outputs[0].trained = False
    scored_and_failed = replace(result("a", 7.0), termination=Termination.ABORTED)
    metrics = rollout_metrics([result("a", 1.0), of_an_opponent, scored_and_failed, result("a", 0.0)], 8)
    rewards = {name: metrics[f"reward/{name}"] for name in ("mean", "max", "min", "std")}
    assert rewards == {"mean": 0.5, "max": 1.0, "min": 0.0, "std": 0.5}
    assert metrics["response_length/mean"] == 1


def test_times_of_trajectories_count_one_without_tools_as_0() -> None:
    metrics = rollout_metrics([result("a", 1.0, generate=1.0, tools=3.0), result("a", 0.0, generate=2.0)], 8)
    times = {name: value for name, value in metrics.items() if name.startswith("timing/trajectory/")}
    assert times == {
        "timing/trajectory/generate/mean": 1.5, "timing/trajectory/generate/max": 2.0,
        "timing/trajectory/generate/min": 1.0, "timing/trajectory/tools/mean": 1.5,
        "timing/trajectory/tools/max": 3.0, "timing/trajectory/tools/min": 0.0,
    }  # fmt: skip


def test_each_path_of_a_trajectory_has_a_length_and_a_budget_of_its_own() -> None:
    def prompt(parent: Node | None = None) -> Node:
        return Node(parent, "prompt", [1, 1])

    def turn(parent: Node, tokens: int) -> Node:
        return Node(parent, "turn", [2] * tokens)

    rewritten, forked = turn(prompt(), 5), turn(prompt(), 3)
    leaves = [
        [turn(prompt(), 6), turn(prompt(), 4)],  # two branches, each with a prompt of its own
        [rewritten, turn(prompt(rewritten), 3)],  # a history that was rewritten after 5 of 8 tokens
        [turn(forked, 2), turn(forked, 4)],  # a fork after 3 tokens
        [turn(prompt(), 2)],
    ]
    rows = [[TreeRow(path) for path in paths_of(Tree(), each)] for each in leaves]
    results = [replace(result("a", 1.0), outputs=each) for each in rows]
    metrics = rollout_metrics(results, 8)
    lengths = [6, 4, 8, 5, 7, 2]
    assert metrics["response_length/mean"] == pytest.approx(sum(lengths) / 6)
    assert (metrics["response_length/max"], metrics["response_length/min"]) == (8, 2)
    assert metrics["response_length/clip_ratio"] == pytest.approx(1 / 6)


def documented() -> re.Pattern[str]:
    """A pattern of the names in the first column of the page's tables; ``<x>`` stands for anything, ``…`` for the name
    before it up to its last part."""
    names: list[str] = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            for name in re.findall(r"`([^`]+)`", line.split("|")[1]):
                names.append(name if not name.startswith("…") else f"{names[-1].rpartition('/')[0]}/{name[2:]}")
    return re.compile("|".join(re.sub(r"<\w+>", ".+", re.escape(name)) for name in names))


def test_every_metric_of_a_run_is_documented(fit: Callable[..., RunDir]) -> None:
    changes: dict[str, Any] = {"algorithm.advantage": "gae", "algorithm.kl_coef": 0.1, "trainer.validation.n": 2}
    run = fit({**changes, "data.validation_files": ["validation.jsonl"], "trainer.steps": 1})
    names = {name for row in run.read_metrics() for name in row} - {"step", "time"}
    assert "critic/values/std" in names and names
    assert sorted(name for name in names if not documented().fullmatch(name)) == []
    assert run.read_metrics()[-1]["epoch"] == pytest.approx(2 / 6)
