"""A taskset of verifiers 0.4 with its harness and rewards, in its own Python environment: a process per trajectory.

The environment is separate because verifiers needs mcp 2.0.0 and agentrl-tool-mcp at least 2.3. agentrl calls `solve`,
which runs this file as a program in the other environment.
"""

import asyncio
import json
import os
import signal
import sys
from itertools import islice
from pathlib import Path


async def solve(base_url, api_key, model, messages, row, python, environment):
    """Play the task whose number is ``extra_info.index``; returns verifiers' reward.

    Args:
        python: interpreter of the environment with verifiers and uv.
        environment: a ``SingleAgentEnvConfig`` as verifiers reads it: ``{taskset: {id: …}, agent: {…}}``.
    """
    request = {"base_url": base_url, "model": model, "index": row["extra_info"]["index"], "environment": environment}
    process = await asyncio.create_subprocess_exec(
        python, __file__,
        # Its harnesses call uv, which is installed next to the interpreter.
        env={**os.environ, "AGENTRL_ENDPOINT_KEY": api_key, "PATH": f"{Path(python).parent}:{os.environ['PATH']}"},
        start_new_session=True,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        said, problems = await process.communicate(json.dumps(request).encode())
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise RuntimeError(f"verifiers ended with {process.returncode}: {problems.decode()[-500:]}")
    return json.loads(said.splitlines()[-1])


async def play(base_url, model, index, environment):
    from verifiers.v1.clients import EvalClientConfig, ModelContext
    from verifiers.v1.env import RunSlot
    from verifiers.v1.envs.single_agent import SingleAgentEnvConfig
    from verifiers.v1.utils.loaders import load_environment

    world = load_environment(SingleAgentEnvConfig.model_validate(environment))
    task = next(islice(world.taskset, index, None))
    client = EvalClientConfig(base_url=base_url, api_key_var="AGENTRL_ENDPOINT_KEY")
    async with world.serving():
        episode = await world.run_slot(RunSlot(task), ModelContext(model, client))
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors))
    return episode.traces[-1].reward


if __name__ == "__main__":
    print(asyncio.run(play(**json.load(sys.stdin))))  # noqa: T201 - the answer to the agent's process
