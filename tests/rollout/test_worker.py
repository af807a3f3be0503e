"""Trajectories on the local runtime: the real workers and plugins, an engine that answers by script."""

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from agentrl_core.api import ConfigError, EngineError, PluginError, RolloutError, Status, Termination, WorkerError
from agentrl_core.controller.runtime import ActorDiedError
from agentrl_core.rollout import worker
from agentrl_core.rollout.batching import to_data_proto
from agentrl_core.rollout.identity import TrajectoryKey

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "37 * 45"}}\n</tool_call>'

LOOPS = '''
import asyncio
from dataclasses import replace
from agentrl_core.api import AgentLoopBase, AgentLoopOutput, ConfigError, EngineError, TemplateError, Termination

class Base(AgentLoopBase):
    capabilities = frozenset({"tools", "interactions"})

class Once(Base):
    """One turn, whatever it is."""
    async def run(self, sampling_params, *, session, raw_prompt, **row):
        trajectory = session.trajectory(raw_prompt)
        turn = await trajectory.generate(sampling_params)
        return trajectory.finish(turn.termination)

class Alternates(Base):
    """One turn in each of two branches, then one more in the first."""
    async def run(self, sampling_params, *, session, raw_prompt, **row):
        one, other = session.trajectory(raw_prompt), session.trajectory(raw_prompt)
        for trajectory in (one, other, one):
            await trajectory.generate(sampling_params)
        return [trajectory.finish(Termination.COMPLETED) for trajectory in (one, other)]

class Flaky(Base):
    """Fails in its first attempts, having touched everything that it was given."""
    failures = 1

    async def run(self, sampling_params, *, session, raw_prompt, extra_info, **row):
        self.seen = getattr(self, "seen", [])
        self.seen.append((len(raw_prompt), dict(extra_info), dict(sampling_params), session._key.request_id))
        raw_prompt.append({"role": "user", "content": "left over"})
        raw_prompt[0]["content"] = "changed"
        extra_info["state"] = "left over"
        sampling_params["temperature"] = 9.0
        schemas = await session.open_tools()
        await session.open_interaction()
        trajectory = session.trajectory(raw_prompt[:1], tools=schemas)
        turn = await trajectory.generate({})
        if len(self.seen) <= self.failures:
            raise EngineError(f"failure {len(self.seen)}")
        return trajectory.finish(turn.termination)

class Raises(Base):
    error = ValueError("a bug in the loop")

    async def run(self, sampling_params, *, session, raw_prompt, **row):
        await session.open_tools()
        raise self.error

class Hangs(Base):
    async def run(self, sampling_params, *, session, raw_prompt, **row):
        await session.open_tools()
        with session.timed("tools", "waiting for Godot"):
            await asyncio.Event().wait()

class Returns(Base):
    """Returns what it is told."""
    answer = None

    async def run(self, sampling_params, *, session, raw_prompt, **row):
        return self.answer

class FatalWhenHeld(Base):
    """Waits until a tool of a neighbour holds, then finds that the template cannot serve."""
    async def run(self, sampling_params, *, session, raw_prompt, **row):
        await session._env.tools["holding"].tool.held.wait()
        raise ConfigError("no such role")

class CannotRender(Base):
    async def run(self, sampling_params, *, session, raw_prompt, **row):
        raise TemplateError("roles must alternate")

class Branches(Base):
    async def run(self, sampling_params, *, session, raw_prompt, **row):
        trajectory = session.trajectory(raw_prompt)
        await trajectory.generate(sampling_params)
        branch = trajectory.fork()
        trajectory.add_messages([{"role": "user", "content": "left"}])
        branch.add_messages([{"role": "user", "content": "right"}])
        await trajectory.generate(sampling_params)
        await branch.generate(sampling_params)
        return [trajectory.finish(Termination.COMPLETED), branch.finish(Termination.COMPLETED)]

class Races(Base):
    """Two branches call a tool and ask the interaction, both before the answer of either."""
    capabilities = frozenset({"tools", "interactions"})

    async def branch(self, session, number, trajectory, sampling_params, sampled):
        turn = await trajectory.generate(sampling_params)
        sampled.set()
        await self.both.wait()
        (call,) = turn.tool_calls
        if await session.open_interaction():
            await session.interact(trajectory.messages)
        await session.call_tool(replace(call, arguments={"x": number}))
        return trajectory.finish(turn.termination)

    async def run(self, sampling_params, *, session, raw_prompt, **row):
        tools, self.both = await session.open_tools(), asyncio.Event()
        done = [asyncio.Event(), asyncio.Event()]
        tasks = []
        for number, sampled in enumerate(done, 1):
            trajectory = session.trajectory([{"role": "user", "content": str(number)}], tools=tools)
            tasks.append(asyncio.create_task(self.branch(session, number, trajectory, sampling_params, sampled)))
            await sampled.wait()
        self.both.set()
        return list(await asyncio.gather(*tasks))

class Calls(Base):
    """Calls every tool once, asks the interaction once."""
    async def run(self, sampling_params, *, session, raw_prompt, **row):
        from agentrl_core.api import ToolCall
        schemas = await session.open_tools()
        trajectory = session.trajectory(raw_prompt, tools=schemas)
        turn = await trajectory.generate(sampling_params)
        for schema in schemas:
            await session.call_tool(ToolCall(schema["function"]["name"], {}))
        if await session.open_interaction():
            await session.interact(trajectory.messages)
        return trajectory.finish(turn.termination)
'''

