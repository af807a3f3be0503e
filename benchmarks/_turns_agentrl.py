"""The hook, the reward, the tool and the loop with forks of the agentrl side of benchmarks/vs_trl.py."""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl_core.api import AgentLoopBase, AgentLoopOutput, Message, Termination, Trajectory, TrajectorySession
from agentrl_core.api.hooks import hookimpl
from agentrl_core.api.reward import RewardTrajectory

sys.path.insert(0, str(Path(__file__).parent))
import _turns  # noqa: E402 - the run loads this file alone, its folder is not on the path
from _turns import Turn, score  # noqa: E402


class TakeTurns:
    """Every step of the run waits for the other side's."""

    def __init__(self, config: Any, context: Any) -> None:
        self._turn = Turn()

    @hookimpl
    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        kept = ("timing/", "perf/", "response_length/mean")
        self._turn.step_ended({name: value for name, value in metrics.items() if name.startswith(kept)})


def distinct(trajectory: RewardTrajectory) -> float:
    """As the other side scores it."""
    return score(trajectory.model_text)


def find_places(near: str, kind: str = "any", radius: int = 500, limit: int = 5) -> str:
    """A tool is a function of the file that the configuration names."""
    return _turns.find_places(near, kind, radius, limit)


find_places.__doc__ = _turns.find_places.__doc__


class Forks(AgentLoopBase):
    """After each of two calls the trajectory goes on in two branches: four samples of three turns each."""

    capabilities = frozenset({"tools"})

    async def run(
        self, sampling_params: dict[str, Any], *, session: TrajectorySession, raw_prompt: list[Message], **row: Any
    ) -> list[AgentLoopOutput]:
        branches = [session.trajectory(raw_prompt, tools=await session.open_tools())]
        for _ in range(2):
            await asyncio.gather(*(self._call(branch, session, sampling_params) for branch in branches))
            branches = [each for branch in branches for each in (branch, branch.fork())]
        await asyncio.gather(*(branch.generate(sampling_params) for branch in branches))
        finished = [branch.finish(Termination.COMPLETED) for branch in branches]
        return [row for rows in finished for row in (rows if isinstance(rows, list) else [rows])]

    async def _call(self, branch: Trajectory, session: TrajectorySession, sampling_params: dict[str, Any]) -> None:
        turn = await branch.generate(sampling_params)
        branch.add_messages([(await session.call_tool(call)).message for call in turn.tool_calls])
