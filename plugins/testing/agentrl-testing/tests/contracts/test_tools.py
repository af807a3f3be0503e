import asyncio
import math

from agentrl_core.api import Tool, ToolResponse, ToolResult, function_schema
from agentrl_testing.contracts import ToolCase, ToolContract


class Good(Tool):
    schema = function_schema("echo", "Says it again.", {"text": {"type": "string"}})

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResult(ToolResponse(parameters["text"]), 0.5, {"calls": 1.0})


class NoDescription(Good):
    schema = function_schema("echo", "", {"text": {"type": "string"}})


class SpaceInName(Good):
    schema = function_schema("my echo", "Says it again.", {"text": {"type": "string"}})


class RequiresMore(Good):
    schema = function_schema("echo", "Says it again.", {"text": {"type": "string"}}, ["text", "voice"])


class PlainText(Good):
    async def execute(self, instance_id, parameters, **kwargs):
        return parameters["text"]


class NanReward(Good):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResult(ToolResponse("x"), math.nan)


class WritesArguments(Good):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResult(ToolResponse(parameters.pop("text")))


class Shared(Good):
    """Counts the calls of all trajectories together."""

    calls = 0

    async def execute(self, instance_id, parameters, **kwargs):
        self.calls += 1
        await asyncio.sleep(0)
        return ToolResult(ToolResponse(str(self.calls)))


class Remembers(Good):
    """Keeps a trajectory's state after its release."""

    def __init__(self, config, context):
        super().__init__(config, context)
        self.calls = {}

    async def execute(self, instance_id, parameters, **kwargs):
        self.calls[instance_id] = self.calls.get(instance_id, 0) + 1
        return ToolResult(ToolResponse(str(self.calls[instance_id])))


class TextReward(Good):
    async def calc_reward(self, instance_id, **kwargs):
        return "good"


class StrictRelease(Remembers):
    async def release(self, instance_id, **kwargs):
        del self.calls[instance_id]


def test_every_check_catches_a_broken_tool(spec, catches) -> None:
    def case(cls):
        return ToolCase(spec("tool", cls), arguments={"text": "hello"})

    catches(
        ToolContract,
        {
            "test_schema_is_an_openai_function": [case(NoDescription), case(SpaceInName), case(RequiresMore)],
            "test_call_returns_a_result": [
                case(PlainText),
                case(NanReward),
                ToolCase(spec("tool", Good), arguments={"text": "hello"}, expected="bye"),
            ],
            "test_call_leaves_its_arguments_alone": [case(WritesArguments)],
            "test_trajectories_do_not_share_state": [case(Shared)],
            "test_release_forgets_the_trajectory": [case(Remembers)],
            "test_final_reward_is_a_number_or_none": [case(TextReward)],
            "test_release_works_in_whatever_state": [case(StrictRelease)],
        },
    )


class TestGood(ToolContract):
    import pytest

    @pytest.fixture
    def plugin(self, spec):
        return ToolCase(spec("tool", Good), arguments={"text": "hello"}, expected="hello")
