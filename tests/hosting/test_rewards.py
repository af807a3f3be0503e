"""Reward functions, the manager above them, and what becomes of their failures."""

import asyncio
import math
import time
from typing import Any

import numpy as np
import pytest

from agentrl_core.api import RewardError, RewardResult, RewardTrajectory
from agentrl_core.config.schema import RewardConfig, RewardFunctionSlot, RewardManagerSlot
from agentrl_core.hosting.rewards import HostedRewardFunction, RewardWorker, check_score

TRAJECTORY = RewardTrajectory(messages=[], model_text="the answer", last_text="answer", full_text="all of it")

FUNCTIONS = """
import asyncio, os
from agentrl_core.api import RewardResult

def raises(trajectory):
    raise KeyError("ground truth")

def nan(trajectory):
    return float("nan")

def nothing(trajectory):
    return None

def text(trajectory):
    return "1.0"

def right(trajectory):
    return trajectory.last_text == "answer"

def length(trajectory):
    return RewardResult(len(trajectory.model_text), {"pid": float(os.getpid())})

def spins(trajectory):
    while True:
        pass

def dies(trajectory):
    os._exit(4)

async def hangs(trajectory):
    await asyncio.Event().wait()

async def slowly(trajectory):
    await asyncio.sleep(0)
    return 0.5

async def times_out(trajectory):
    raise TimeoutError("a judge of its own")
"""


@pytest.fixture
def score(make_slot):
    """The score of one function; the kind of isolation by keyword."""

    def run(name: str, isolation: Any = "inline", **fields: Any) -> RewardResult:
        slot = make_slot(RewardFunctionSlot, FUNCTIONS, name, isolation=isolation, **fields)

        async def scenario() -> RewardResult:
            function = HostedRewardFunction(slot)
            try:
                return await function(TRAJECTORY)
            finally:
                await function.close()

        return asyncio.run(scenario())

    return run


@pytest.mark.parametrize("isolation", ["inline", "process"])
def test_a_score_with_its_metrics(score, isolation) -> None:
    result = score("length", isolation)
    assert result.score == 10.0
    assert (result.metrics["pid"] == score("length").metrics["pid"]) == (isolation == "inline")


def test_bools_and_coroutines_are_scores(score) -> None:
    assert score("right") == RewardResult(1.0) and score("slowly") == RewardResult(0.5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "reward function 'raises' raised KeyError: 'ground truth'"),
        ("nan", "score=nan, which is not a finite number"),
        ("nothing", "returned None; allowed are a number, a bool or a RewardResult"),
        ("text", "returned '1.0'; allowed"),
        ("hangs", "reward function 'hangs': no answer within 0.05 s"),
        ("times_out", "raised TimeoutError: a judge of its own"),
    ],
)
def test_a_reward_that_fails_is_an_error_and_never_a_zero(score, name: str, message: str) -> None:
    with pytest.raises(RewardError) as caught:
        score(name, timeout=0.05)
    assert message in str(caught.value)


def test_a_score_outside_of_the_declared_range_is_a_reward_error(score) -> None:
    most = len(TRAJECTORY.model_text)
    assert score("length", range=[0.0, most]).score == most
    with pytest.raises(RewardError, match=rf"'length' returned {most}, outside of its range \[0.0, 0.5\]"):
        score("length", range=[0.0, 0.5])


@pytest.mark.slow
def test_a_reward_that_spins_or_dies_or_raises_in_its_process(score) -> None:
    start = time.monotonic()
    with pytest.raises(RewardError, match="no answer within 0.2 s; its process was killed"):
        score("spins", "process", timeout=0.2)
    assert time.monotonic() - start < 30
    with pytest.raises(RewardError, match="its process died with exit code 4"):
        score("dies", "process")
    with pytest.raises(RewardError, match="KeyError: 'ground truth'") as caught:
        score("raises", "process")
    assert "Traceback" in str(caught.value) and "in raises" in str(caught.value)


def test_a_function_of_a_file_runs_in_a_process_unless_the_slot_says_otherwise(make_slot) -> None:
    assert HostedRewardFunction(make_slot(RewardFunctionSlot, FUNCTIONS, "nan"))._pool is not None
    assert HostedRewardFunction(make_slot(RewardFunctionSlot, FUNCTIONS, "nan", isolation="inline"))._pool is None


@pytest.mark.parametrize("value", [1, True, 0.0, np.float32(2), np.int64(3), np.bool_(True), RewardResult(-1.5)])
def test_numbers_are_scores(value: Any) -> None:
    number = value.score if isinstance(value, RewardResult) else value
    assert check_score("x", value).score == float(number)


