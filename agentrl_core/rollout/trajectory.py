"""Builds the tree of a trajectory.

Token in, token out: what the policy sampled becomes a node as it came, and the prompt of the next turn starts with the
exact ids of the turn before. The renderer says what follows when messages are added. Where history is rewritten,
``rollout.template_break`` decides.
"""

import math
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl_core.api import (
    AgentLoopOutput,
    Conversation,
    EngineError,
    ImageError,
    Message,
    MultiModal,
    PluginError,
    PolicySpan,
    ProtocolError,
    Rendered,
    Renderer,
    SamplingParams,
    TemplateError,
    Termination,
    TokenOutput,
    ToolCall,
    Trajectory,
    Turn,
)
from agentrl_core.api.engine import RESHAPING
from agentrl_core.api.message_parts import text_of
from agentrl_core.api.tree import Node, NodeKind, Request, Tree, TreePath, collapsed_of, ids_of, images_of
from agentrl_core.config.schema import TemplateBreak
from agentrl_core.engine_kit.media import images_in
from agentrl_core.hosting.wire import MAX_DEPTH, is_too_deep
from agentrl_core.rollout.identity import TrajectoryKey
from agentrl_core.rollout.loop_output import TreeRow

NO_EXPERT = np.iinfo(np.uint8).max
"""Numbers of experts below this one are kept in one byte; the largest number of a type says that none is known."""
Sample = Callable[..., Awaitable[tuple[TokenOutput, Request]]]
"""Called with the prompt's ids, the sampling parameters, the request's id, and the prompt's images if it has some."""
_ENGINE_SAMPLING = ("temperature", "top_p", "top_k", *RESHAPING, "json_schema")
_SAMPLING = (*_ENGINE_SAMPLING, "max_tokens", "stop", "seed")


class TemplateBreakError(TemplateError):
    """The template rewrites history, and ``rollout.template_break`` is ``error``: the run must stop."""


@dataclass(frozen=True)
class TrajectoryLimits:
    """Budgets in tokens, and what to do when the template rewrites history.

    ``max_images`` is that of a conversation, and ``reserved`` are ids that only images bring into it.
    """

    max_response_length: int
    max_model_len: int
    template_break: TemplateBreak = "fork"
    max_images: int = 0
    reserved: frozenset[int] = frozenset()


