"""The token record of a trajectory.

Token in, token out: what the policy sampled is appended as it came, and the prompt of the next turn starts with the
exact ids of the turn before. The renderer says what follows when messages are added. Where history is rewritten,
``rollout.template_break`` decides.
"""

import math
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl_core.api import (
    AgentLoopOutput,
    Conversation,
    EngineError,
    Message,
    PluginError,
    PolicySpan,
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
from agentrl_core.config.schema import TemplateBreak
from agentrl_core.hosting.wire import MAX_DEPTH, is_too_deep
from agentrl_core.rollout.identity import TrajectoryKey

Sample = Callable[[list[int], SamplingParams, str], Awaitable[TokenOutput]]
_ENGINE_SAMPLING = ("temperature", "top_p", "top_k", *RESHAPING, "json_schema")
_SAMPLING = (*_ENGINE_SAMPLING, "max_tokens", "stop", "seed")


class TemplateBreakError(TemplateError):
    """The template rewrites history, and ``rollout.template_break`` is ``error``: the run must stop."""


@dataclass(frozen=True)
class TrajectoryLimits:
    """Budgets in tokens, and what to do when the template rewrites history."""

    max_response_length: int
    max_model_len: int
    template_break: TemplateBreak = "fork"


@dataclass
class SharedCounts:
    """What the branches of one trajectory count together."""

    branches: int = 0
    tool_calls: int = 0
    parse_errors: int = 0
    template_breaks: int = 0
    template_mismatches: int = 0
    answers: list[Message] = field(default_factory=list)
    """The policy's message of each turn."""

    @property
    def turns(self) -> int:
        """How many turns there are."""
        return len(self.answers)

    def turn_of(self, messages: Sequence[Message]) -> int:
        """The turn that ends a conversation; the last of all turns where a loop wrote the conversation itself."""
        last = next((message for message in reversed(messages) if message.get("role") == "assistant"), None)
        return next((turn for turn, answer in enumerate(self.answers) if answer is last), max(self.turns - 1, 0))


class TokenRow(AgentLoopOutput):
    """A row that grows: the parallel lists of the response grow together or not at all."""

    def __init__(self, prompt_ids: list[int], prompt_text: str) -> None:
        super().__init__(prompt_ids, [], [], [], Termination.ABORTED, prompt_text=prompt_text)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    def append_context(self, ids: Sequence[int], text: str) -> None:
        """Tokens that the policy did not sample."""
        self.response_ids += ids
        self.response_mask += [0] * len(ids)
        self.policy_versions += [-1] * len(ids)
        self.turn_ids += [-1] * len(ids)
        if self.response_logprobs is not None:
            self.response_logprobs += [0.0] * len(ids)
        self.segments.append((0, text))

    def append_sampled(self, output: TokenOutput, text: str, turn: int, settings: dict[str, Any]) -> None:
        """Tokens that the policy sampled in this turn of the trajectory, their log-probs under these settings."""
        if settings not in self.log_prob_settings:
            self.log_prob_settings.append(settings)
        self.response_ids += output.token_ids
        self.response_mask += [1] * len(output.token_ids)
        for span in output.spans:
            self.policy_versions += [span.version] * (span.end - span.start)
        self.turn_ids += [turn] * len(output.token_ids)
        if output.log_probs is None:
            self.response_logprobs = None
        elif self.response_logprobs is not None:
            self.response_logprobs += output.log_probs
        self.segments.append((1, text))


class TrajectoryBuilder(Trajectory):
    """Builds the rows of one trajectory.

    Args:
        key: its identity, for seeds and the request id.
        messages: the conversation so far.
        tools: schemas that the template shows.
        renderer: from messages to tokens and back.
        limits: budgets.
        sample: sends a request to an engine.
        sibling: another branch of the same trajectory.
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
    ) -> None:
        self.messages = list(messages)
        self._key = key
        self._tools = tools
        self._renderer = renderer
        self._limits = limits
        self._sample = sample
        self._turns = 0
        # A branch may repeat messages of another one: its own calls have other ids.
        self._calls: int = 0 if sibling is None else sibling._calls
        self._used = 0
        # Each branch has its own engine sessions and seeds.
        self.counts: SharedCounts = SharedCounts() if sibling is None else sibling.counts
        self._branch = 0 if sibling is None else self._next_branch()
        self._texts: list[str] = []
        self._full_text = ""
        prompt = renderer.render(self.messages, tools, generation_prompt=True)
        self._pieces: list[tuple[int, str]] = [(0, prompt.text)]
        self._asked = True
        self._assumed = False
        self._rows = [TokenRow(prompt.ids, prompt.text)]

    @property
    def row(self) -> TokenRow:
        """The row that grows."""
        return self._rows[-1]

    @property
    def template_breaks(self) -> int:
        """How often the template rewrote history, in all branches."""
        return self.counts.template_breaks

    @property
    def request_id(self) -> str:
        """Names the engine session of this branch."""
        return f"{self._key.request_id}/{self._branch}" if self._branch else self._key.request_id

    @property
    def remaining(self) -> int:
        return min(self._limits.max_response_length - self._used, self._limits.max_model_len - self.row.num_tokens)

    @property
    def num_tokens(self) -> int:
        return self.row.num_tokens

    async def generate(self, sampling_params: Mapping[str, Any]) -> Turn:
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
        row = self.row
        output = await self._sample(row.prompt_ids + row.response_ids, params, self.request_id)
        check_output(output, max_tokens)
        if stops := sampling_params.get("stop"):
            output = cut_after(output, stops, self._renderer.chat.decode)
        self._turns += 1
        return self._record_turn(output, params)

    def _stop_ids(self, stops: Sequence[str]) -> list[int]:
        """Those of the stop texts that are one token: the engine need not sample beyond them."""
        if not all(stops):
            raise PluginError(
                "sampling parameter stop: an empty text would end every turn; name at least one character"
            )
        return [ids[0] for stop in stops if len(ids := self._renderer.chat.encode(stop)) == 1]

    def _record_turn(self, output: TokenOutput, params: SamplingParams) -> Turn:
        ids = output.token_ids
        parsed = self._renderer.parse(ids, self._tools)
        whole = parsed.text + (self._renderer.stop_texts.get(ids[-1], "") if ids else "")
        number = self.counts.turns
        self.row.append_sampled(output, whole, number, params.log_prob_settings)
        self._used += len(ids)
        self._full_text += whole
        self._pieces.append((1, whole))
        self._texts.append(parsed.text)
        calls = [self._number(call, number) for call in parsed.calls if not is_too_deep(call.arguments)]
        errors = parsed.errors
        if len(calls) < len(parsed.calls):
            errors = [*errors, f"Error: invalid tool call: arguments nested more than {MAX_DEPTH} levels deep"]
        self.counts.parse_errors += len(errors)
        content = parsed.content if calls or not parsed.calls else parsed.text
        message: Message = {"role": "assistant", "content": content, **parsed.fields}
        if calls:
            message["tool_calls"] = [call.as_message() for call in calls]
        self.messages.append(message)
        self.counts.answers.append(message)
        return Turn(ids, parsed.text, output.finish_reason, content, calls, errors, output.log_probs)

    def _number(self, call: ToolCall, turn: int) -> ToolCall:
        # Nine characters: some chat templates accept no other length.
        self._calls += 1
        self.counts.tool_calls += 1
        return ToolCall(call.name, call.arguments, f"call{self._calls:05d}", turn)

    def add_messages(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> bool:
        suffix = self._renderer.bridge(self._conversation, messages, generation_prompt=generation_prompt)
        if suffix is None:
            return self._start_new_row(messages, generation_prompt)
        if len(suffix.ids) > self.remaining:
            return False
        self.row.append_context(suffix.ids, suffix.text)
        self._used += len(suffix.ids)
        self._full_text += suffix.text
        self._pieces.append((0, suffix.text))
        self._asked = generation_prompt
        self._assumed |= suffix.assumed
        self.messages += messages
        return True

    @property
    def _conversation(self) -> Conversation:
        return Conversation(self.messages, self._tools, self.row, self._pieces, self._asked, self._key.trajectory_id)

    def _start_new_row(self, messages: Sequence[Message], generation_prompt: bool) -> bool:
        if self._limits.template_break == "error":
            raise TemplateBreakError(
                f"trajectory {self._key.trajectory_id}: the chat template rewrites the history when a message of role "
                f"{messages[0].get('role')!r} follows; `agentrl doctor --model PATH` shows where. Set "
                "rollout.template_break to fork or mask, or model.chat_template to an append-only template"
            )
        prompt = self._renderer.render([*self.messages, *messages], self._tools, generation_prompt=generation_prompt)
        if len(prompt.ids) >= self._limits.max_model_len or self._limits.max_response_length <= self._used:
            return False
        self.counts.template_breaks += 1
        if self._limits.template_break == "mask":
            self._rows.clear()
        self._rows.append(TokenRow(prompt.ids, prompt.text))
        self._pieces, self._asked = [(0, prompt.text)], generation_prompt
        self._full_text += "".join(f"\n{message.get('content') or ''}\n" for message in messages)
        self.messages += messages
        return True

    def fork(self) -> "TrajectoryBuilder":
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._branch = self._next_branch()
        twin.messages = list(self.messages)
        twin._texts = list(self._texts)
        twin._pieces = list(self._pieces)
        twin._rows = [TokenRow(self._conversation.ids, self._conversation.text)]
        return twin

    def _next_branch(self) -> int:
        self.counts.branches += 1
        return self.counts.branches

    def finish(self, termination: Termination) -> AgentLoopOutput | list[AgentLoopOutput]:
        if self._assumed and not self._renderer.check(self._conversation):
            self.counts.template_mismatches += 1
        rows: list[AgentLoopOutput] = [row for row in self._rows if any(row.response_mask)] or [self._rows[-1]]
        for row in rows:
            row.path_length = self._used if row is rows[-1] else 0
            row.termination = termination
            row.trajectory_id = self._key.trajectory_id
            row.num_turns = sum(message.get("role") != "system" for message in self.messages)
            row.messages = self.messages
            row.turn_texts, row.full_text = self._texts, self._full_text
        return rows if len(rows) > 1 else rows[0]


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
    return TokenOutput(output.token_ids[:count], log_probs, "stop", spans)


def check_output(output: TokenOutput, max_tokens: int) -> None:
    """Refuse an engine's output whose parts do not fit together.

    Raises:
        EngineError: naming the lengths.
    """
    count = len(output.token_ids)
    if count > max_tokens:
        raise EngineError(f"the engine returned {count} tokens where {max_tokens} were allowed")
    if output.log_probs is not None:
        if len(output.log_probs) != count:
            raise EngineError(f"the engine returned {len(output.log_probs)} log-probs for {count} tokens")
        if not all(map(math.isfinite, output.log_probs)):
            raise EngineError(f"the engine returned a log-prob that is not finite among {count} tokens")
    end = 0
    for span in output.spans:
        if span.start != end or span.end < span.start:
            break
        end = span.end
    if end != count:
        raise EngineError(f"the engine's policy-version spans do not cover its {count} tokens: {output.spans}")
    if count == 0 and output.finish_reason != "abort":
        raise EngineError(f"the engine returned no token with finish_reason {output.finish_reason!r}")
