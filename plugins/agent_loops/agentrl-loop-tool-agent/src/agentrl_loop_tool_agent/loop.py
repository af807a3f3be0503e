"""The tool agent: a state machine from the prompt to the last answer.

    pending ──> generating ──┬── calls ─────────────────> processing_tools ──> generating
                             ├── none, an interaction ──> interacting ───────> generating
                             └── none ──────────────────> the end

A state is a method of :class:`Episode` that returns the next state, or None at the end. Every state may end the
trajectory with ``return self.terminated(termination)``. A subclass adds a state as a method, and returns it from
another one.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from agentrl_core.api import (
    AgentLoopBase,
    AgentLoopOutput,
    ChatRenderer,
    EngineError,
    Message,
    Termination,
    ToolCall,
    ToolOutcome,
    Trajectory,
    TrajectorySession,
    Turn,
    together,
)
from agentrl_loop_tool_agent.config import ToolAgentConfig

logger = logging.getLogger(__name__)
CUT = {"left": "[the beginning was cut]", "right": "[the rest was cut]", "middle": "[the middle was cut]"}
"""What a response that was too long says of itself, after or before the tokens that were kept."""

State = Callable[[], Awaitable["State | None"]]
"""A method of an episode that does one step and returns the next one; None: the trajectory has ended."""


class Episode:
    """One trajectory on its way through the states.

    Args:
        config: options of the loop.
        renderer: tokenizer and chat template.
        session: tools and interaction of the trajectory.
        sampling_params: of every turn.
        raw_prompt: the row's messages.
        row: the other fields of the dataset row.
    """

    config: ToolAgentConfig
    trajectory: Trajectory
    """The token record that grows; the last one that :meth:`start` has begun."""
    turn: Turn
    """The last turn of the policy."""

    def __init__(
        self,
        config: ToolAgentConfig,
        renderer: ChatRenderer,
        session: TrajectorySession,
        sampling_params: dict[str, Any],
        raw_prompt: list[Message],
        row: Mapping[str, Any],
    ) -> None:
        self.config = config
        self.renderer = renderer
        self.session = session
        self.sampling_params = sampling_params
        self.raw_prompt = raw_prompt
        self.row = row
        self.schemas: list[dict[str, Any]] = []
        self.has_interaction = False
        self.assistant_turns = 0
        self.user_turns = 0
        self.invalid_turns = 0
        self.termination = Termination.COMPLETED
        self.error: str | None = None
        self._trajectories: list[Trajectory] = []

    async def run(self) -> list[AgentLoopOutput]:
        """Go from state to state; returns the finished rows."""
        state: State | None = self.pending
        while state is not None:
            state = await state()
        return self.finish()

    def finish(self) -> list[AgentLoopOutput]:
        """The rows of all token records, each with the texts of the whole trajectory, for its reward."""
        if not self._trajectories:
            self.start(self.raw_prompt)
        return self.rows(self._trajectories)

    def rows(self, trajectories: Sequence[Trajectory]) -> list[AgentLoopOutput]:
        """The rows of these token records, which are one conversation."""
        parts: list[list[AgentLoopOutput]] = []
        for trajectory in trajectories:
            output = trajectory.finish(self.termination)
            parts.append(output if isinstance(output, list) else [output])
        rows = [row for part in parts for row in part]
        if len(rows) > 1:
            rows = [row for row in rows if any(row.response_mask)] or rows[-1:]
        texts = [text for part in parts for text in part[-1].turn_texts]
        full_text = "\n".join(part[-1].full_text for part in parts)
        for row in rows:
            row.turn_texts, row.full_text, row.error = texts, full_text, self.error
        return rows

    def start(self, messages: Sequence[Message]) -> Trajectory:
        """Begin a token record with these messages; the next turn belongs to it. Earlier ones are trained too."""
        self.trajectory = self.session.trajectory(messages, tools=self.schemas)
        self._trajectories.append(self.trajectory)
        return self.trajectory

    def extend(self, messages: Sequence[Message]) -> State | None:
        """Show the policy what tools or a user answered; the end with ``length`` where that does not fit."""
        fits = self.trajectory.add_messages(messages)
        return self.generating if fits else self.terminated(Termination.LENGTH)

    def terminated(self, termination: Termination) -> State | None:
        """End the trajectory: a state returns what this returns."""
        self.termination = termination
        return None

    async def pending(self) -> State | None:
        """Open the tools and the interaction, and begin the token record."""
        self.schemas = await self.session.open_tools()
        self.has_interaction = await self.session.open_interaction()
        self.start(self.raw_prompt)
        return self.generating

    async def generating(self) -> State | None:
        """Sample a turn."""
        self.turn = await self.trajectory.generate(self.sampling_params)
        self.assistant_turns += 1
        if self.turn.finish_reason != "stop":
            return self.terminated(self.turn.termination)
        if self.turn.tool_calls or self.turn.parse_errors:
            return self.terminated(Termination.MAX_TURNS) if self._last_turn else self.processing_tools
        return self.interacting if self.has_interaction else self.terminated(Termination.COMPLETED)

    async def processing_tools(self) -> State | None:
        """Run the calls of the turn, and show the policy their responses."""
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
        messages = [self._cut(message) for message in messages]
        if done or give_up:
            self.trajectory.add_messages(messages, generation_prompt=False)
            return self.terminated(Termination.COMPLETED if done else Termination.TOOL_ERROR)
        return self.extend(messages)

    async def interacting(self) -> State | None:
        """Ask the interaction. It judges the last allowed answer too: only its reply is then not shown."""
        try:
            answer = await self.session.interact(self.trajectory.messages)
        except EngineError:
            # An engine that the interaction asked: the infrastructure failed, and the policy did nothing wrong.
            raise
        except Exception as error:  # noqa: BLE001 - an interaction is user code; its failure ends this trajectory only
            logger.warning("trajectory %s: the interaction failed", self.session.trajectory_id, exc_info=True)
            self.error = f"{type(error).__name__}: {error}"
            return self.terminated(Termination.ENV_ERROR)
        if answer.terminate:
            return self.terminated(Termination.COMPLETED)
        if self._last_turn or self.user_turns == self.config.max_user_turns:
            return self.terminated(Termination.MAX_TURNS)
        self.user_turns += 1
        return self.answered({"role": "user", "content": answer.content})

    def answered(self, said: Message) -> State | None:
        """Show the policy what the interaction said."""
        return self.extend([said])

    @property
    def _last_turn(self) -> bool:
        return self.assistant_turns == self.config.max_assistant_turns

    async def _call(self, calls: Sequence[ToolCall]) -> list[ToolOutcome]:
        """Run the calls concurrently; outcomes are in the order of the calls."""
        if len(calls) == 1:
            return [await self.session.call_tool(calls[0])]
        return await together(self.session.call_tool(call) for call in calls)

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


class ToolAgentLoop(AgentLoopBase):
    """Runs tools and interactions for as many turns as the policy, the budget and the limits allow."""

    config: ToolAgentConfig
    episode: type[Episode] = Episode
    """What runs a trajectory; a subclass names its own."""

    async def run(
        self, sampling_params: dict[str, Any], *, session: TrajectorySession, raw_prompt: list[Message], **row: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        rows = await self.episode(self.config, self.context.renderer, session, sampling_params, raw_prompt, row).run()
        return rows if len(rows) > 1 else rows[0]