TOOLS = '''
import asyncio
from agentrl_core.api import (
    Interaction, InteractionTurn, RewardManager, RewardResult, Tool, ToolResponse, ToolResult, function_schema,
)

class Holding(Tool):
    """Holds in the method that its config names; keeps what was created and released."""
    schema = function_schema("holding", "Holds.", {})
    hold = ""

    def __init__(self, config, context):
        super().__init__(config, context)
        self.held, self.go_on = asyncio.Event(), asyncio.Event()
        self.created, self.released = [], []

    async def _maybe_hold(self, method):
        if method == self.hold:
            self.held.set()
            await self.go_on.wait()

    async def create(self, instance_id, **kwargs):
        self.created.append(instance_id)
        await self._maybe_hold("create")

    async def execute(self, instance_id, parameters, **kwargs):
        await self._maybe_hold("execute")
        return ToolResult(ToolResponse("done"), 0.25)

    async def calc_reward(self, instance_id, **kwargs):
        return 0.5

    async def release(self, instance_id, **kwargs):
        if self.hold == "release":
            # Lets the neighbour fail, and goes on some iterations of the event loop later.
            self.held.set()
            for _ in range(20):
                await asyncio.sleep(0)
        self.released.append(instance_id)

class Weighs(Tool):
    """Both calls wait for each other; each earns its number."""
    schema = function_schema("weigh", "Weighs.", {"x": {"type": "number"}}, ["x"])
    arrived = 0

    async def execute(self, instance_id, parameters, **kwargs):
        self.arrived += 1
        while self.arrived < 2:
            await asyncio.sleep(0)
        return ToolResult(ToolResponse("done"), float(parameters["x"]))

class Echo(Interaction):
    """Both answers wait for each other; each earns ten times the number that was asked for."""
    arrived = 0

    async def generate_response(self, instance_id, messages, **kwargs):
        self.arrived += 1
        while self.arrived < 2:
            await asyncio.sleep(0)
        return InteractionTurn(True, "", 10.0 * float(messages[0]["content"]))

    async def calculate_score(self, instance_id, **kwargs):
        return None

class Judge(Interaction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return InteractionTurn(True, "", 2.0)

    async def calculate_score(self, instance_id, **kwargs):
        return 4.0

class Keeps(RewardManager):
    """Keeps what it is given."""
    capabilities = frozenset({"group", "tool_rewards", "turn_scores"})
    group_error = None

    async def score(self, trajectory):
        self.seen = getattr(self, "seen", [])
        self.seen.append(trajectory)
        return RewardResult(1.0)

    async def score_group(self, trajectories, results):
        self.seen_again = getattr(self, "seen_again", []) + list(trajectories)
        if self.group_error is not None and trajectories[0].messages[0]["content"] == "bad":
            raise self.group_error
        return [RewardResult(result.score + len(results)) for result in results]
'''

FILES = {"loops.py": LOOPS, "parts.py": TOOLS}


def loops(*names: str, **changes: Any) -> dict[str, Any]:
    return {"rollout.agent.loops": [f"./loops.py:{name}" for name in names], **changes}


def test_the_calculator_end_to_end(make_rollout, make_row) -> None:
    changes = {
        "rollout.engine": {"name": "scripted", "config": {"turns": [CALL, "It is #### 1665"]}},
        "rollout.agent.loops": ["tool_agent"],
        "rollout.max_response_length": 400,
        "tools": ["calculator"],
        "reward.functions": ["hash_answer"],
    }
    rollout = make_rollout(changes)
    right, wrong = rollout([make_row("What is 37 * 45?", "1665"), make_row("What is 37 * 45?", "7")])
    assert (right.reward.score, wrong.reward.score) == (1.0, 0.0)
    assert right.termination is Termination.COMPLETED and right.attempts == 1 and right.error is None
    assert [(call.name, call.arguments, call.response, call.failed) for call in right.calls] == [
        ("calculator", {"expression": "37 * 45"}, "1665", False)
    ]
    kinds = [(node.kind, bool(node.request), len(node.calls)) for node in right.tree.nodes]
    assert kinds == [("prompt", False, 0), ("turn", True, 1), ("context", False, 0), ("turn", True, 0)]
    (output,) = right.outputs
    assert output.num_turns == 4 and output.trajectory_id == right.trajectory_id == "train-000001-00000-000"
    assert [message["role"] for message in output.messages] == ["user", "assistant", "tool", "assistant"]
    assert output.messages[1]["tool_calls"][0]["function"]["name"] == "calculator"
    assert set(zip(output.response_mask, output.response_logprobs, strict=True)) == {(1, -0.5), (0, 0.0)}
    assert right.metrics["tool_calls"] == 1 and right.timings.keys() >= {"generate", "tools", "reward", "total"}
    assert right.tool_schemas[0]["function"]["name"] == "calculator"
    batch = to_data_proto([right, wrong], 0, {})
    assert batch.batch["rm_scores"].sum(-1).tolist() == [1.0, 0.0]


def test_reward_text_without_tool_output_and_with_it_are_both_offered(make_rollout, make_row) -> None:
    changes = {
        "rollout.engine": {"name": "scripted", "config": {"turns": [CALL, "done"]}},
        "rollout.agent.loops": ["tool_agent"],
        "tools": ["calculator"],
        "reward.manager": "./parts.py:Keeps",
    }
    rollout = make_rollout(changes, FILES)
    (result,) = rollout([make_row(extra_info={"index": 5}, level=3)])
    (seen,) = rollout.manager._rewarders[0]._instance._manager.seen
    assert "1665" not in seen.model_text and seen.model_text == f"{CALL}\ndone" and seen.last_text == "done"
    assert "1665" in seen.full_text and seen.full_text.startswith(CALL)
    assert (seen.ground_truth, seen.data_source, seen.extra_info) == ("1", "tests", {"index": 5})
    assert seen.row["level"] == 3 and seen.num_turns == 4 and seen.termination == "completed"
    assert seen.sampled_tokens == sum(result.outputs[0].response_mask) < len(result.outputs[0].response_ids)


