"""A trajectory's tools and interaction: opened once, bounded in time, always released."""

import asyncio
import copy
import math
import pickle
from dataclasses import replace
from typing import Any

import pytest

from agentrl_core.api import (
    EngineError,
    Interaction,
    InteractionContext,
    InteractionError,
    InteractionTurn,
    RewardError,
    ToolCall,
    ToolUnavailableError,
)
from agentrl_core.api.tree import Node
from agentrl_core.config.schema import ToolSlot
from agentrl_core.hosting.tools import HostedTool
from agentrl_core.rollout.session import HostedInteraction, RolloutSession

TOOLS = '''
import asyncio
from agentrl_core.api import Tool, ToolResponse, ToolResult, function_schema

class Spy(Tool):
    """Keeps every lifecycle call; behaves as it is told."""
    schema = function_schema("spy", "Spies.", {"x": {"type": "string"}, "y": {"type": "string"}}, ["x"])

    def __init__(self, config, context):
        super().__init__(config, context)
        self.calls, self.misbehave = [], {}

    async def _call(self, method, instance_id, kwargs, result=None):
        self.calls.append((method, instance_id, kwargs))
        action = self.misbehave.get(method)
        if isinstance(action, Exception):
            raise action
        if action == "hang":
            await asyncio.Event().wait()
        return result if action is None else action

    async def create(self, instance_id, **kwargs):
        await self._call("create", instance_id, kwargs)

    async def execute(self, instance_id, parameters, **kwargs):
        result = ToolResult(ToolResponse(f"saw {parameters['x']}"), 0.25)
        return await self._call("execute", instance_id, kwargs, result)

    async def calc_reward(self, instance_id, **kwargs):
        return await self._call("calc_reward", instance_id, kwargs, 0.5)

    async def release(self, instance_id, **kwargs):
        await self._call("release", instance_id, kwargs)

class Several(Tool):
    def __init__(self, config, context):
        super().__init__(config, context)
        self.calls = []

    @property
    def schemas(self):
        return [function_schema(name, "Does it.", {"x": {"type": "string"}}) for name in ("get", "put")]

    async def create(self, instance_id, **kwargs):
        self.calls.append("create")

    async def execute(self, instance_id, parameters, function):
        return ToolResult(ToolResponse(f"{function} {parameters['x']}"))

    async def release(self, instance_id, **kwargs):
        self.calls.append("release")

class Other(Tool):
    schema = function_schema("other", "Another one.", {})

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResult(ToolResponse("other"))
'''


@pytest.fixture
def spy(make_slot) -> HostedTool:
    return HostedTool(make_slot(ToolSlot, TOOLS, "Spy", timeout=0.05), seed=0)


@pytest.fixture
def other(make_slot) -> HostedTool:
    return HostedTool(make_slot(ToolSlot, TOOLS, "Other"), seed=0)


def earned(session: RolloutSession, source: Any) -> list[tuple[str, float]]:
    return [(reward.name, reward.value) for _, reward in session.report.earned(source)]


def methods(tool: HostedTool) -> list[str]:
    return [method for method, _, _ in tool.tool.calls]


CALL = ToolCall("spy", {"x": "this"}, "call00001")


def test_a_tool_is_created_once_per_trajectory_not_once_per_call(spy, make_session) -> None:
    async def scenario() -> None:
        session = make_session([spy])
        assert await session.open_tools() == await session.open_tools() == [spy.tool.schema]
        for _ in range(3):
            await session.call_tool(CALL)
        await session.collect_rewards()
        await session.close()
        await session.close()

    asyncio.run(scenario())
    assert methods(spy) == ["create", "execute", "execute", "execute", "calc_reward", "release"]
    assert len({instance for _, instance, _ in spy.tool.calls}) == 1


def test_every_method_gets_the_rows_arguments(spy, make_session) -> None:
    kwargs = {f"{method}_kwargs": {"for": method} for method in ("create", "execute", "calc_reward", "release")}

    async def scenario() -> None:
        session = make_session([spy], tools_kwargs={"spy": kwargs})
        await session.open_tools()
        await session.call_tool(CALL)
        await session.collect_rewards()
        await session.close()

    asyncio.run(scenario())
    assert all(given == {"for": method} for method, _, given in spy.tool.calls) and len(spy.tool.calls) == 4


