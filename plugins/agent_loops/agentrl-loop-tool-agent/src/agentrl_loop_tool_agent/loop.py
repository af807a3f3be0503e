"""The tool agent: a state machine from the prompt to the last answer.

    PENDING ──> GENERATING ──┬── calls ─────────────────> PROCESSING_TOOLS ──> GENERATING
                             ├── none, an interaction ──> INTERACTING ───────> GENERATING
                             └── none ──────────────────> TERMINATED

Every state may lead to TERMINATED, and says why with a ``Termination``.
"""

import asyncio
import logging
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

from agentrl_core.api import (
    AgentLoopBase,
    AgentLoopOutput,
    ChatRenderer,
    Message,
    Termination,
    ToolCall,
    ToolOutcome,
    Trajectory,
    TrajectorySession,
    Turn,
)
from agentrl_loop_tool_agent.config import ToolAgentConfig

logger = logging.getLogger(__name__)
CUT = {"left": "[the beginning was cut]", "right": "[the rest was cut]", "middle": "[the middle was cut]"}
"""What a response that was too long says of itself, after or before the tokens that were kept."""


class State(Enum):
    PENDING = auto()
    GENERATING = auto()
    PROCESSING_TOOLS = auto()
    INTERACTING = auto()
    TERMINATED = auto()


class ToolAgentLoop(AgentLoopBase):
    """Runs tools and interactions for as many turns as the policy, the budget and the limits allow."""

    config: ToolAgentConfig

    async def run(
        self, sampling_params: dict[str, Any], *, session: TrajectorySession, raw_prompt: list[Message], **row: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        return await Episode(self.config, self.context.renderer, session, sampling_params, raw_prompt).run()


class Episode:
    """One trajectory on its way through the states."""

    trajectory: Trajectory
    turn: Turn

    def __init__(
        self,
        config: ToolAgentConfig,
        renderer: ChatRenderer,
        session: TrajectorySession,
        sampling_params: dict[str, Any],
        raw_prompt: list[Message],
    ) -> None:
        self.config = config
        self.renderer = renderer
        self.session = session
        self.sampling_params = sampling_params
        self.raw_prompt = raw_prompt
        self.has_interaction = False
        self.assistant_turns = 0
        self.user_turns = 0
        self.invalid_turns = 0
        self.termination = Termination.COMPLETED
        self.env_error: str | None = None

    async def run(self) -> AgentLoopOutput | list[AgentLoopOutput]:
        handlers = {
            State.PENDING: self._pending,
            State.GENERATING: self._generating,
            State.PROCESSING_TOOLS: self._processing_tools,
            State.INTERACTING: self._interacting,
        }
        state = State.PENDING
        while state is not State.TERMINATED:
            state = await handlers[state]()
        output = self.trajectory.finish(self.termination)
        for row in output if isinstance(output, list) else [output]:
            row.error = self.env_error
        return output

    async def _pending(self) -> State:
        schemas = await self.session.open_tools()
        self.has_interaction = await self.session.open_interaction()
        self.trajectory = self.session.trajectory(self.raw_prompt, tools=schemas)
        return State.GENERATING

    async def _generating(self) -> State:
        self.turn = await self.trajectory.generate(self.sampling_params)
        self.assistant_turns += 1
        if self.turn.finish_reason != "stop":
            return self._terminated(self.turn.termination)
        if self.turn.tool_calls or self.turn.parse_errors:
            return self._terminated(Termination.MAX_TURNS) if self._last_turn else State.PROCESSING_TOOLS
        return State.INTERACTING if self.has_interaction else self._terminated(Termination.COMPLETED)

    async def _processing_tools(self) -> State:
        calls = self.turn.tool_calls
        run, refused = calls[: self.config.max_parallel_calls], calls[self.config.max_parallel_calls :]
        outcomes = await self._call(run)
        messages = [outcome.message for outcome in outcomes]
        messages += [self._refusal(call) for call in refused]
        # Some chat templates refuse a tool message where no call went before it.
        role = "tool" if calls else "user"
        errors, shown = self.turn.parse_errors, self.turn.parse_errors[: self.config.max_parallel_calls]
        messages += [{"role": role, "content": error} for error in shown]
        if len(errors) > len(shown):
            messages.append({"role": role, "content": f"Error: {len(errors) - len(shown)} more invalid tool calls"})

        self.invalid_turns = self.invalid_turns + 1 if all(outcome.failed for outcome in outcomes) else 0
        limit = self.config.max_invalid_calls
        give_up = limit is not None and self.invalid_turns >= limit
        done = any(outcome.done for outcome in outcomes)
        over = give_up or done
        fits = self.trajectory.add_messages([self._cut(m) for m in messages], generation_prompt=not over)
        if done:
            return self._terminated(Termination.COMPLETED)
        if give_up:
            return self._terminated(Termination.TOOL_ERROR)
        return State.GENERATING if fits else self._terminated(Termination.LENGTH)

    async def _interacting(self) -> State:
        """The interaction judges the last allowed answer too: only its reply is then not shown."""
        try:
            answer = await self.session.interact(self.trajectory.messages)
        except Exception as error:  # noqa: BLE001 - an interaction is user code; its failure ends this trajectory only
            logger.warning("trajectory %s: the interaction failed", self.session.trajectory_id, exc_info=True)
            self.env_error = f"{type(error).__name__}: {error}"
            return self._terminated(Termination.ENV_ERROR)
        if answer.terminate:
            return self._terminated(Termination.COMPLETED)
        if self._last_turn or self.user_turns == self.config.max_user_turns:
            return self._terminated(Termination.MAX_TURNS)
        self.user_turns += 1
        fits = self.trajectory.add_messages([{"role": "user", "content": answer.text}])
        return State.GENERATING if fits else self._terminated(Termination.LENGTH)

    @property
    def _last_turn(self) -> bool:
        return self.assistant_turns == self.config.max_assistant_turns

    def _terminated(self, termination: Termination) -> State:
        self.termination = termination
        return State.TERMINATED

    async def _call(self, calls: Sequence[ToolCall]) -> list[ToolOutcome]:
        """Run the calls at once; outcomes are in the order of the calls."""
        if len(calls) == 1:
            return [await self.session.call_tool(calls[0])]
        return await asyncio.gather(*(self.session.call_tool(call) for call in calls))

    def _refusal(self, call: ToolCall) -> Message:
        limit = self.config.max_parallel_calls
        message = {"role": "tool", "content": f"Error: not run, at most {limit} calls are allowed in one turn"}
        return message | ({"tool_call_id": call.id} if call.id else {}) | {"name": call.name}

    def _cut(self, message: Message) -> Message:
        """The message within the limit of tokens; images stay."""
        limit, side = self.config.max_tool_response_tokens, self.config.tool_response_truncation

        def cut(text: str) -> str:
            kept = self.renderer.truncate(text, limit, side)
            if kept == text:
                return text
            return f"{CUT[side]}\n{kept}" if side == "left" else f"{kept}\n{CUT[side]}"

        content = message["content"]
        if isinstance(content, str):
            return message | {"content": cut(content)}
        return message | {"content": [{**p, "text": cut(p["text"])} if p.get("type") == "text" else p for p in content]}