def test_retry_has_fresh_state(make_rollout, make_row) -> None:
    """New tools, new interaction, new engine session, the row as it was; the seed stays."""
    rollout = make_rollout(
        loops("Flaky", tools=["./parts.py:Holding"], interactions=["./parts.py:Judge"], **{"rollout.retries": 2}), FILES
    )
    given = make_row(extra_info={"interaction_kwargs": {"name": "Judge"}})
    (result,) = rollout([given])
    assert result.attempts == 2 and result.termination is Termination.COMPLETED and result.error is None
    first, second = rollout.loop("Flaky").seen
    assert first[:3] == second[:3] and first[3] != second[3]
    assert given == make_row(extra_info={"interaction_kwargs": {"name": "Judge"}})
    tool = rollout.tool("holding")
    assert len(set(tool.created)) == 2 and tool.released == tool.created
    assert result.reward_input.tool_rewards == [0.5] and result.reward_input.turn_scores == [4.0]
    assert rollout.engines[0]._turns == {}
    assert result.row["raw_prompt"] == [{"role": "user", "content": "question"}]


def test_samples_of_one_prompt_do_not_share_what_a_loop_changes(make_rollout, make_row) -> None:
    rollout = make_rollout(loops("Flaky"), FILES)
    rollout.loop("Flaky").failures = 0
    rollout([make_row(extra_info={})], n=3)
    assert {(length, tuple(extra)) for length, extra, _, _ in rollout.loop("Flaky").seen} == {(1, ())}


def test_a_failure_is_excluded_after_its_retries_and_the_others_are_trained(make_rollout, make_row, caplog) -> None:
    rollout = make_rollout(loops("Once", "Raises", **{"rollout.retries": 2, "rollout.max_failed_fraction": 0.5}), FILES)
    results = rollout([make_row(agent_name="Once"), make_row(agent_name="Raises")])
    assert [result.termination for result in results] == [Termination.COMPLETED, Termination.ABORTED]
    failed = results[1]
    assert failed.attempts == 3 and failed.status is Status.FAILED and failed.reward is None
    assert "ValueError: a bug in the loop" in failed.error
    assert "is excluded after 3 attempts: aborted: ValueError: a bug in the loop" in caplog.text
    assert len(to_data_proto(results, 0, {})) == 1


def test_an_error_of_several_lines_is_logged_from_its_first_one(make_rollout, make_row, caplog) -> None:
    rollout = make_rollout(loops("Raises", **{"rollout.retries": 0, "rollout.max_failed_fraction": 1.0}), FILES)
    rollout.loop("Raises").error = ValueError("two fields are wrong:\n  a\n    must be a number\nSee https://x.org")
    rollout([make_row()])
    assert "aborted: ValueError: two fields are wrong: a must be a number See https://x.org\n" in caplog.text


def test_too_many_failures_stop_the_step_with_the_first_root_traceback(make_rollout, make_row) -> None:
    rollout = make_rollout(loops("Once", "Raises", **{"rollout.retries": 0, "rollout.max_failed_fraction": 0.3}), FILES)
    with pytest.raises(RolloutError) as caught:
        rollout([make_row(agent_name=name) for name in ("Once", "Raises", "Raises", "Once")])
    text = str(caught.value)
    assert "2 of 4 trajectories failed after 0 retries, more than rollout.max_failed_fraction=0.3" in text
    assert "train-000001-00001-000" in text and "in run\n    raise self.error" in text and "Traceback" in text


def test_exactly_the_allowed_fraction_may_fail(make_rollout, make_row) -> None:
    rollout = make_rollout(loops("Once", "Raises", **{"rollout.retries": 0, "rollout.max_failed_fraction": 0.5}), FILES)
    assert len(rollout([make_row(agent_name="Raises"), make_row(agent_name="Once")])) == 2


def test_a_trajectory_has_a_deadline_and_its_tools_are_released(make_rollout, make_row) -> None:
    changes = {"rollout.trajectory_timeout": 0.05, "rollout.max_failed_fraction": 1.0, "tools": ["./parts.py:Holding"]}
    rollout = make_rollout(loops("Hangs", **changes), FILES)
    (result,) = rollout([make_row()])
    assert result.termination is Termination.TIMEOUT
    assert result.error == "rollout.trajectory_timeout of 0.05 s passed while waiting for Godot"
    tool = rollout.tool("holding")
    assert tool.created == tool.released != []


def test_messages_that_the_template_refuses_cost_one_trajectory(make_rollout, make_row) -> None:
    rollout = make_rollout(loops("Once", "CannotRender", **{"rollout.max_failed_fraction": 0.5}), FILES)
    good, bad = rollout([make_row(agent_name="Once"), make_row(agent_name="CannotRender")])
    assert good.termination is Termination.COMPLETED
    assert bad.termination is Termination.ABORTED and "roles must alternate" in bad.error


@pytest.mark.parametrize("hold", ["create", "execute", "release"])
def test_tool_is_always_released_on_cancel(make_rollout, make_row, hold: str) -> None:
    """A neighbour's fatal error cancels a trajectory wherever it is: also in the middle of releasing."""
    rollout = make_rollout(loops("Calls", "FatalWhenHeld", tools=["./parts.py:Holding"]), FILES)
    tool = rollout.tool("holding")
    tool.hold = hold
    with pytest.raises(ConfigError, match="no such role"):
        rollout([make_row(agent_name="Calls"), make_row(agent_name="FatalWhenHeld")])
    assert tool.created == tool.released == ["train-000001-00000-000-0"]
    assert rollout.engines[0]._turns == {}
    assert rollout.workers[0]._live == {}