@pytest.mark.parametrize(
    "value",
    [None, "1", b"1", "", math.nan, math.inf, -math.inf, [1.0], {}, np.array([1.0, 2.0]), RewardResult(None), 10**400],  # type: ignore[arg-type]
    ids=lambda value: repr(value)[:40],
)
def test_nothing_else_is_coerced(value: Any) -> None:
    with pytest.raises(RewardError, match="x returned"):
        check_score("x", value)


@pytest.mark.parametrize("metric", [None, "high", math.nan, 10**400])
def test_none_does_not_reach_the_mean_of_a_metric(metric: Any) -> None:
    with pytest.raises(RewardError, match="x returned depth="):
        check_score("x", RewardResult(1.0, {"depth": metric}))


@pytest.mark.parametrize("field", ["metrics", "components", "turn_rewards", "token_rewards"])
def test_details_of_a_wrong_form_are_a_reward_error(field: str) -> None:
    with pytest.raises(RewardError, match="x returned a RewardResult in which metrics or components are no dict"):
        check_score("x", RewardResult(1.0, **{field: 5}))  # type: ignore[arg-type]


MANAGERS = """
import asyncio
from agentrl_core.api import RewardManager, RewardResult

class Last(RewardManager):
    async def score(self, trajectory):
        return self.answer() if trajectory.model_text else RewardResult(1.0)

    def answer(self):
        return RewardResult(0.5)

    async def score_group(self, trajectories, results):
        mean = sum(result.score for result in results) / len(results)
        return [RewardResult(result.score - mean) for result in results]

class Raises(Last):
    def answer(self):
        raise ValueError("no judge")

    async def score_group(self, trajectories, results):
        raise ValueError("no group")

class Nan(Last):
    def answer(self):
        return RewardResult(float("nan"))

    async def score_group(self, trajectories, results):
        return [RewardResult(float("nan"))] * len(results)

class Short(Last):
    async def score_group(self, trajectories, results):
        return results[:-1]

class Nothing(Last):
    def answer(self):
        return None

    async def score_group(self, trajectories, results):
        return None

class Hangs(Last):
    async def score(self, trajectory):
        await asyncio.Event().wait()
"""


@pytest.fixture
def make_worker(make_slot):
    def make(name: str) -> RewardWorker:
        return RewardWorker(RewardConfig(manager=make_slot(RewardManagerSlot, MANAGERS, name), timeout=0.05))

    return make


def test_a_managers_score(make_worker) -> None:
    assert asyncio.run(make_worker("Last").score(TRAJECTORY)) == RewardResult(0.5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", "raised ValueError: no judge"),
        ("Nan", "score=nan"),
        ("Nothing", "returned None"),
        ("Hangs", "no answer within 0.05 s"),
    ],
)
def test_a_manager_that_fails_is_a_reward_error(make_worker, name: str, message: str) -> None:
    with pytest.raises(RewardError, match="reward manager.*" + message):
        asyncio.run(make_worker(name).score(TRAJECTORY))


@pytest.mark.parametrize(
    ("name", "problem"),
    [("length", "returned 10, outside of its range"), ("nan", "returned score=nan"), ("nothing", "returned None")],
)
def test_a_bad_score_passes_no_manager(make_slot, name: str, problem: str) -> None:
    fields: Any = {"isolation": "inline", "range": [0.0, 1.0]}
    functions = [make_slot(RewardFunctionSlot, FUNCTIONS, each, **fields) for each in ("right", name)]
    worker = RewardWorker(RewardConfig(functions, make_slot.registered(RewardManagerSlot, "naive")))
    with pytest.raises(RewardError, match=f"reward function '{name}' {problem}"):
        asyncio.run(worker.score(TRAJECTORY))


def test_a_group_is_revised_together(make_worker) -> None:
    results = [RewardResult(1.0), RewardResult(0.0)]
    revised = asyncio.run(make_worker("Last").score_group([TRAJECTORY] * 2, results))
    assert [result.score for result in revised] == [0.5, -0.5]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", "no group"),
        ("Nan", "score=nan"),
        ("Short", "1 results for 2 trajectories"),
        ("Nothing", "NoneType for 2"),
    ],
)
def test_a_group_that_cannot_be_revised_is_a_reward_error(make_worker, name: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        asyncio.run(make_worker(name).score_group([TRAJECTORY] * 2, [RewardResult(1.0)] * 2))
