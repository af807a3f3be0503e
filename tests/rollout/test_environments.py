"""Episodes of environments in real rollouts: through every kind of loop, and where they fail."""

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from agentrl_core.api import ConfigError, DataError, EpisodeError, Termination
from agentrl_core.config import load_config
from agentrl_core.data.chat_template import ChatTemplateRenderer
from agentrl_core.data.renderer import HFChatRenderer
from agentrl_core.rollout.identity import TrajectoryKey
from agentrl_core.runs.records import read_rollouts, reward_trajectory_of
from agentrl_core.trainer.prompt_data import PromptLoader

WORLD = '''
import asyncio
import os
from pathlib import Path

from agentrl_core.api import Environment, Episode, InteractionTurn, RewardResult, ToolResponse, ToolResult
from agentrl_core.api import function_schema

PUSH = function_schema("push", "Pushes.", {"force": {"type": "integer"}})
opened, closed = [], []


class World(Environment):
    """Behaves as each task says."""

    def tasks(self, split):
        return [{"does": "well"} for _ in range(4 if split == "train" else 2)]

    async def open(self, task, seed):
        if task["does"] == "refuse":
            raise OSError("no display")
        if task["does"] == "hang":
            await asyncio.Event().wait()
        if task["does"] == "wrong":
            return object()
        return (Speechless if task["does"] == "speechless" else Push)(task, seed)


class Push(Episode):
    def __init__(self, task, seed):
        self.does, self.seed, self.pushes, self.running = task["does"], seed, 0, 0
        self.messages = [{"role": "user", "content": f"push {seed % 7} times"}]
        self.tools = [PUSH]
        opened.append(seed)

    async def call(self, name, arguments):
        assert not self.running, "two calls at once"
        self.running += 1
        await asyncio.sleep(0)
        self.running -= 1
        if self.does == "break":
            raise RuntimeError("the lever broke")
        self.pushes += 1
        return ToolResult(ToolResponse(f"pushed {self.pushes}"), 0.125, {}, done=self.pushes == 3)

    async def reply(self, messages):
        if self.does == "mumble":
            raise RuntimeError("lost my voice")
        if self.does == "sleep":
            await asyncio.Event().wait()
        return InteractionTurn(self.pushes > 0, "push!", 0.0625, {"asked": 1.0})

    async def score(self, trajectory):
        if self.does == "unscored":
            return float("nan")
        return RewardResult(0.5, components={"style": 0.5})

    async def close(self):
        closed.append(self.seed)


class Speechless(Push):
    def __init__(self, task, seed):
        super().__init__(task, seed)
        self.messages = []
'''
CALL = '<tool_call>\n{"name": "push", "arguments": {"force": 1}}\n</tool_call>'
RUN = {
    "rollout.agent.loops": ["tool_agent"],
    "environments": [{"name": "./world.py:World", "timeout": 0.2}],
    "data.max_prompt_length": 1024,
    "reward.functions": [],
    "rollout.retries": 0,
    "rollout.max_failed_fraction": 1.0,
}


@pytest.fixture
def play(make_rollout: Callable[..., Any]) -> Callable[..., Any]:
    """The result of one trajectory: what the policy says, what the environment does, and further changes."""

    def run(turns: list[str], does: str = "well", max_model_len: int = 4096, **changes: Any) -> Any:
        settings = RUN | {"rollout.engine": {"name": "scripted", "config": {"turns": turns}}} | changes
        rollout = make_rollout(settings, {"world.py": WORLD}, max_model_len=max_model_len)
        (result,) = rollout([{"environment": "World", "raw_prompt": [], "does": does}])
        module = type(rollout.workers[0]._environment.environments["World"].environment).__module__
        world = sys.modules[module]
        assert world.opened == world.closed, "an episode was left open"
        return result

    return run