def test_a_call_that_a_loop_leaves_running_ends_before_its_tool_is_released(spy, make_session) -> None:
    """A loop that gathers, and fails, leaves its other calls behind."""
    spy.tool.misbehave["execute"] = "hang"
    spy.timeout = 60.0

    async def scenario() -> None:
        session = make_session([spy])
        await session.open_tools()
        left = asyncio.ensure_future(session.call_tool(CALL))
        while "execute" not in methods(spy):
            await asyncio.sleep(0)
        await session.close()
        assert left.cancelled() and methods(spy)[-1] == "release"

    asyncio.run(scenario())


def test_need_tools_kwargs_selects_the_rows_tools(spy, other, make_session) -> None:
    async def names(**extra: Any) -> list[str]:
        session = make_session([spy, other], **extra)
        schemas = await session.open_tools()
        await session.close()
        return [schema["function"]["name"] for schema in schemas]

    assert asyncio.run(names()) == ["spy", "other"]
    assert asyncio.run(names(need_tools_kwargs=True, tools_kwargs={"other": {}})) == ["other"]
    assert asyncio.run(names(need_tools_kwargs=True)) == []
    assert asyncio.run(names(tools_kwargs={"other": {}})) == ["spy", "other"]


def test_a_tool_message_answers_its_call(spy, make_session) -> None:
    async def scenario() -> None:
        session = make_session([spy])
        await session.open_tools()
        outcome = await session.call_tool(CALL)
        assert outcome.message == {
            "role": "tool", "name": "spy", "tool_call_id": "call00001", "content": "saw this",
        }  # fmt: skip
        assert earned(session, "tool") == [("spy", 0.25)] and not outcome.failed

    asyncio.run(scenario())


def test_a_tool_of_several_functions_has_one_life(make_slot, spy, make_session) -> None:
    several = HostedTool(make_slot(ToolSlot, TOOLS, "Several"), seed=0)

    async def scenario() -> None:
        session = make_session([several, spy])
        names = [schema["function"]["name"] for schema in await session.open_tools()]
        assert names == ["get", "put", "spy"]
        outcomes = [await session.call_tool(ToolCall(name, {"x": "1"}, "")) for name in ("get", "put", "set")]
        assert [outcome.message["content"] for outcome in outcomes] == [
            "get 1", "put 1", "Error: there is no tool 'set'; available: get, put, spy",
        ]  # fmt: skip
        await session.close()

    asyncio.run(scenario())
    assert several.tool.calls == ["create", "release"]


@pytest.mark.parametrize("error", [ToolUnavailableError("no sandbox started"), EngineError("no replica is left")])
def test_a_tool_that_is_unavailable_fails_the_trajectory(spy, make_session, error: Exception) -> None:
    async def scenario() -> None:
        session = make_session([spy])
        await session.open_tools()
        spy.tool.misbehave["execute"] = error
        with pytest.raises(type(error), match=str(error)):
            await session.call_tool(CALL)
        assert not session.report.calls and [span.kind for span in session.report.waits] == ["tools", "tools"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (ToolCall("nobody", {}), "there is no tool 'nobody'; available: spy"),
        (ToolCall("spy", {}), "missing: x"),
        (ToolCall("spy", {"x": "1", "z": "2"}), "takes the arguments x, y; missing: none; unknown: z"),
    ],
)
def test_unknown_tool_and_wrong_arguments_are_observations_and_counted(spy, make_session, call, message) -> None:
    async def scenario() -> None:
        session = make_session([spy])
        await session.open_tools()
        outcome = await session.call_tool(call)
        assert outcome.failed and message in outcome.message["content"]
        assert session.report.metrics == {"tool_calls": 1.0, "tool_failures": 1.0}

    asyncio.run(scenario())
    assert methods(spy) == ["create"]


def tool_result(reward: Any = None, metrics: Any = None, response: Any = None) -> Any:
    from agentrl_core.api import ToolResponse, ToolResult

    return ToolResult(response or ToolResponse("text"), reward, metrics or {})


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (ValueError("no such city"), "Error: ValueError: no such city"),
        (TimeoutError("of its own"), "Error: TimeoutError: of its own"),
        ("hang", "no answer within 0.05 s"),
        ("a text", "returned str, not a ToolResult"),
        (tool_result(response="text"), "a response without text"),
        (tool_result(reward=math.nan), "the reward nan, which is not a finite number"),
        (tool_result(reward="1.0"), "the reward '1.0', which is not a finite number"),
        (tool_result(reward=1.0, metrics={"hits": None}), "the metric hits=None"),
    ],
)
def test_whatever_a_tool_does_is_an_observation(spy, make_session, action, message) -> None:
    async def scenario() -> None:
        session = make_session([spy])
        await session.open_tools()
        spy.tool.misbehave["execute"] = action
        outcome = await session.call_tool(CALL)
        assert outcome.failed and message in outcome.response.text
        assert earned(session, "tool") == [] and session.report.metrics["tool_failures"] == 1
        del spy.tool.misbehave["execute"]
        assert not (await session.call_tool(CALL)).failed

    asyncio.run(scenario())


