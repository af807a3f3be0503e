"""What an agent loop returns arrives in the step's metrics, in the training batch and in the records."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from agentrl_core.runs.records import RolloutRecord, read_rollouts
from agentrl_core.runs.run_dir import RunDir

LOOPS = '''
from agentrl_core.api import AgentLoopBase, Termination, ToolCall

class Measures(AgentLoopBase):
    """Ends as the environment failed on the second prompt of the step."""
    capabilities = frozenset({"tools", "chat_endpoint"})

    async def run(self, sampling_params, *, session, raw_prompt, prompt_index, sample_index, **row):
        trajectory = session.trajectory(raw_prompt, tools=[{"function": {"name": "look"}}])
        turn = await trajectory.generate(sampling_params)
        output = trajectory.finish(Termination.ENV_ERROR if prompt_index else turn.termination)
        output.metrics = {"moves": float(sample_index), **({"rare": 4.0} if prompt_index else {})}
        output.extra_fields = {"board": {"move": sample_index}, **({"found": "gold"} if prompt_index else {})}
        output.tool_rewards, output.tool_reward_names, output.turn_scores = [0.5], ["look"], [2.0]
        output.error = "the door is locked" if prompt_index else None
        return output
'''

SEES = """
import json
from agentrl_core.api import hookimpl

class Sees:
    def __init__(self, config, context):
        self.file = context.run_dir / "batch.json"

    @hookimpl
    def on_rollout_end(self, batch):
        columns = batch.non_tensor_batch
        self.file.write_text(json.dumps({name: columns[name].tolist() for name in ("board", "found")}))
"""
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


@pytest.fixture
def measured(fit: Callable[..., RunDir], tiny_run: Any) -> RunDir:
    """One step of two prompts with two samples each."""
    (tiny_run.folder / "loops.py").write_text(LOOPS)
    (tiny_run.folder / "sees.py").write_text(SEES)
    return fit({
        "rollout.engine": {"name": "scripted", "config": {"turns": [CALL]}},
        "rollout.agent": {"loops": ["./loops.py:Measures"]},
        "rollout.max_response_length": 200,
        "hooks": ["./sees.py:Sees"],
        "trainer.steps": 1,
    })  # fmt: skip


@pytest.fixture
def records(measured: RunDir) -> list[RolloutRecord]:
    return list(read_rollouts(measured.rollout_file(1, "train")))


def test_metrics_of_a_loop_are_averaged_over_the_trajectories_that_have_them(measured: RunDir) -> None:
    metrics = measured.read_metrics()[-1]
    assert metrics["loop/moves"] == 0.5 and metrics["loop/rare"] == 4.0


def test_metrics_of_a_loop_are_in_the_records(records: list[RolloutRecord]) -> None:
    assert [record.metrics["moves"] for record in records] == [0.0, 1.0, 0.0, 1.0]


def test_extra_fields_of_a_loop_are_columns_of_the_batch(measured: RunDir) -> None:
    columns = json.loads((measured.path / "batch.json").read_text())
    assert columns == {"board": [{"move": 0}, {"move": 1}] * 2, "found": [None, None, "gold", "gold"]}


def test_extra_fields_of_a_loop_are_in_the_records(records: list[RolloutRecord]) -> None:
    assert [record.extra_fields["board"]["move"] for record in records] == [0, 1, 0, 1]
    assert records[-1].extra_fields["found"] == "gold"


def test_the_record_of_an_env_error_gives_its_reason(records: list[RolloutRecord]) -> None:
    ended = [(record.termination.value, record.error) for record in records]
    assert ended[2:] == [("env_error", "the door is locked")] * 2 and {error for _, error in ended[:2]} == {None}


def test_rewards_that_a_loop_collected_keep_the_names_of_their_tools(records: list[RolloutRecord]) -> None:
    assert all((r.tool_rewards, r.tool_reward_names, r.turn_scores) == ([0.5], ["look"], [2.0]) for r in records)


def test_texts_of_a_loop_are_in_the_records(records: list[RolloutRecord]) -> None:
    for record in records:
        seen = record.reward_input
        assert seen is not None and record.prompt_text
        assert seen["model_text"] == seen["last_text"] == record.segments[0][1].removesuffix("<|im_end|>")


AGENT = """
import httpx

async def agent(*, base_url, api_key, model, messages, row):
    async with httpx.AsyncClient(base_url=base_url, headers={"authorization": f"Bearer {api_key}"}) as client:
        for text in ("look", "look again"):
            tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
            body = {"model": model, "messages": [{"role": "user", "content": text}], "tools": tools}
            answer = await client.post("/chat/completions", json=body)
            answer.raise_for_status()
    return 1.0
"""


@pytest.fixture
def of_an_agent(fit: Callable[..., RunDir], tiny_run: Any) -> RunDir:
    """One step of an agent that asks the chat endpoint twice, the second time with another history."""
    (tiny_run.folder / "agent.py").write_text(AGENT)
    loop = {"name": "openai_agent", "config": {"agent": f"{tiny_run.folder}/agent.py:agent"}}
    return fit({
        "rollout.engine": {"name": "scripted", "config": {"turns": [CALL]}},
        "rollout.agent": {"loops": [loop]},
        "rollout.max_response_length": 500,
        "trainer.steps": 1,
    })  # fmt: skip


def test_forks_at_the_endpoint_are_in_the_metrics_and_in_the_records(of_an_agent: RunDir) -> None:
    records = list(read_rollouts(of_an_agent.rollout_file(1, "train")))
    assert len(records) == 8 and all(record.metrics["endpoint_forks"] == 1 for record in records)
    assert of_an_agent.read_metrics()[-1]["loop/endpoint_forks"] == 1


def test_tool_calls_of_an_agent_that_brings_its_tools_are_counted(of_an_agent: RunDir) -> None:
    metrics = of_an_agent.read_metrics()[-1]
    assert (metrics["rollout/tool_call_share"], metrics["rollout/tool_calls_mean"]) == (1.0, 2.0)