class TrajectoryBuilder(Trajectory):
    """Builds one branch of a trajectory.

    Args:
        key: its identity, for seeds and the request id.
        messages: the conversation so far.
        tools: schemas that the template shows.
        renderer: from messages to tokens and back.
        limits: budgets.
        sample: sends a request to an engine.
        sibling: another branch of the same trajectory.
        tree: of the trajectory.
    """

    def __init__(
        self,
        key: TrajectoryKey,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        renderer: Renderer,
        limits: TrajectoryLimits,
        sample: Sample,
        sibling: "TrajectoryBuilder | None" = None,
        tree: Tree | None = None,
    ) -> None:
        self.messages = list(messages)
        self.tree = Tree() if tree is None else tree
        self._key = key
        self._tools = tools
        self._renderer = renderer
        self._limits = limits
        self._sample = sample
        self._turns = 0
        # A branch may repeat messages of another one: its own calls have other ids.
        self._calls: int = 0 if sibling is None else sibling._calls
        # Each branch has its own engine sessions and seeds.
        self._branch = 0 if sibling is None else self._next_branch()
        prompt = self._shown(renderer.render(self.messages, tools, generation_prompt=True), self.messages)
        self._path = [_node(None, "prompt", prompt, self.messages)]
        """The nodes whose tokens the model sees."""
        self.tree.nodes += self._path
        self._start: Node | None = None
        """The node that the branch was forked from."""
        self._num_tokens = len(prompt.ids)
        self._used = 0
        self._asked = True
        self._assumed = False
        self._finished: Termination | None = None

    @property
    def row(self) -> TreeRow:
        """The row that grows."""
        return self._row(self._path)

    @property
    def template_breaks(self) -> int:
        """How often the template rewrote history, in all branches."""
        return self.tree.template_breaks

    @property
    def request_id(self) -> str:
        """Names the engine session of this branch."""
        return f"{self._key.request_id}/{self._branch}" if self._branch else self._key.request_id

    @property
    def remaining(self) -> int:
        return min(self._limits.max_response_length - self._used, self._limits.max_model_len - self._num_tokens)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    async def generate(self, sampling_params: Mapping[str, Any]) -> Turn:
        if self._finished is not None:
            raise self._closed("generate")
        if unknown := [name for name in sampling_params if name not in _SAMPLING]:
            raise PluginError(
                f"Trajectory.generate: unknown sampling parameter {', '.join(unknown)}; allowed: {', '.join(_SAMPLING)}"
            )
        limit = sampling_params.get("max_tokens")
        max_tokens = self.remaining if limit is None else min(limit, self.remaining)
        if max_tokens <= 0:
            return Turn((), "", "length", "")
        params = SamplingParams(
            max_tokens=max_tokens,
            seed=self._key.seed(self._turns, self._branch, sampling_params.get("seed")),
            stop_token_ids=(*self._renderer.stop_token_ids, *self._stop_ids(sampling_params.get("stop") or ())),
            **{name: sampling_params[name] for name in _ENGINE_SAMPLING if name in sampling_params},
        )
        agent, end = self.tree.agent, self._path[-1]
        images = images_of(self._path)
        media = (MultiModal(images, collapsed_of(self._path)),) if images else ()
        output, request = await self._sample(ids_of(self._path), params, self.request_id, *media)
        if self._finished is not None or self._path[-1] is not end:
            raise self._closed("generate")
        check_output(output, max_tokens, self._limits.reserved, self._num_tokens)
        if stops := sampling_params.get("stop"):
            output = cut_after(output, stops, self._renderer.chat.decode)
        self._turns += 1
        return self._record_turn(output, params, request, agent)

    def _stop_ids(self, stops: Sequence[str]) -> list[int]:
        """Those of the stop texts that are one token: the engine need not sample beyond them."""
        if not all(stops):
            raise PluginError(
                "sampling parameter stop: an empty text would end every turn; name at least one character"
            )
        return [ids[0] for stop in stops if len(ids := self._renderer.chat.encode(stop)) == 1]

    def _record_turn(self, output: TokenOutput, params: SamplingParams, request: Request, agent: str) -> Turn:
        ids = output.token_ids
        parsed = self._renderer.parse(ids, self._tools)
        stop = self._renderer.stop_texts.get(ids[-1], "") if ids else ""
        node = Node(
            self._path[-1], "turn", ids, parsed.text + stop, (), agent, output.log_probs, output.spans,
            output.finish_reason, params.log_prob_settings, stop, request,
        )  # fmt: skip
        if ids and output.routed_experts is not None:
            # Turns before have those of the tokens before.
            known = sum(len(each.routed_experts) for each in self._path if each.routed_experts is not None)
            own = output.routed_experts[known:]
            node.routed_experts = own.astype(np.uint8 if own.max(initial=0) < NO_EXPERT else np.int16)
        calls = [self._number(call, node) for call in parsed.calls if not is_too_deep(call.arguments)]
        errors = parsed.errors
        if len(calls) < len(parsed.calls):
            errors = [*errors, f"Error: invalid tool call: arguments nested more than {MAX_DEPTH} levels deep"]
        self.tree.parse_errors += len(errors)
        content = parsed.content if calls or not parsed.calls else parsed.text
        message: Message = {"role": "assistant", "content": content, **parsed.fields}
        if calls:
            message["tool_calls"] = [call.as_message() for call in calls]
        node.messages = (message,)
        self._grow(node)
        return Turn(ids, parsed.text, output.finish_reason, content, calls, errors, output.log_probs)

    def _grow(self, node: Node) -> None:
        """Add what follows, and its messages."""
        self._path.append(node)
        self.tree.nodes.append(node)
        self._num_tokens += len(node.ids)
        self._used += len(node.ids)
        self.messages += node.messages

    def _number(self, call: ToolCall, turn: Node) -> ToolCall:
        # Nine characters: some chat templates accept no other length.
        self._calls += 1
        self.tree.tool_calls += 1
        return ToolCall(call.name, call.arguments, f"call{self._calls:05d}", turn)

    def add_messages(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> bool:
        if self._finished is not None:
            raise self._closed("add_messages")
        suffix = self._renderer.bridge(self._conversation, messages, generation_prompt=generation_prompt)
        if suffix is None:
            return self._rewrite(messages, generation_prompt)
        self._shown(suffix, messages, images_of(self._path))
        if len(suffix.ids) > self.remaining:
            return False
        self._grow(_node(self._path[-1], "context", suffix, messages))
        self._asked = generation_prompt
        self._assumed |= suffix.assumed
        return True

    def _shown(self, rendered: Rendered, messages: Sequence[Message], before: Sequence[str] = ()) -> Rendered:
        """What was rendered, if it shows all images of the messages, and the conversation may have so many.

        Args:
            before: images of the tokens so far.

        Raises:
            TemplateError: it shows others.
            ImageError: there are too many.
        """
        if (images := images_in(messages)) != tuple(rendered.images):
            raise TemplateError(
                f"the renderer {type(self._renderer).__name__} shows {len(rendered.images)} of {len(images)} images; "
                "set rollout.renderer.name=chat_template"
            )
        if images and len(before) + len(images) > self._limits.max_images:
            raise ImageError(
                f"the conversation has {len(before) + len(images)} images, more than model.images.max_count="
                f"{self._limits.max_images}"
            )
        return rendered

    @property
    def _conversation(self) -> Conversation:
        return Conversation(self.messages, self._tools, self._path, self._asked, self._key.trajectory_id)

    def _rewrite(self, messages: Sequence[Message], generation_prompt: bool) -> bool:
        """Go on with a prompt that holds the rewritten history: the tokens so far are no beginning of it."""
        if self._limits.template_break == "error":
            raise TemplateBreakError(
                f"trajectory {self._key.trajectory_id}: the chat template rewrites the history when a message of role "
                f"{messages[0].get('role')!r} follows; `agentrl doctor --model PATH` shows where. Set "
                "rollout.template_break to fork or mask, or model.chat_template to an append-only template"
            )
        whole = [*self.messages, *messages]
        prompt = self._shown(self._renderer.render(whole, self._tools, generation_prompt=generation_prompt), whole)
        if len(prompt.ids) >= self._limits.max_model_len or self._limits.max_response_length <= self._used:
            return False
        self.tree.template_breaks += 1
        self._path = [_node(self._path[-1], "prompt", prompt, messages)]
        self.tree.nodes += self._path
        self._num_tokens = len(prompt.ids)
        self._asked = generation_prompt
        self.messages += messages
        return True

    def fork(self) -> "TrajectoryBuilder":
        if self._finished is not None:
            raise self._closed("fork")
        twin = copy(self)
        twin._branch = self._next_branch()
        twin.messages = list(self.messages)
        twin._path = list(self._path)
        twin._start = self._path[-1]
        return twin

    def _next_branch(self) -> int:
        self.tree.branches += 1
        return self.tree.branches

    def _closed(self, method: str) -> ProtocolError:
        where = f"trajectory {self._key.trajectory_id}, branch {self._branch}: {method}()"
        if self._finished is None:
            return ProtocolError(
                f"{where} was still waiting for the engine when the branch grew. Await generate() before the next "
                "call, or fork() for turns at the same time"
            )
        return ProtocolError(
            f"{where} after finish({self._finished.value}), which closes a branch. Call finish() once, last, or fork() "
            "before it"
        )

    def finish(self, termination: Termination) -> AgentLoopOutput | list[AgentLoopOutput]:
        if self._finished is not None:
            raise self._closed("finish")
        self._finished = termination
        if self._assumed and not self._renderer.check(self._conversation):
            self.tree.template_mismatches += 1
        line, paths = self._path[-1].line, [self._path]
        if self._limits.template_break == "fork" and self.tree.template_breaks:
            # Of a branch, what was before its fork belongs to the one that it was forked from.
            own = line if self._start is None else line[line.index(self._start) + 1 :]
            paths = [node.parent.path for node in own if node.kind == "prompt" and node.parent is not None] + paths
        built = [self._row(path) for path in paths]
        rows = [row for row in built if row.tokens.sampled_tokens] or built[-1:]
        rest = line[1:]
        texts = [node.said for node in rest if node.kind == "turn"]
        full_text = "".join([node.text if node.kind != "prompt" else _shown(node.messages) for node in rest])
        num_turns = sum([message.get("role") != "system" for message in self.messages])
        for row in rows:
            row.termination = termination
            row.trajectory_id = self._key.trajectory_id
            row.num_turns = num_turns
            row.messages = self.messages
            row.turn_texts, row.full_text = texts, full_text
        return [*rows] if len(rows) > 1 else rows[0]

    def _row(self, path: Sequence[Node]) -> TreeRow:
        shared = path.index(self._start) + 1 if self._start in path else 1
        return TreeRow(TreePath(self.tree, path, shared))


def _node(parent: Node | None, kind: NodeKind, rendered: Rendered, messages: Sequence[Message]) -> Node:
    return Node(
        parent, kind, rendered.ids, rendered.text, tuple(messages), images=rendered.images, collapsed=rendered.collapsed
    )


def _shown(messages: Sequence[Message]) -> str:
    return "".join(f"\n{text_of(message)}\n" for message in messages)


def cut_after(output: TokenOutput, stops: Sequence[str], decode: Callable[[list[int]], str]) -> TokenOutput:
    """The output up to the token that completes the first of these texts; all of it where it holds none."""

    def holds_one(count: int) -> bool:
        text = decode(output.token_ids[:count])
        return any(stop in text for stop in stops)

    most = len(output.token_ids)
    if not holds_one(most):
        return output
    count = bisect_left(range(most), True, key=holds_one)
    spans = [PolicySpan(each.version, each.start, min(each.end, count)) for each in output.spans if each.start < count]
    log_probs = None if output.log_probs is None else output.log_probs[:count]
    experts = output.routed_experts
    if experts is not None:
        experts = experts[: len(experts) - most + count]
    return TokenOutput(output.token_ids[:count], log_probs, "stop", spans, routed_experts=experts)


def check_output(output: TokenOutput, max_tokens: int, reserved: frozenset[int] = frozenset(), prompt: int = 0) -> None:
    """Refuse an engine's output whose parts do not fit together.

    Args:
        reserved: ids that an engine never samples.
        prompt: tokens of the prompt.

    Raises:
        EngineError: naming the lengths.
    """
    count = len(output.token_ids)
    if count > max_tokens:
        raise EngineError(f"the engine returned {count} tokens where {max_tokens} were allowed")
    if reserved and (found := reserved.intersection(output.token_ids)):
        raise EngineError(f"the engine sampled the token {min(found)}, which stands for an image")
    if output.log_probs is not None:
        if len(output.log_probs) != count:
            raise EngineError(f"the engine returned {len(output.log_probs)} log-probs for {count} tokens")
        if not all(map(math.isfinite, output.log_probs)):
            raise EngineError(f"the engine returned a log-prob that is not finite among {count} tokens")
    experts = output.routed_experts
    if experts is not None and count and (experts.ndim != 3 or len(experts) != prompt + count - 1):
        raise EngineError(
            f"the engine returned routed_experts of shape {list(experts.shape)} for {prompt} tokens of a prompt and "
            f"{count} sampled ones; expected [{prompt + count - 1}, layers, experts of a token]"
        )
    end = 0
    for span in output.spans:
        if span.start != end or span.end < span.start:
            break
        end = span.end
    if end != count:
        raise EngineError(f"the engine's policy-version spans do not cover its {count} tokens: {output.spans}")
    if count == 0 and output.finish_reason != "abort":
        raise EngineError(f"the engine returned no token with finish_reason {output.finish_reason!r}")