def test_calls_replies_and_score_are_the_reward_each_on_its_turn(play: Callable[..., Any]) -> None:
    result = play(["hello", CALL, "done"])
    assert result.termination is Termination.COMPLETED
    assert result.reward.score == 0.5 + 0.0625 + 0.125 + 0.0625
    assert result.reward.turn_rewards == [0.0625, 0.125, 0.0625]
    assert result.reward.components["environment/style"] == 0.5
    assert result.metrics["interaction/asked"] == 2.0
    assert [message["role"] for message in result.outputs[-1].messages] == [
        "user", "assistant", "user", "assistant", "tool", "assistant",
    ]  # fmt: skip


def test_a_manager_that_weighs_tool_rewards_counts_those_of_an_environment_once(play: Callable[..., Any]) -> None:
    weights = {"tool_reward_weight": 1.0, "turn_score_weight": 1.0}
    result = play(["hello", CALL, "done"], **{"reward.manager": {"name": "naive", "config": weights}})
    assert result.reward.score == 0.5 + 0.0625 + 0.125 + 0.0625
    assert result.reward.turn_rewards == [0.0625, 0.125, 0.0625]
    earned = [(turn, reward.value) for turn, reward in result.earned("environment")]
    assert earned == [(0, 0.0625), (1, 0.125), (2, 0.0625)] and result.calls[0].source == "environment"


def test_a_call_ends_the_trajectory_and_later_ones_are_refused(play: Callable[..., Any]) -> None:
    result = play([f"{CALL}\n{CALL}", f"{CALL}\n{CALL}", "never said"])
    assert result.termination is Termination.COMPLETED
    texts = [call.response for call in result.calls]
    assert texts[:3] == ["pushed 1", "pushed 2", "pushed 3"] and "the episode has ended" in texts[3]
    assert "never said" not in result.outputs[-1].full_text


def test_the_same_episode_serves_a_loop_of_one_turn(play: Callable[..., Any]) -> None:
    result = play(["hello"], **{"rollout.agent.loops": ["single_turn"]})
    assert result.reward.score == 0.5
    assert result.outputs[-1].messages[0]["content"].startswith("push ")


def test_what_a_call_raises_is_an_observation(play: Callable[..., Any]) -> None:
    result = play([CALL, "hello"], "break", **{"rollout.agent.loops": [
        {"name": "tool_agent", "config": {"max_assistant_turns": 2}}
    ]})  # fmt: skip
    assert "the lever broke" in result.calls[0].response and result.calls[0].failed
    assert result.termination is Termination.MAX_TURNS


@pytest.mark.parametrize(
    ("does", "termination", "message"),
    [
        ("refuse", Termination.EPISODE_ERROR, "environment 'World' could not begin the task .*no display"),
        ("hang", Termination.EPISODE_ERROR, "could not begin the task .*no answer within 0.2 s"),
        ("speechless", Termination.EPISODE_ERROR, "set a list with at least one message"),
        ("wrong", Termination.EPISODE_ERROR, "`open` returned a object, must be an Episode"),
        ("mumble", Termination.ENV_ERROR, "lost my voice"),
        ("sleep", Termination.ENV_ERROR, "environment 'World': no answer within 0.2 s|reply of environment"),
        ("unscored", Termination.REWARD_ERROR, "environment 'World' returned score=nan"),
    ],
)
def test_a_failure_costs_one_trajectory_and_says_where(
    play: Callable[..., Any], does: str, termination: Termination, message: str
) -> None:
    result = play(["hello"], does)
    assert result.termination is termination
    assert re.search(message, result.error), result.error
    assert (result.status == "trained") == (termination is Termination.ENV_ERROR)


def test_prompts_that_are_too_long_fail_as_data_too_long(play: Callable[..., Any]) -> None:
    result = play(["hello"], max_model_len=516)
    assert result.termination is Termination.EPISODE_ERROR
    assert "more than data.max_prompt_length=16" in result.error