@pytest.mark.parametrize("reward", [math.nan, math.inf, "1.0"])
def test_a_tools_final_reward_that_is_no_finite_number_is_a_reward_error(spy, make_session, reward) -> None:
    async def scenario() -> None:
        session = make_session([spy])
        await session.open_tools()
        spy.tool.misbehave["calc_reward"] = reward
        with pytest.raises(RewardError, match="calc_reward of tool 'spy' returned"):
            await session.collect_rewards()

    asyncio.run(scenario())


def test_parallel_calls_are_reported_and_answered_in_the_order_of_the_calls(spy, make_session) -> None:
    async def scenario() -> None:
        session = make_session([spy])
        await session.open_tools()
        calls = [ToolCall("spy", {"x": str(number)}, f"id{number}") for number in range(5)]
        outcomes = await asyncio.gather(*map(session.call_tool, calls))
        assert [outcome.message["tool_call_id"] for outcome in outcomes] == [call.id for call in calls]
        assert [call.arguments["x"] for call in session.report.calls] == list("01234")

    asyncio.run(scenario())


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda call: pickle.loads(pickle.dumps(call))])
def test_a_copied_call_is_a_call_of_this_trajectory(spy, make_session, copied) -> None:
    async def scenario() -> RolloutSession:
        session = make_session([spy])
        await session.open_tools()
        first = Node(None, "turn", [1])
        session.tree.nodes += [first, Node(first, "turn", [2])]
        await session.call_tool(copied(replace(CALL, turn=first)))
        return session

    first, second = asyncio.run(scenario()).tree.nodes
    assert [call.name for call in (*first.calls, *second.calls)] == ["spy"]
    # A turn that was pickled is none of this trajectory: the newest one stands for it.
    assert bool(first.calls) is (copied in (copy.copy, copy.deepcopy))


def test_a_tool_whose_create_fails_is_released_too(spy, make_session) -> None:
    async def scenario() -> None:
        session = make_session([spy])
        spy.tool.misbehave["create"] = RuntimeError("half-way")
        with pytest.raises(RuntimeError, match="half-way"):
            await session.open_tools()
        await session.close()

    asyncio.run(scenario())
    assert methods(spy) == ["create", "release"]


@pytest.mark.parametrize("action", [RuntimeError("stuck"), "hang"])
def test_a_release_that_fails_is_counted_and_the_others_still_run(spy, other, make_session, action) -> None:
    async def scenario() -> None:
        servers_session = make_session([spy, other])
        await servers_session.open_engine()
        await servers_session.open_tools()
        spy.tool.misbehave["release"] = action
        await servers_session.close()
        assert servers_session.report.metrics["release_failures"] == 1
        assert [call for call, _ in servers_session._env.servers.calls] == ["open", "close"]

    asyncio.run(scenario())


def test_a_row_that_a_tool_changes_is_as_before_for_the_next_attempt(spy, make_session) -> None:
    kwargs = {"spy": {"create_kwargs": {"board": [0, 0]}}}

    async def scenario() -> None:
        session = make_session([spy], tools_kwargs=kwargs)
        await session.open_tools()
        spy.tool.calls[0][2]["board"].append(1)
        assert kwargs == {"spy": {"create_kwargs": {"board": [0, 0]}}}

    asyncio.run(scenario())


class Tutor(Interaction):
    """Keeps every lifecycle call; behaves as it is told."""

    def __init__(self) -> None:
        super().__init__(None, InteractionContext("tutor"))
        self.calls: list[tuple[str, Any]] = []
        self.answer: Any = InteractionTurn(False, "try again", 0.5, {"hints": 1.0})
        self.score: Any = 2.0

    async def start_interaction(self, instance_id, **kwargs):
        self.calls.append(("start", kwargs))

    async def generate_response(self, instance_id, messages, **kwargs):
        self.calls.append(("answer", list(messages)))
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer == "hang":
            await asyncio.Event().wait()
        return self.answer

    async def calculate_score(self, instance_id, **kwargs):
        self.calls.append(("score", None))
        return self.score

    async def finalize_interaction(self, instance_id, **kwargs):
        self.calls.append(("finalize", None))


@pytest.fixture
def tutor() -> Tutor:
    return Tutor()


@pytest.fixture
def tutored(tutor, make_session):
    return make_session(
        interactions={"tutor": HostedInteraction(tutor, 0.05)}, interaction_kwargs={"name": "tutor", "level": 3}
    )