def test_tool_and_turn_rewards_reach_the_reward_manager(make_rollout, make_row) -> None:
    """Those of ``execute`` and ``calc_reward``, of answers and of the whole conversation."""
    manager = {"name": "naive", "config": {"tool_reward_weight": 1.0, "turn_score_weight": 10.0}}
    changes = {"reward.manager": manager, "reward.functions": [], "tools": ["./parts.py:Holding"]}
    rollout = make_rollout(loops("Calls", interactions=["./parts.py:Judge"], **changes), FILES)
    (result,) = rollout([make_row(extra_info={"interaction_kwargs": {"name": "Judge"}})])
    assert result.reward_input.tool_rewards == [0.25, 0.5] and result.reward_input.turn_scores == [2.0, 4.0]
    assert result.reward.score == 0.75 + 60.0


def test_rewards_of_concurrent_branches_go_to_the_turn_that_earned_them(make_rollout, make_row) -> None:
    says = ['<tool_call>\n{"name": "weigh", "arguments": {"x": 0}}\n</tool_call>']
    manager = {"name": "naive", "config": {"tool_reward_weight": 1.0, "turn_score_weight": 1.0}}
    rollout = make_rollout(
        loops("Races", **{
            "rollout.engine": {"name": "scripted", "config": {"turns": says}}, "tools": ["./parts.py:Weighs"],
            "interactions": ["./parts.py:Echo"], "reward.manager": manager, "reward.functions": [],
        }), FILES,
    )  # fmt: skip
    (result,) = rollout([make_row(extra_info={"interaction_kwargs": {"name": "Echo"}})])
    assert result.error is None
    asked = [int(row.messages[0]["content"]) for row in result.outputs]
    turns = {row.turn_ids[0]: number for row, number in zip(result.outputs, asked, strict=True)}
    assert turns == {0: 1, 1: 2}
    for row, number in zip(result.outputs, asked, strict=True):
        (call,) = row.tokens.leaf.calls
        assert (call.arguments["x"], call.reward) == (number, number)
        assert row.tokens.leaf.rewards == [("Echo", 10.0 * number, "interaction")]
    assert [reward.value for _, reward in result.earned("tool")] == [1.0, 2.0]
    assert list(result.reward.turn_rewards) == [11.0 * turns[turn] for turn in (0, 1)]


def test_agent_names_are_mixed_in_one_batch_and_the_first_loop_serves_the_rest(make_rollout, make_row) -> None:
    rollout = make_rollout(loops("Branches", "Once"), FILES)
    results = rollout([make_row(agent_name="Once"), make_row(), make_row(agent_name="Branches"), make_row("x")])
    assert [len(result.outputs) for result in results] == [1, 2, 2, 2]
    assert all(result.reward is not None for result in results)
    batch = to_data_proto(results, 0, {})
    assert batch.non_tensor_batch["uid"].tolist() == ["p0", "p1", "p1", "p2", "p2", "p3", "p3"]


def test_an_unknown_agent_name_stops_the_run(make_rollout, make_row) -> None:
    rollout = make_rollout(loops("Once"), FILES)
    with pytest.raises(ConfigError, match="agent_name is 'Twice'; rollout.agent.loops lists Once"):
        rollout([make_row(agent_name="Twice")])


@pytest.mark.parametrize(("workers", "replicas"), [(1, 1), (3, 2), (7, 1)])
def test_seeds_and_results_do_not_depend_on_scheduling_nor_on_fewer_rows_than_workers(
    make_rollout, make_row, workers: int, replicas: int
) -> None:
    engine = {"name": "./engine.py:Recording", "replicas": replicas}
    changes = {"rollout.engine": engine, "rollout.agent.num_workers": workers}
    source = """
        from agentrl_core.api import InferenceEngine, PolicySpan, TokenOutput

        class Recording(InferenceEngine):
            capabilities = frozenset({"logprobs", "weight_update"})

            def __init__(self, config, context):
                self.seeds = {}

            async def generate(self, prompt_ids, params, request_id, multi_modal=None):
                self.seeds[request_id] = params.seed
                return TokenOutput([65], [-1.0], "length", [PolicySpan(0, 0, 1)])

            async def update_weights(self, update, version):
                pass
    """
    rollout = make_rollout(loops("Once", **changes), {**FILES, "engine.py": source})
    results = rollout([make_row("a"), make_row("b")], n=2)
    assert [result.trajectory_id for result in results] == [
        f"train-000001-{prompt:05d}-{sample:03d}" for prompt in range(2) for sample in range(2)
    ]
    seeds = {request: seed for engine in rollout.engines for request, seed in engine.seeds.items()}
    keys = [TrajectoryKey(0, "train", 1, prompt, sample) for prompt in range(2) for sample in range(2)]
    assert seeds == {key.request_id: key.seed(turn=0) for key in keys}


def test_no_rows_at_all(make_rollout, make_row) -> None:
    rollout = make_rollout(loops("Once"), FILES)
    assert asyncio.run(rollout.workers[0]._wave([], [], {})) == []


def test_a_turn_that_fails_is_an_engine_error_and_retried(make_rollout, make_row) -> None:
    engine = {"name": "scripted", "config": {"turns": ["ok"], "fail_every": 2}}
    rollout = make_rollout(loops("Once", **{"rollout.engine": engine, "rollout.retries": 3}), FILES)
    results = rollout([make_row()], n=4)
    assert {result.termination for result in results} == {Termination.COMPLETED}
    assert sum(result.attempts for result in results) > 4


def test_an_engine_that_always_fails_gives_engine_errors_with_its_own_words(make_rollout, make_row) -> None:
    engine = {"name": "scripted", "config": {"turns": ["ok"], "fail_every": 1}}
    changes = {"rollout.engine": engine, "rollout.retries": 1, "rollout.max_failed_fraction": 1.0}
    (result,) = make_rollout(loops("Once", **changes), FILES)([make_row()])
    assert result.termination is Termination.ENGINE_ERROR and result.attempts == 2
    assert EngineError.__name__ in result.error and "as scripted" in result.error