def test_the_samples_of_a_prompt_share_their_seed_and_validation_keeps_it() -> None:
    def key(split: str, step: int = 1, prompt: int = 0, sample: int = 0, attempt: int = 0) -> int:
        return TrajectoryKey(0, split, step, prompt, sample, attempt).task_seed

    assert key("train") == key("train", sample=3) == key("train", attempt=1) == key("train.greedy")
    assert (
        len({key("train"), key("train", step=2), key("train", prompt=1), key("train.1"), key("validation.sampled")})
        == 5
    )
    assert key("validation.greedy", step=0) == key("validation.sampled", step=7, sample=2)
    assert 0 <= key("train") < 2**63


def test_a_run_trains_on_an_environment_alone(fit: Callable[..., Any], tiny_run: Any) -> None:
    (tiny_run.folder / "world.py").write_text(WORLD)
    run = fit({
        **RUN,
        "data.train_files": None,
        "rollout.engine": {"name": "scripted", "config": {"turns": ["hello", CALL, "done"]}},
        "rollout.max_response_length": 500,
        "trainer.validation.interval": 1,
    })  # fmt: skip
    records = list(read_rollouts(run.rollout_file(2, "train")))
    assert [record.reward for record in records] == [0.75] * 4
    assert {record.data_source for record in records} == {"World"}
    seen = reward_trajectory_of(records[0])
    assert seen is not None and seen.environment is not None and seen.environment.components == {"style": 0.5}
    metrics = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    assert metrics[-1]["reward/environment"] == 0.75
    assert metrics[-1]["validation/World/score_mean_greedy"] == 0.75


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"rollout.agent.loops": ["single_turn"]},
            ConfigError,
            "offers tools, but the agent loop 'single_turn' lacks.*installed: .*tool_agent",
        ),
        ({"data.max_prompt_length": 20}, ConfigError, "the first task of environment 'World' has a prompt of"),
        ({"environments": ["./world.py:Empty"]}, ConfigError, "environment 'Empty' has no training task"),
        ({"environments": ["./world.py:Refuses"]}, EpisodeError, "could not begin the task .*no display"),
        ({"environments": ["./world.py:Odd"]}, DataError, r"tasks\('train'\) raised IndexError: no such task"),
        ({"environments": ["./world.py:NotOne"]}, Exception, "built a NotOne, not an Environment; a class without"),
        ({"environments": ["./world.py:Mute"]}, ConfigError, "environment 'Mute' gives no rewards"),
        ({"environments": []}, ConfigError, "at least one file, or an environment"),
        (
            {"environments": ["./world.py:World", "./world.py:World"]},
            ConfigError,
            "duplicate name 'World', first used in environments.0",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(
    tiny_run: Any, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    more = """

class Empty(World):
    def tasks(self, split):
        return []


class Refuses(World):
    def tasks(self, split):
        return [{"does": "refuse"}]


class Odd(World):
    def tasks(self, split):
        raise IndexError("no such task")


class Mute(World):
    scores = False


class NotOne:
    def __init__(self, config, context): ...
"""
    (tiny_run.folder / "world.py").write_text(WORLD + more)
    settings = RUN | {"data.train_files": None, "rollout.engine": {"name": "scripted"}} | changes
    with pytest.raises(error, match=message):
        config = load_config(tiny_run(settings))
        PromptLoader(config, ChatTemplateRenderer.of(HFChatRenderer.from_config(config.model))).load()


def test_rows_of_files_may_name_the_environment(tiny_run: Any) -> None:
    (tiny_run.folder / "world.py").write_text(WORLD)
    config = load_config(tiny_run(RUN | {"rollout.engine": {"name": "scripted"}}, tiny_run.rows(2, environment="Moon")))
    with pytest.raises(DataError, match="train row 0: environment is 'Moon'; configured: World"):
        PromptLoader(config, ChatTemplateRenderer.of(HFChatRenderer.from_config(config.model))).load()
