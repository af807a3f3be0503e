"""An agent written with the official client is trained on the exact tokens that it caused."""

import json

import pytest

AGENT = """
from openai import AsyncOpenAI


async def solve(base_url, api_key, model, messages, row):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for turn in range(2):
            stream = await client.chat.completions.create(model=model, messages=messages, max_tokens=8, stream=True)
            text = "".join([c.delta.content or "" async for chunk in stream for c in chunk.choices])
            messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
"""


@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_an_agent_of_the_official_client_trains(fit, tiny_run, runtime: str) -> None:
    agent = tiny_run.folder / "agent.py"
    agent.write_text(AGENT)
    run = fit(
        {
            "rollout.agent.loops": [{"name": "openai_agent", "config": {"agent": f"{agent}:solve"}}],
            "rollout.max_response_length": 64,
            "cluster.runtime": runtime,
        }
    )
    first, second = run.read_metrics()
    assert first["rollout/logprob_gap_max"] < 1e-4 and second["rollout/logprob_gap_max"] < 1e-4
    lines = (run.path / "rollouts" / "step-000002.jsonl").read_text().splitlines()
    for entry in map(json.loads, lines):
        assert entry["num_turns"] >= 3 and entry["termination"] in ("completed", "length")
