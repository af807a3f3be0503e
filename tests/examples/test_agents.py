"""Agents of other frameworks, unchanged: each calls its tool and answers, and its trajectory is one branch."""

import asyncio
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import Termination, ToolCall, Turn
from agentrl_loop_openai_agent.config import OpenAIAgentConfig
from agentrl_loop_openai_agent.server import MODEL_NAME, EndpointServer
from agentrl_testing.loops import FakeSession

FOLDER = Path(__file__).parents[2] / "examples/agents"
CALL = ToolCall("calculator", {"a": 37, "operator": "*", "b": 45}, "call00001")


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.solve


@pytest.mark.parametrize("name", ["openai_agents", "llm_cli"])
def test_the_agent_calls_its_tool_and_answers(name: str) -> None:
    session = FakeSession([Turn((1, 2), "calculator(37 * 45)", "stop", "", (CALL,)), "#### 1665"])

    async def run() -> Any:
        endpoint = EndpointServer(OpenAIAgentConfig(agent="json:dumps"), str)
        prompt = [{"role": "user", "content": "What is 37 * 45?"}]
        async with endpoint.open(session, {}) as (key, conversation):
            try:
                await load(name)(endpoint.base_url, key, MODEL_NAME, prompt, {})
                return conversation.finish(Termination.COMPLETED)
            finally:
                await endpoint.close()

    (output,) = asyncio.run(asyncio.wait_for(run(), 60))
    (trajectory,) = session.trajectories
    assert trajectory.tools[0]["function"]["name"] == "calculator"
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    assert trajectory.messages[2]["content"] == "1665" and output.metrics["endpoint_forks"] == 0


TASKSET = """
import verifiers.v1 as vf

__all__ = ["Sums"]


class Sum(vf.Task):
    @vf.reward
    async def right(self, trace):
        return float(trace.last_reply.strip() == "5")


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        return [Sum(vf.TaskData(idx=0, prompt=f"What is {n} + 2?")) for n in (2, 3)]
"""


@pytest.mark.skipif("AGENTRL_VERIFIERS_PYTHON" not in os.environ, reason="names no Python with verifiers and uv")
@pytest.mark.parametrize(("said", "reward"), [("5", 1.0), ("6", 0.0)])
def test_a_taskset_of_verifiers_is_played_and_scored(
    said: str, reward: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sums.py").write_text(TASKSET)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    environment = {"taskset": {"id": "sums"}, "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
    session = FakeSession([said])

    async def run() -> Any:
        endpoint = EndpointServer(OpenAIAgentConfig(agent="json:dumps"), str)
        async with endpoint.open(session, {}) as (key, conversation):
            try:
                row = {"extra_info": {"index": 1}}
                python = os.environ["AGENTRL_VERIFIERS_PYTHON"]
                earned = await load("verifiers_taskset")(
                    endpoint.base_url, key, MODEL_NAME, [], row, python=python, environment=environment
                )
                return earned, conversation.finish(Termination.COMPLETED)
            finally:
                await endpoint.close()

    earned, (output,) = asyncio.run(asyncio.wait_for(run(), 240))
    (trajectory,) = session.trajectories
    assert trajectory.messages[-2]["content"] == "What is 3 + 2?" and earned == reward