REWARDS = {"raises": "ValueError: the judge is ill", "nan": "score=nan, which is not a finite number"}


@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_that_raises_or_returns_nan_excludes_its_trajectory(make_rollout, make_row, name: str) -> None:
    function = {"name": f"./rewards.py:{name}", "isolation": "inline"}
    changes = {"reward.functions": [function], "rollout.retries": 1, "rollout.max_failed_fraction": 1.0}
    (result,) = make_rollout(loops("Once", **changes), FILES)([make_row()])
    assert result.termination is Termination.REWARD_ERROR and result.attempts == 2 and result.reward is None
    assert REWARDS[name] in result.error
    assert len(to_data_proto([result], 0, {})) == 0


def test_a_reward_that_fails_once_is_scored_again_and_nothing_is_sampled_again(make_rollout, make_row) -> None:
    function = {"name": "./once.py:once", "isolation": "inline"}
    source = """
    failed = []

    def once(trajectory):
        if not failed:
            failed.append(trajectory)
            raise ValueError("the judge is busy")
        return 0.5
    """
    changes = {"reward.functions": [function], "rollout.retries": 1}
    rollout = make_rollout(loops("Once", **changes), {**FILES, "once.py": source})
    (result,) = rollout([make_row()])
    assert result.reward.score == 0.5 and result.attempts == 2 and result.error is None
    assert rollout.engines[0]._requests == 1


def test_a_reward_worker_that_died_is_a_reward_error(make_rollout, make_row) -> None:
    rollout = make_rollout(loops("Once", **{"rollout.max_failed_fraction": 1.0}), FILES)

    class Dead:
        async def call(self, method, *args):
            raise WorkerError("reward-0 died")

    rollout.workers[0]._rewarders = [Dead()]
    (result,) = rollout([make_row()])
    assert result.termination is Termination.REWARD_ERROR and "reward-0 died" in result.error


def test_a_prompt_that_fills_the_context_is_trained_as_length_without_a_reward(make_rollout, make_row) -> None:
    """Nothing was requested, nothing is scored, and its neighbours are unharmed."""
    rollout = make_rollout(loops("Once"), FILES, max_model_len=100)
    full, normal = rollout([make_row("x" * 200), make_row("short")])
    assert full.termination is Termination.LENGTH and full.reward is None and full.outputs[0].response_ids == []
    assert normal.reward is not None
    scores = to_data_proto([full, normal], 0, {}).batch["rm_scores"]
    assert scores[0].tolist() == [0.0] * scores.shape[1] and scores[1].sum() == normal.reward.score


def output(**changes: Any) -> Any:
    from agentrl_core.api import AgentLoopOutput

    fields: dict[str, Any] = {
        "prompt_ids": [1], "response_ids": [2, 3], "response_mask": [1, 1], "response_logprobs": None,
        "termination": Termination.COMPLETED,
    }  # fmt: skip
    return AgentLoopOutput(**{**fields, **changes})


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "returned NoneType; allowed are one AgentLoopOutput or a list"),
        ([], "returned an empty list"),
        ([output(), "text"], "returned AgentLoopOutput, str"),
        (output(response_mask=[1]), "lists of different lengths: {'response_ids': 2, 'response_mask': 1}"),
        (output(response_logprobs=[0.0]), "'response_logprobs': 1"),
        (output(policy_versions=[0]), "'policy_versions': 1"),
        (output(prompt_ids=[]), "a row without prompt_ids"),
    ],
)
def test_a_loop_that_returns_something_else_stops_the_run(make_rollout, make_row, answer, message) -> None:
    rollout = make_rollout(loops("Returns"), FILES)
    rollout.loop("Returns").answer = answer
    with pytest.raises(PluginError) as caught:
        rollout([make_row()])
    assert "agent loop 'Returns'" in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize("token", [261, -1, 10**12, 2.5, "5"])
def test_an_id_outside_the_vocabulary_costs_one_trajectory(make_rollout, make_row, token) -> None:
    changes = {"rollout.max_failed_fraction": 0.5, "rollout.retries": 0}
    rollout = make_rollout(loops("Once", "Returns", **changes), FILES)
    rollout.loop("Returns").answer = [output(), output(response_ids=[260, token])]
    bad, good = rollout([make_row(agent_name="Returns"), make_row(agent_name="Once")])
    assert bad.termination is Termination.ABORTED and bad.status is Status.FAILED and good.status is Status.TRAINED
    expected = f"agent loop 'Returns', row 2 of 2: response_ids[1] is {token!r}; allowed are the token ids 0 to 260"
    assert expected in bad.error
    batch = to_data_proto([bad, good], 0, {})
    assert batch.non_tensor_batch["trajectory_id"].tolist() == [good.trajectory_id]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response_logprobs": [-0.5, None]}, "response_logprobs[1] is None; allowed are numbers, or None in place of"),
        ({"response_logprobs": [-0.5, "-1"]}, "response_logprobs[1] is '-1'; allowed are numbers"),
        ({"policy_versions": [2**31, 0]}, f"policy_versions[0] is {2**31}; allowed are integers of 32 bits"),
        ({"policy_versions": [0, 1.5]}, "policy_versions[1] is 1.5; allowed are integers"),
        ({"policy_versions": [None, 0]}, "policy_versions[0] is None; allowed are integers"),
    ],
)
def test_a_value_that_no_batch_can_hold_costs_one_trajectory(make_rollout, make_row, changes, message) -> None:
    rollout = make_rollout(
        loops("Once", "Returns", **{"rollout.max_failed_fraction": 0.5, "rollout.retries": 0}), FILES
    )
    rollout.loop("Returns").answer = output(**changes)
    bad, good = rollout([make_row(agent_name="Returns"), make_row(agent_name="Once")])
    assert bad.status is Status.FAILED and good.status is Status.TRAINED
    assert f"agent loop 'Returns', row 1 of 1: {message}" in bad.error


