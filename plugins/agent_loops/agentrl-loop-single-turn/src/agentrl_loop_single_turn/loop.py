"""One prompt, one answer."""

from typing import Any

from agentrl_core.api import AgentLoopBase, AgentLoopOutput, Message, TrajectorySession


class SingleTurnLoop(AgentLoopBase):
    """Samples one turn. Ends with ``COMPLETED``, ``LENGTH`` or ``ABORTED``, as that turn did.

    Tools are not offered, and text that looks like a tool call is text.
    """

    async def run(
        self, sampling_params: dict[str, Any], *, session: TrajectorySession, raw_prompt: list[Message], **row: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        trajectory = session.trajectory(raw_prompt)
        turn = await trajectory.generate(sampling_params)
        return trajectory.finish(turn.termination)
