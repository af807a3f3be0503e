"""An agent written with the official client is trained on the exact tokens that it caused."""

import hashlib
import json

import pytest

from agentrl_core.api import ConfigError
from agentrl_core.config import load_config
from agentrl_core.runs.records import read_rollouts

AGENT = """
from openai import AsyncOpenAI


async def solve(base_url, api_key, model, messages, row):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for turn in range(2):
            stream = await client.chat.completions.create(model=model, messages=messages, max_tokens=8, stream=True)
            text = "".join([c.delta.content or "" async for chunk in stream for c in chunk.choices])
            messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
        answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=8, n=2, logprobs=True)
        assert len(answer.choices) == 2
        for choice in answer.choices:
            assert choice.logprobs.content and all(each.logprob <= 0 for each in choice.logprobs.content)
"""


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_an_agent_of_the_official_client_trains(fit, tiny_run, runtime: str) -> None:
    (tiny_run.folder / "agent.py").write_text(AGENT)
    run = fit(
        {
            "rollout.agent.loops": [{"name": "openai_agent", "config": {"agent": "agent.py:solve"}}],
            "rollout.max_response_length": 64,
            "cluster.runtime": runtime,
        }
    )
    first, second = run.read_metrics()
    assert first["rollout/logprob_gap_max"] < 1e-4 and second["rollout/logprob_gap_max"] < 1e-4
    for entry in read_rollouts(run.rollout_file(2, "train")):
        assert entry.num_turns >= 3 and entry.termination in ("completed", "length")
    locked = json.loads((run.path / "plugins.lock.json").read_text())["plugins"]
    digest = hashlib.sha256(AGENT.encode()).hexdigest()
    assert {"kind": "agent_loop", "name": "agent.py:solve", "dist": "file", "version": digest} in locked


@pytest.mark.parametrize(
    ("agent", "problem"),
    [
        ("agnt.py:solve", "there is no file .*/agnt.py, did you mean 'agent.py'"),
        ("agent.py:solv", "the file has no 'solv', did you mean 'solve'"),
    ],
)
def test_an_agent_that_is_not_there_is_reported_before_the_run_starts(tiny_run, agent: str, problem: str) -> None:
    (tiny_run.folder / "agent.py").write_text(AGENT)
    with pytest.raises(ConfigError, match=rf"rollout.agent.loops.0.config.agent .*{problem}"):
        load_config(tiny_run({"rollout.agent.loops": [{"name": "openai_agent", "config": {"agent": agent}}]}))
