"""The tool agent for several agents: all of them are the policy, and each sees its own conversation only.

    interacting ──┬── the agent that is named has spoken before ──> generating, in its row
                  └── it speaks for the first time ───────────────> generating, in a new row

The environment says whose turn is next. An agent's conversation begins with the system messages of the prompt and what
the environment says to it first.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from agentrl_core.api import AgentLoopContext, AgentLoopOutput, ConfigError, Message, Trajectory
from agentrl_loop_tool_agent.config import MultiAgentConfig
from agentrl_loop_tool_agent.loop import Episode, State, ToolAgentLoop


class MultiAgentEpisode(Episode):
    """An episode with a conversation for each agent."""

    config: MultiAgentConfig

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._agents: dict[str, list[Trajectory]] = {}

    def start(self, messages: Sequence[Message]) -> Trajectory:
        trajectory = super().start(messages)
        self._agents.setdefault(self.session.agent, []).append(trajectory)
        return trajectory

    def answered(self, said: Message) -> State | None:
        """Show the answer to the agent whose turn is next."""
        if self.session.agent in self._agents:
            self.trajectory = self._agents[self.session.agent][-1]
            return self.extend([said])
        system = takewhile(lambda message: message["role"] == "system", self.raw_prompt)
        self.start([*system, said])
        return self.generating

    def finish(self) -> list[AgentLoopOutput]:
        """The rows of all agents; each has the texts of its own conversation."""
        if not self._agents:
            self.start(self.raw_prompt)
        rows: list[AgentLoopOutput] = []
        for agent, trajectories in self._agents.items():
            for row in self.rows(trajectories):
                row.agent = agent
                row.trained = self.config.trained is None or agent in self.config.trained
                rows.append(row)
        return rows


class MultiAgentLoop(ToolAgentLoop):
    """Several agents in one trajectory, all of them played by the policy."""

    episode = MultiAgentEpisode

    def __init__(self, config: MultiAgentConfig, context: AgentLoopContext) -> None:
        super().__init__(config, context)
        if config.trained is not None and not config.trained:
            raise ConfigError("multi_agent: trained is empty; name an agent, or write null for all of them")
