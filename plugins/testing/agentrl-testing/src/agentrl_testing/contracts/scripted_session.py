"""A real session over a policy that speaks by script: what agent loops are tested in."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl_core.api import (
    AgentLoopBase,
    AgentLoopContext,
    AgentLoopOutput,
    EngineError,
    Interaction,
    Message,
    MultiModal,
    ParsedText,
    PolicySpan,
    SamplingParams,
    TokenOutput,
    ToolCall,
    ToolParser,
    ToolParserContext,
    ToolResponse,
    ToolResult,
)
from agentrl_core.api.config import NoConfig
from agentrl_core.api.engine import FinishReason
from agentrl_core.api.tool import schema_of
from agentrl_core.data.chat_template import ChatTemplateRenderer
from agentrl_core.data.renderer import HFChatRenderer
from agentrl_core.rollout.identity import TrajectoryKey
from agentrl_core.rollout.loop_output import adopt
from agentrl_core.rollout.session import HostedInteraction, RolloutSession, SessionEnvironment
from agentrl_core.rollout.trajectory import TrajectoryLimits
from agentrl_testing.tiny_model import tiny_tokenizer


class TagParser(ToolParser):
    """``<tool_call>{"name": …, "arguments": …}</tool_call>``, as the tiny tokenizer's template writes it."""

    def __init__(self) -> None:
        super().__init__(NoConfig(), ToolParserContext())

    def parse(self, text: str) -> ParsedText:
        content, *parts = text.split("<tool_call>")
        calls, errors = [], []
        for part in parts:
            try:
                call = json.loads(part.partition("</tool_call>")[0])
                calls.append(ToolCall(call["name"], call["arguments"]))
            except (ValueError, KeyError, TypeError) as error:
                errors.append(f"unreadable call: {error}")
        return ParsedText(content.strip(), calls, errors)


def tool_call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as :class:`TagParser` reads it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': dict(arguments)})}\n</tool_call>"


class FunctionHost:
    """A typed function as the tool of a session, without a process around it."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.schemas = {name: schema_of(function, name)}
        self.opened: list[str] = []
        self.released: list[str] = []
        self._function = function

    async def call(self, method: str, instance_id: str, *args: Any, kwargs: Mapping[str, Any]) -> Any:
        if method == "create":
            self.opened.append(instance_id)

    async def execute(
        self, instance_id: str, function: str, arguments: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> ToolResult:
        return ToolResult(ToolResponse(str(self._function(**arguments))))

    def parameters(self, function: str) -> tuple[Mapping[str, Any], Sequence[str]]:
        parameters = self.schemas[function]["function"]["parameters"]
        return parameters["properties"], parameters["required"]

    async def release(self, instance_id: str, kwargs: Mapping[str, Any]) -> None:
        self.released.append(instance_id)


@dataclass
class Request:
    """One request to the engine and its answer."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    output: TokenOutput


@dataclass
class ScriptedPolicy:
    """Says ``turns`` in every trajectory, the last one again after that.

    Args:
        renderer: encodes the turns.
        turns: texts; the stop token follows each that fits into its budget.
        fails: raise EngineError in place of an answer.
        finish_reason: of every answer, in place of what really ended it.
        hangs: wait for ever.
    """

    renderer: HFChatRenderer
    turns: Sequence[str]
    fails: bool = False
    finish_reason: FinishReason | None = None
    hangs: bool = False
    requests: list[Request] = field(default_factory=list)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        multi_modal: MultiModal | None = None,
    ) -> TokenOutput:
        self.waiting.set()
        if self.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        if self.fails:
            raise EngineError("the engine is gone, as scripted")
        trajectory = request_id.partition("/")[0]
        turn = sum(request.request_id.partition("/")[0] == trajectory for request in self.requests)
        text = self.turns[min(turn, len(self.turns) - 1)]
        ids = [*self.renderer.encode(text), self.renderer.stop_token_ids[0]][: params.max_tokens]
        reason: FinishReason = "stop" if ids[-1] in self.renderer.stop_token_ids else "length"
        log_probs = [-(turn + 1) - position / 1000 for position in range(len(ids))]
        output = TokenOutput(ids, log_probs, self.finish_reason or reason, [PolicySpan(turn, 0, len(ids))])
        self.requests.append(Request(request_id, list(prompt_ids), params, output))
        return output

    async def open_session(self, session_id: str) -> None:
        return None

    async def close_session(self, session_id: str) -> None:
        return None


@dataclass
class LoopRun:
    """One loop with its world: run trajectories in it and see what happened.

    Args:
        build: makes the loop from its context.
        turns: what the policy says.
        tools: typed functions by name.
        interaction: answers the policy.
        max_response_length: tokens after the prompt.
        policy: further fields of :class:`ScriptedPolicy`.
    """

    build: Callable[[AgentLoopContext], AgentLoopBase]
    turns: Sequence[str]
    tools: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    interaction: Interaction | None = None
    max_response_length: int = 2000
    policy_fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.renderer = HFChatRenderer(tiny_tokenizer())
        self.policy = ScriptedPolicy(self.renderer, self.turns, **self.policy_fields)
        self.hosts = {name: FunctionHost(name, function) for name, function in self.tools.items()}
        parser = TagParser()
        hosted: dict[str, Any] = dict(self.hosts)
        interactions = {"partner": HostedInteraction(self.interaction, 30.0)} if self.interaction else {}
        self.environment = SessionEnvironment(
            renderer=ChatTemplateRenderer.of(self.renderer, parser),
            limits=TrajectoryLimits(self.max_response_length, 10_000),
            servers=self.policy,
            tools=hosted,
            interactions=interactions,
        )
        context = AgentLoopContext(
            renderer=self.renderer,
            tool_parser=parser,
            tools=tuple(self.tools),
            interactions=tuple(interactions),
            max_response_length=self.max_response_length,
        )
        self.loop = self.build(context)

    async def trajectory(
        self, raw_prompt: Sequence[Message], number: int = 0, sampling: Mapping[str, Any] | None = None, **row: Any
    ) -> list[AgentLoopOutput]:
        """Run one trajectory as a worker does; its rows."""
        if self.interaction is not None:
            row["extra_info"] = {**row.get("extra_info", {}), "interaction_kwargs": {"name": "partner"}}
        row["raw_prompt"] = list(raw_prompt)
        session = RolloutSession(TrajectoryKey(0, "train", 1, number, 0), row, self.environment)
        try:
            await session.open_engine()
            params = {"temperature": 1.0, **(sampling or {})}
            returned = await self.loop.run(params, session=session, **session.row)
            return [*adopt(type(self.loop).__name__, session.tree, returned)]
        finally:
            await session.close()

    async def close(self) -> None:
        """End what the run started."""
        await self.loop.close()