def test_a_log_prob_under_mask_0_may_be_none(make_rollout, make_row) -> None:
    rollout = make_rollout(loops("Returns"), FILES)
    rollout.loop("Returns").answer = output(response_mask=[1, 0], response_logprobs=[-0.5, None])
    [found] = rollout([make_row()])
    assert to_data_proto([found], 0, {}).batch["rollout_log_probs"].tolist() == [[-0.5, 0.0]]


def test_a_loop_may_score_itself_but_not_with_nan(make_rollout, make_row) -> None:
    rollout = make_rollout(loops("Returns", **{"rollout.max_failed_fraction": 1.0}), FILES)
    rollout.loop("Returns").answer = [output(), output(reward_score=0.25)]
    (result,) = rollout([make_row()])
    assert result.reward.score == 0.25
    rollout.loop("Returns").answer = output(reward_score=float("nan"))
    (result,) = rollout([make_row()])
    assert result.termination is Termination.REWARD_ERROR and "agent loop 'Returns' returned score=nan" in result.error


def test_skipped_is_neither_trained_nor_retried_nor_failed(make_rollout, make_row) -> None:
    rollout = make_rollout(loops("Returns", **{"rollout.max_failed_fraction": 0.0}), FILES)
    rollout.loop("Returns").answer = output(termination=Termination.SKIPPED)
    (result,) = rollout([make_row()])
    assert result.attempts == 1 and result.status is Status.EXCLUDED and result.reward is None
    assert len(to_data_proto([result], 0, {})) == 0


class Watched(logging.Handler):
    """Calls back when the watchdog has said something with this text, and keeps it."""

    def __init__(self, text: str, then: Callable[[], object]) -> None:
        super().__init__()
        self.text, self.then, self.said = text, then, ""

    def emit(self, record: logging.LogRecord) -> None:
        if self.text in record.getMessage():
            self.said += record.getMessage()
            self.then()

    def __enter__(self) -> "Watched":
        logging.getLogger("agentrl_core.rollout.watchdog").addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("agentrl_core.rollout.watchdog").removeHandler(self)


def test_the_watchdog_says_which_trajectory_waits_where(make_rollout, make_row, monkeypatch) -> None:
    """The tool goes on as soon as the watchdog has spoken: nothing here waits for a time."""
    monkeypatch.setattr(worker, "WATCHDOG_SECONDS", 0.02)
    rollout = make_rollout(loops("Calls", tools=["./parts.py:Holding"]), FILES)
    tool = rollout.tool("holding")
    tool.hold = "execute"
    with Watched("calling tool", tool.go_on.set) as watched:
        (result,) = rollout([make_row()])
    assert result.termination is Termination.COMPLETED
    assert "1 of 1 live trajectories wait for more than 0 s" in watched.said
    assert "train-000001-00000-000: calling tool 'holding'" in watched.said


def test_the_watchdog_shows_code_that_blocks_the_event_loop(make_rollout, make_row, monkeypatch) -> None:
    monkeypatch.setattr(worker, "WATCHDOG_SECONDS", 0.02)
    rollout = make_rollout(loops("Calls", tools=["./parts.py:Holding"]), FILES)
    go_on = threading.Event()

    async def execute_that_blocks(*args: Any, **kwargs: Any) -> Any:
        assert go_on.wait(30), "the watchdog said nothing"

    rollout.tool("holding").execute = execute_that_blocks
    with Watched("execute_that_blocks", go_on.set) as watched:
        rollout([make_row()])
    assert go_on.is_set() and "the event loop has been blocked" in watched.said
    assert "set isolation: process" in watched.said


DETERMINISTIC_ENGINE = """
    import asyncio
    from agentrl_core.api import InferenceEngine, PolicySpan, TokenOutput

    class Lockstep(InferenceEngine):
        '''Answers only when every open session has asked.'''
        capabilities = frozenset({"logprobs", "sessions", "weight_update", "deterministic"})

        def __init__(self, config, context):
            self.open, self.waiting, self.steps, self.most = [], {}, [], 0

        async def open_session(self, session_id):
            self.open.append(session_id)
            self.most = max(self.most, len(self.open))

        async def close_session(self, session_id):
            self.open.remove(session_id)
            self._step()

        async def generate(self, prompt_ids, params, request_id, multi_modal=None):
            self.waiting[request_id] = asyncio.get_running_loop().create_future()
            self._step()
            await self.waiting[request_id]
            del self.waiting[request_id]
            return TokenOutput([65], [-1.0], "length", [PolicySpan(0, 0, 1)])

        def _step(self):
            asked = [each for each, future in self.waiting.items() if not future.done()]
            if asked and sorted(asked) == sorted(self.open):
                self.steps.append(sorted(asked))
                for each in asked:
                    self.waiting[each].set_result(None)

        async def update_weights(self, update, version):
            pass
"""


@pytest.mark.parametrize("most", [1024, 2])
def test_deterministic_mode_opens_every_session_before_the_first_request(make_rollout, make_row, most: int) -> None:
    """Also where fewer may be in flight than there are rows: then in waves, or the engine would wait for ever."""
    changes = {
        "rollout.engine": {"name": "./engine.py:Lockstep"},
        "rollout.deterministic": True,
        "rollout.turn_timeout": 20.0,
    }
    files = {**FILES, "engine.py": DETERMINISTIC_ENGINE}
    rollout = make_rollout(loops("Once", **changes), files)
    # The configuration sees to it for training steps; a validation may be larger.
    rollout.config.rollout.agent.max_concurrent = most
    results = rollout([make_row(str(number)) for number in range(5)])
    assert [result.row["prompt_index"] for result in results] == list(range(5))
    engine = rollout.engines[0]
    assert {result.termination for result in results} == {Termination.LENGTH}
    assert [len(step) for step in engine.steps] == ([5] if most == 1024 else [2, 2, 1])
    assert engine.open == [] and engine.most == min(most, 5)


