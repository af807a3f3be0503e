"""Fakes that drive an agent loop without an engine, a tokenizer or a worker.

    session = FakeSession(["<tool_call>…</tool_call>", "#### 4"], parser=parser, tools={"add": lambda a, b: a + b})
    output = await loop.run({}, session=session, raw_prompt=[{"role": "user", "content": "2 + 2?"}])

A turn is a text (parsed by ``parser``, ended by ``stop``) or a whole :class:`Turn`. One word is one token.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl_core.api import (
    AgentLoopOutput,
    ChatRenderer,
    EngineError,
    ImageError,
    InteractionTurn,
    Message,
    ProtocolError,
    Termination,
    ToolCall,
    ToolError,
    ToolOutcome,
    ToolParser,
    ToolResponse,
    ToolResult,
    ToolUnavailableError,
    Trajectory,
    TrajectorySession,
    TruncationSide,
    Turn,
)
from agentrl_core.api.message_parts import image_part
from agentrl_core.engine_kit.images import read_image
from agentrl_core.engine_kit.media import is_name
from agentrl_core.plugins.boundary import boundary
from agentrl_core.rollout.session_images import NO_IMAGES

_WORD = re.compile(r"\S+\s*|\s+")


class WordRenderer(ChatRenderer):
    """One word, with the space after it, is one token; a message reads ``<role>content</role>``."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._words: list[str] = []

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, generation_prompt: bool = False
    ) -> str:
        schemas = "".join(f"<schema {tool['function']['name']}> " for tool in tools)
        rendered = "".join(f"<{m['role']}> {m['content']} </{m['role']}> " for m in messages)
        return schemas + rendered + ("<assistant> " if generation_prompt else "")

    def encode(self, text: str) -> list[int]:
        ids = []
        for word in _WORD.findall(text):
            if word not in self._ids:
                self._ids[word] = len(self._words)
                self._words.append(word)
            ids.append(self._ids[word])
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(self._words[i] for i in ids)

    def truncate(self, text: str, max_tokens: int, side: TruncationSide) -> str:
        words = _WORD.findall(text)
        if len(words) <= max_tokens:
            return text
        head = {"left": 0, "right": max_tokens, "middle": (max_tokens + 1) // 2}[side]
        tail = max_tokens - head
        return "".join(words[:head] + words[len(words) - tail :])


class FakeTrajectory(Trajectory):
    """Plays the turns of its session and keeps what the loop did.

    Args:
        added: the arguments of every ``add_messages`` that fitted, one list each.
        sampling_params: the argument of every ``generate``.
        ids, mask: everything after the prompt.
    """

    def __init__(self, session: "FakeSession", messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
        self.session = session
        self.messages = list(messages)
        self.tools = tools
        self.added: list[list[Message]] = []
        self.sampling_params: list[Mapping[str, Any]] = []
        self.prompt_ids = session.renderer.encode(
            session.renderer.render(messages, tools, generation_prompt=True),
        )
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.is_closed = False

    def _check_open(self) -> None:
        if self.is_closed:
            raise ProtocolError("a branch is used after finish(), which closes it; call finish() once, last")

    @property
    def remaining(self) -> int:
        return self.session.budget - len(self.ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.ids)

    async def generate(self, sampling_params: Mapping[str, Any]) -> Turn:
        self._check_open()
        self.sampling_params.append(sampling_params)
        if self.remaining <= 0:
            return Turn((), "", "length", "")
        turn = self.session.next_turn(self.remaining, self.tools)
        self._append(turn.token_ids, 1)
        message: Message = {"role": "assistant", "content": turn.content}
        if turn.tool_calls:
            message["tool_calls"] = [call.as_message() for call in turn.tool_calls]
        self.messages.append(message)
        return turn

    def add_messages(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> bool:
        self._check_open()
        renderer = self.session.renderer
        ids = renderer.encode(renderer.render(messages, generation_prompt=generation_prompt))
        if len(ids) > self.remaining:
            return False
        self._append(ids, 0)
        self.messages.extend(messages)
        self.added.append(list(messages))
        return True

    def fork(self) -> "FakeTrajectory":
        self._check_open()
        branch = FakeTrajectory(self.session, self.messages, self.tools)
        branch.prompt_ids, branch.ids, branch.mask = self.prompt_ids, list(self.ids), [0] * len(self.ids)
        return branch

    def finish(self, termination: Termination) -> AgentLoopOutput:
        self._check_open()
        self.is_closed = True
        return AgentLoopOutput(
            prompt_ids=self.prompt_ids,
            response_ids=self.ids,
            response_mask=self.mask,
            response_logprobs=None,
            termination=termination,
            trajectory_id=self.session.trajectory_id,
            num_turns=sum(message["role"] != "system" for message in self.messages),
            turn_scores=self.session.turn_scores,
            messages=self.messages,
        )

    def _append(self, ids: Sequence[int], mask: int) -> None:
        self.ids.extend(ids)
        self.mask.extend([mask] * len(ids))


class FakeSession(TrajectorySession):
    """A session whose policy is a script.

    Calls of tools fail and raise as those of a run do: what a function raises is an observation, but a
    ToolUnavailableError or an EngineError passes.

    Args:
        turns: what the policy says, in order; one more turn than scripted is an error.
        parser: parses turns given as text; without it they hold no calls.
        tools: functions by name, sync or async, called with the arguments of the call; a ToolResult is kept.
        interaction: answers the conversation; may be a coroutine function, may raise.
        budget: tokens after the prompt.
        shows_images: the model takes images; those that it was shown are in ``images``.
    """

    def __init__(
        self,
        turns: Sequence[str | Turn],
        *,
        parser: ToolParser | None = None,
        tools: Mapping[str, Callable[..., Any]] | None = None,
        interaction: Callable[[Sequence[Message]], Any] | None = None,
        budget: int = 10_000,
        shows_images: bool = False,
    ) -> None:
        self.shows_images = shows_images
        self.images: dict[str, bytes] = {}
        self.trajectory_id = "fake"
        self.renderer = WordRenderer()
        self.parser = parser
        self.tools = dict(tools or {})
        self.interaction = interaction
        self.budget = budget
        self.trajectories: list[FakeTrajectory] = []
        self.calls: list[ToolCall] = []
        self.turn_scores: list[float] = []
        self._turns = list(turns)
        self._spoken = 0

    def trajectory(self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()) -> FakeTrajectory:
        self.trajectories.append(FakeTrajectory(self, messages, tools))
        return self.trajectories[-1]

    async def image(self, value: Any) -> dict[str, Any]:
        if not self.shows_images:
            raise ImageError(NO_IMAGES)
        if is_name(value):
            await self.image_bytes(value)
            return image_part(value)
        image = read_image(value)
        self.images[image.name] = image.data
        return image_part(image.name)

    async def image_bytes(self, name: str) -> bytes:
        if name not in self.images:
            raise ImageError(f"there is no image {name}")
        return self.images[name]

    async def open_tools(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": name, "parameters": {}}} for name in self.tools]

    async def call_tool(self, call: ToolCall) -> ToolOutcome:
        self.calls.append(call)
        text, failed, done = "", False, False
        try:
            with boundary(ToolError, keep=(EngineError,)):
                result = await self._result(call)
            text, done = result.response.text, result.done
        except ToolUnavailableError:
            raise
        except ToolError as error:
            text, failed = f"Error: {error}", True
        message: Message = {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": text}
        return ToolOutcome(message, ToolResponse(text), failed, done)

    async def _result(self, call: ToolCall) -> ToolResult:
        if call.name not in self.tools:
            raise ToolError(f"there is no tool {call.name!r}; available: {', '.join(self.tools) or 'none'}")
        result = self.tools[call.name](**call.arguments)
        if inspect.isawaitable(result):
            result = await result
        return result if isinstance(result, ToolResult) else ToolResult(ToolResponse(str(result)))

    async def open_interaction(self) -> bool:
        return self.interaction is not None

    async def interact(self, messages: Sequence[Message]) -> InteractionTurn:
        if self.interaction is None:
            raise RuntimeError("interact() was called although open_interaction() is false")
        answer = self.interaction(messages)
        turn: InteractionTurn = await answer if inspect.isawaitable(answer) else answer
        if turn.reward is not None:
            self.turn_scores.append(turn.reward)
        self.agent = self.agent if turn.agent is None else turn.agent
        return turn

    def next_turn(self, budget: int, tools: Sequence[dict[str, Any]] = ()) -> Turn:
        """The next scripted turn, cut where the budget ends."""
        if self._spoken == len(self._turns):
            raise RuntimeError(f"the loop asked for turn {self._spoken + 1}, but {len(self._turns)} were scripted")
        turn = self._turns[self._spoken]
        self._spoken += 1
        if isinstance(turn, Turn):
            return turn
        ids = self.renderer.encode(turn)
        text = self.renderer.decode(ids[:budget])
        parsed = self.parser.parse_turn(text, tools) if self.parser else None
        return Turn(
            token_ids=ids[:budget],
            text=text,
            finish_reason="stop" if len(ids) <= budget else "length",
            content=parsed.content if parsed else text,
            tool_calls=parsed.calls if parsed else (),
            parse_errors=parsed.errors if parsed else (),
        )