def test_an_interaction_is_started_once_scored_and_finalized(tutor, tutored) -> None:
    async def scenario() -> None:
        assert await tutored.open_interaction() and await tutored.open_interaction()
        turn = await tutored.interact([{"role": "user", "content": "q"}])
        assert turn.text == "try again"
        await tutored.collect_rewards()
        await tutored.close()
        await tutored.close()

    asyncio.run(scenario())
    assert [name for name, _ in tutor.calls] == ["start", "answer", "score", "finalize"]
    assert tutor.calls[0][1] == {"level": 3}
    assert earned(tutored, "interaction") == [("tutor", 0.5), ("tutor", 2.0)]
    assert tutored.report.metrics["interaction/hints"] == 1.0


def test_a_row_without_an_interaction_has_none(make_session) -> None:
    async def scenario() -> None:
        session = make_session()
        assert not await session.open_interaction()
        with pytest.raises(InteractionError, match="has no interaction"):
            await session.interact([])

    asyncio.run(scenario())


def test_an_interaction_that_is_not_configured_is_named(make_session) -> None:
    session = make_session(interaction_kwargs={"name": "nobody"})
    with pytest.raises(InteractionError, match="the row names the interaction 'nobody'; configured: none"):
        asyncio.run(session.open_interaction())


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ("hang", InteractionError, "interaction 'tutor': no answer within 0.05 s"),
        (ValueError("confused"), ValueError, "confused"),
        (TimeoutError("its own"), TimeoutError, "its own"),
        ("a text", InteractionError, "returned 'a text', not an InteractionTurn"),
        (InteractionTurn(False, "x", math.nan), InteractionError, "reward=nan, not a finite number"),
        (InteractionTurn(False, "x", None, {"m": None}), InteractionError, "metric m=None"),
    ],
)
def test_an_interaction_that_fails_is_finalized_all_the_same(tutor, tutored, answer, error, message) -> None:
    tutor.answer = answer if answer != "a text" else ("a text")

    async def scenario() -> None:
        with pytest.raises(error, match=message):
            await tutored.interact([])
        await tutored.close()

    asyncio.run(scenario())
    assert tutor.calls[-1][0] == "finalize" and earned(tutored, "interaction") == []


def test_a_conversations_score_that_is_no_number_is_a_reward_error(tutor, tutored) -> None:
    tutor.score = math.nan

    async def scenario() -> None:
        await tutored.open_interaction()
        with pytest.raises(RewardError, match="calculate_score of the interaction returned nan"):
            await tutored.collect_rewards()

    asyncio.run(scenario())


@pytest.mark.parametrize(("action", "shown"), [(RuntimeError("no key"), "RuntimeError: no key"), ("hang", "no answer")])
def test_a_broken_or_hung_tool_is_logged_once_with_its_traceback(spy, make_session, caplog, action, shown) -> None:
    async def scenario() -> None:
        session = make_session([spy])
        await session.open_tools()
        spy.tool.misbehave["execute"] = action
        for _ in range(3):
            await session.call_tool(ToolCall("spy", {"x": "1"}))
        assert session.report.metrics["tool_failures"] == 3

    asyncio.run(scenario())
    (record,) = caplog.records
    assert "tool 'spy' failed in trajectory" in record.message and shown in record.message
    assert "Traceback" in record.message


def test_a_wrong_call_of_the_policy_is_not_logged_as_a_broken_tool(spy, make_session, caplog) -> None:
    async def scenario() -> None:
        session = make_session([spy])
        await session.open_tools()
        await session.call_tool(ToolCall("spi", {}))
        await session.call_tool(ToolCall("spy", {}))
        assert session.report.metrics["tool_failures"] == 2

    asyncio.run(scenario())
    assert not caplog.records


def test_a_tools_rewards_are_counted_and_named_by_tool(spy, make_session) -> None:
    async def scenario() -> None:
        session = make_session([spy])
        await session.open_tools()
        await session.call_tool(ToolCall("spy", {"x": "1"}))
        assert earned(session, "tool") == [("spy", 0.25)]
        assert session.report.metrics["tool/spy/reward"] == 0.25

    asyncio.run(scenario())


def test_closing_a_session_survives_tools_kwargs_that_are_no_mapping(spy, make_session) -> None:
    async def scenario() -> None:
        session = make_session([spy], tools_kwargs={"spy": "x"})
        with pytest.raises(AttributeError):
            await session.open_tools()
        await session.close()
        assert session.report.metrics["release_failures"] == 1

    asyncio.run(scenario())