def test_a_branch_that_rests_does_not_hold_up_a_deterministic_engine(make_rollout, make_row) -> None:
    changes = {
        "rollout.engine": {"name": "./engine.py:Lockstep"},
        "rollout.deterministic": True,
        "rollout.turn_timeout": 20.0,
    }
    rollout = make_rollout(loops("Alternates", **changes), {**FILES, "engine.py": DETERMINISTIC_ENGINE})
    results = rollout([make_row(str(number)) for number in range(3)])
    assert {result.termination for result in results} == {Termination.COMPLETED}, results[0].error
    engine = rollout.engines[0]
    assert [len(step) for step in engine.steps] == [3, 3, 3] and engine.open == []
    assert [{name.count("/") for name in step} for step in engine.steps] == [{0}, {1}, {0}]


def test_sessions_that_never_began_are_closed_when_the_run_stops(make_rollout, make_row) -> None:
    changes = {"rollout.engine": {"name": "./engine.py:Lockstep"}, "rollout.deterministic": True}
    rollout = make_rollout(loops("Once", "Returns", **changes), {**FILES, "engine.py": DETERMINISTIC_ENGINE})
    with pytest.raises(PluginError, match="NoneType"):
        rollout([make_row(agent_name="Returns"), *(make_row(agent_name="Once") for _ in range(20))])
    assert rollout.engines[0].open == []


def test_no_more_trajectories_than_allowed_are_in_flight(make_rollout, make_row) -> None:
    rollout = make_rollout(
        loops("Calls", **{"rollout.agent.max_concurrent": 2, "tools": ["./parts.py:Holding"]}), FILES
    )
    tool = rollout.tool("holding")
    live: list[int] = []
    original = tool.execute

    async def counting(*args: Any, **kwargs: Any) -> Any:
        live.append(len(set(tool.created) - set(tool.released)))
        return await original(*args, **kwargs)

    tool.execute = counting
    rollout([make_row(str(number)) for number in range(6)])
    assert len(live) == 6 and max(live) == 2


def test_group_rewards_are_revised_and_a_group_that_fails_is_excluded(make_rollout, make_row) -> None:
    changes = {"reward.manager": "./parts.py:Keeps", "reward.functions": [], "rollout.max_failed_fraction": 0.5}
    rollout = make_rollout(loops("Once", **changes), FILES)
    results = rollout([make_row("good"), make_row("bad")], n=2)
    manager = rollout.manager._rewarders[0]._instance._manager
    manager.group_error = ValueError("no group")
    assert [result.reward_input.token_rows for result in results] == [()] * 4
    rollout.manager.score_groups(results)
    # Each token waits once, in its tree; a manager gets what it got before.
    assert sorted(map(repr, manager.seen_again)) == sorted(map(repr, manager.seen))
    assert [result.reward.score for result in results[:2]] == [3.0, 3.0]
    assert {result.termination for result in results[2:]} == {Termination.REWARD_ERROR}
    assert all(result.reward is None and "no group" in result.error for result in results[2:])
    assert len(to_data_proto(results, 0, {})) == 2
    rollout.config.rollout.max_failed_fraction = 0.25
    with pytest.raises(RolloutError, match="2 of 4 trajectories failed"):
        rollout.manager.score_groups(results)


def test_a_group_whose_reward_worker_dies_is_revised_by_the_process_that_takes_its_place(
    make_rollout, make_row, monkeypatch
) -> None:
    changes = {"reward.manager": "./parts.py:Keeps", "reward.functions": [], "rollout.retries": 1}
    rollout = make_rollout(loops("Once", **changes), FILES)
    results = rollout([make_row("good")], n=2)
    (rewarder,) = rollout.manager._rewarders
    call, asked = rewarder.call, list[str]()

    async def dies_once(method: str, *args: Any) -> Any:
        asked.append(method)
        if len(asked) == 1:
            raise ActorDiedError("reward-0 died")
        return await call(method, *args)

    monkeypatch.setattr(rewarder, "call", dies_once)
    rollout.manager.score_groups(results)
    assert asked == ["score_group"] * 2
    assert [result.reward.score for result in results] == [3.0, 3.0]


def test_a_manager_that_looks_at_one_trajectory_at_a_time_gets_no_groups(make_rollout, make_row, monkeypatch) -> None:
    rollout = make_rollout(loops("Once"), FILES)
    results = rollout([make_row("good")], n=2)
    (rewarder,) = rollout.manager._rewarders
    monkeypatch.setattr(rewarder, "call", None)
    asyncio.run(rollout.manager.score(results))
    assert {result.termination for result in results} == {Termination.COMPLETED}


def test_weights_reach_every_replica_and_metrics_are_added_up(make_rollout, make_row) -> None:
    from agentrl_core.serving.weight_transport import Weights

    rollout = make_rollout(loops("Once", **{"rollout.engine": {"name": "scripted", "replicas": 2}}), FILES)
    rollout.replicas.update_weights(Weights(5))
    assert [engine.version for engine in rollout.engines] == [5, 5]
    (result,) = rollout([make_row()])
    assert set(result.outputs[0].policy_versions) == {5}
    for engine, value in zip(rollout.engines, (1.0, 2.0), strict=True):
        engine.metrics = lambda value=value: {"cached_tokens": value}
    metrics = rollout.replicas.metrics()
    assert metrics["cached_tokens"] == 3.0 and metrics["requests"] >= 1 and metrics["tokens_per_second"] > 0


