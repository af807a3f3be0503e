"""The agent loop."""

from typing import Any

from acme_agentrl_extras.config import SecondThoughtConfig
from agentrl_core.api import AgentLoopBase, AgentLoopOutput, Message, Termination, TrajectorySession


class SecondThoughtLoop(AgentLoopBase):
    """Runs tools until the model answers, asks whether it is sure, and lets it answer once more."""

    config: SecondThoughtConfig

    async def run(
        self, sampling_params: dict[str, Any], *, session: TrajectorySession, raw_prompt: list[Message], **row: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        trajectory = session.trajectory(raw_prompt, tools=await session.open_tools())
        asked = False
        for _ in range(self.config.max_turns):
            turn = await trajectory.generate(sampling_params)
            if turn.finish_reason != "stop":
                return trajectory.finish(turn.termination)
            answers = [(await session.call_tool(call)).message for call in turn.tool_calls]
            answers += [{"role": "user", "content": error} for error in turn.parse_errors]
            if not answers:
                if asked:
                    return trajectory.finish(Termination.COMPLETED)
                asked = True
                answers = [{"role": "user", "content": self.config.question}]
            if not trajectory.add_messages(answers):
                return trajectory.finish(Termination.LENGTH)
        return trajectory.finish(Termination.MAX_TURNS)