MISUSES = """
from dataclasses import replace
from agentrl_core.api import AgentLoopBase, AgentLoopOutput, Termination

class Base(AgentLoopBase):
    kept = None

    async def run(self, sampling_params, *, session, raw_prompt, prompt_index, **row):
        trajectory = session.trajectory(raw_prompt)
        turn = await trajectory.generate(sampling_params)
        return await self.misuse(trajectory, prompt_index) if prompt_index else trajectory.finish(turn.termination)

class Twice(Base):
    async def misuse(self, trajectory, index):
        trajectory.finish(Termination.COMPLETED)
        return trajectory.finish(Termination.COMPLETED)

class Adds(Base):
    async def misuse(self, trajectory, index):
        row = trajectory.finish(Termination.COMPLETED)
        trajectory.add_messages([{"role": "user", "content": "more"}])
        return row

class Samples(Base):
    async def misuse(self, trajectory, index):
        row = trajectory.finish(Termination.LENGTH)
        await trajectory.generate({})
        return row

class Keeps(Base):
    async def misuse(self, trajectory, index):
        row = trajectory.finish(Termination.COMPLETED)
        Keeps.kept, kept = row, Keeps.kept
        return kept or row

class Long(Base):
    async def misuse(self, trajectory, index):
        return AgentLoopOutput([1] * 4000, [2] * 97, [1] * 97, None, Termination.COMPLETED)
"""


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        ("Twice", "branch 0: finish() after finish(completed), which closes a branch. Call finish() once"),
        ("Adds", "branch 0: add_messages() after finish(completed), which closes a branch"),
        ("Samples", "branch 0: generate() after finish(length), which closes a branch"),
        ("Keeps", "'Keeps', row 1 of 1: it belongs to another trajectory, train-000001-00001-000. Return the rows"),
        ("Long", "'Long', row 1 of 1: it has 4097 tokens, more than the context of 4096. Return shorter rows"),
    ],
)
def test_a_loop_that_misuses_its_tree_loses_that_trajectory_only(make_rollout, make_row, loop, message) -> None:
    changes = {"rollout.max_failed_fraction": 0.5, "rollout.retries": 0, "rollout.agent.num_workers": 1}
    rollout = make_rollout({"rollout.agent.loops": [f"./misuses.py:{loop}"], **changes}, {"misuses.py": MISUSES})
    good, *bad = rollout([make_row(), *([make_row()] * (2 if loop == "Keeps" else 1))])
    assert good.status is Status.TRAINED
    assert bad[-1].status is Status.FAILED and bad[-1].reason == "it ended with aborted"
    assert message in bad[-1].error, bad[-1].error


BY_HAND = '''
from dataclasses import replace
from agentrl_core.api import AgentLoopBase, AgentLoopOutput, Termination

class ByHand(AgentLoopBase):
    """Two turns, each with a call; what is returned depends on the prompt."""
    capabilities = frozenset({"tools"})

    async def run(self, sampling_params, *, session, raw_prompt, prompt_index, **row):
        trajectory = session.trajectory(raw_prompt, tools=await session.open_tools())
        for earns in (1.0, 2.0):
            turn = await trajectory.generate(sampling_params)
            (call,) = turn.tool_calls
            outcome = await session.call_tool(replace(call, arguments={"x": earns}))
            trajectory.add_messages([outcome.message])
        row = trajectory.finish(Termination.COMPLETED)
        if prompt_index == 1:
            return replace(row, error="a copy")
        if prompt_index == 2:
            row.response_mask[: row.turn_ids.index(-1)] = [0] * row.turn_ids.index(-1)
        if prompt_index == 4:
            import numpy as np
            row.response_mask = np.array(row.response_mask)
            return [row, row, replace(row, prompt_ids=np.array(row.prompt_ids))]
        if prompt_index == 3:
            return AgentLoopOutput(row.prompt_ids, row.response_ids, row.response_mask, None, Termination.COMPLETED)
        return row
'''


def test_rows_that_a_loop_fills_or_changes_by_hand_are_paths_of_their_own(make_rollout, make_row) -> None:
    """A copy stays the path that it was; of changed lists, what was earned goes to the turns that are left."""
    says = ['<tool_call>\n{"name": "weigh", "arguments": {"x": 0}}\n</tool_call>']
    tool = TOOLS.replace("while self.arrived < 2:", "while False:")
    changes = {
        "rollout.engine": {"name": "scripted", "config": {"turns": says}}, "tools": ["./parts.py:Weighs"],
        "rollout.agent.loops": ["./hand.py:ByHand"], "reward.functions": [], "rollout.max_response_length": 900,
        "reward.manager": {"name": "naive", "config": {"tool_reward_weight": 1.0}},
    }  # fmt: skip
    rollout = make_rollout(changes, {"hand.py": BY_HAND, "parts.py": tool})
    results = rollout([make_row()] * 5)
    assert [result.error for result in results] == [None, "a copy", None, None, None]
    plain, copy, masked, filled, arrays = results
    for result in (plain, copy, filled, arrays):
        assert [[call.reward for call in turn.calls] for turn in result.turns] == [[1.0], [2.0]]
        assert list(result.reward.turn_rewards) == [1.0, 2.0]
        assert result.outputs[0].response_ids == plain.outputs[0].response_ids
    assert [[call.reward for call in turn.calls] for turn in masked.turns] == [[1.0, 2.0]]
    assert masked.sampled_tokens * 2 == plain.sampled_tokens and masked.reward.score == 3.0
    assert plain.outputs[0].log_prob_settings == copy.outputs[0].log_prob_settings != []
    assert filled.outputs[0].log_prob_settings == [] and filled.outputs[0].response_logprobs is None
    assert len({len(result.tree.nodes) for result in results}) == 1
