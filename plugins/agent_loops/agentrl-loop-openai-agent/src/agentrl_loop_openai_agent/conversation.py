"""The conversations of one run token, recorded token by token.

A client sends its whole history with every request. What it sends is compared with what is recorded: where the
recorded messages are its head, only the rest is appended, and the model sees the exact ids that it sampled before.
Anything else starts another branch, rendered from its start, and is counted as a fork: nothing is guessed.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl_core.api import (
    AgentLoopOutput,
    AgentRLError,
    EngineError,
    Message,
    Termination,
    Trajectory,
    TrajectorySession,
    Turn,
)
from agentrl_core.api.message_parts import content_of
from agentrl_loop_openai_agent.images import ShownImages

Schemas = Sequence[dict[str, Any]]


class ContextLengthError(AgentRLError):
    """The messages do not fit into what is left of the response budget or the context."""


class BranchLimitError(AgentRLError):
    """The request would begin more branches than the loop's option ``max_branches`` allows."""


@dataclass
class _Branch:
    trajectory: Trajectory
    tools: Schemas
    owner: "Reply | None" = None
    last_turn: Turn | None = None
    history: list[Message] = field(default_factory=list)
    told: dict[int, str] = field(default_factory=dict)
    """Contents of the policy's messages as the client knows them, by number of the message."""

    def recorded(self) -> list[Message]:
        """Its messages in the form in which a client's are compared with them."""
        for number, message in enumerate(self.trajectory.messages[len(self.history) :], len(self.history)):
            if number in self.told:
                # The client got no other field, such as reasoning that the renderer keeps apart.
                message = {"role": "assistant", "content": self.told[number], "tool_calls": message.get("tool_calls")}
            self.history.append(normalised(message))
        return self.history


@dataclass(frozen=True)
class Completion:
    """The answer to one request.

    Args:
        turn: what the policy said.
        prompt_tokens: tokens before it.
        branch: number of the branch that it belongs to, from 0.
        forked: the request did not extend what was recorded, and began this branch.
        replayed: the turn had been sampled for an earlier request, whose answer was lost on its way.
        stop: the stop text of the request that ended the turn; the record has it, the answer's text has not.
    """

    turn: Turn
    prompt_tokens: int
    branch: int
    forked: bool = False
    replayed: bool = False
    stop: str | None = None

    @property
    def text(self) -> str:
        """The turn's text for the client."""
        return self.turn.content if self.stop is None else self.turn.content.partition(self.stop)[0]


class Conversation:
    """Everything that one run token has said and heard.

    Args:
        session: of the trajectory; each branch is a trajectory of it.
        sampling_params: of the run. A client cannot change them: log-probs are trained at the run's temperature.
        max_branches: most branches; a request that needs another one is refused.
    """

    def __init__(self, session: TrajectorySession, sampling_params: Mapping[str, Any], max_branches: int = 64) -> None:
        self.preparing = asyncio.Lock()
        """Held around :meth:`prepare` where that runs in another thread."""
        self.forks = 0
        self.exhausted = False
        self.failure: Exception | None = None
        self.aborted: EngineError | None = None
        self.images = ShownImages(session)
        self._session = session
        self._sampling_params = dict(sampling_params)
        self._max_branches = max_branches
        self._branches: list[_Branch] = []

    @property
    def rows(self) -> int:
        """Branches so far."""
        return len(self._branches)

    def prepare(
        self,
        messages: Sequence[Message],
        tools: Schemas = (),
        max_tokens: int | None = None,
        retried: bool = False,
        stops: Sequence[str] = (),
        count: int = 1,
        json_schema: str | None = None,
    ) -> "list[Reply]":
        """Find or begin the branch of a request and append what is new in it; a reply for each choice.

        ``retried``: the client sends the request again because it got no answer; if the answer is recorded, it is
        given once more instead of sampling another one. ``stops``: texts that end the turn. ``count``: choices; each
        after the first one forks the first one's branch before its answer. ``json_schema``: what the answer fits.
        Images of ``messages`` have names.

        Raises:
            ContextLengthError: the new messages do not fit; nothing was appended, and ``exhausted`` is set.
            BranchLimitError: there are ``max_branches`` branches.
            TemplateError: the chat template refuses the messages.
            ImageError: there are more images than the run allows; nothing was appended.
        """
        wanted = [normalised(message) for message in messages]
        answered = self._answered(wanted, tools)[:count] if retried else []
        asked = self._unanswered(wanted, tools)[: count - len(answered)] if retried else []
        forked = False
        if missing := count - len(answered) - len(asked):
            branch, forked = self._continued(wanted, tools, missing)
            asked += [branch, *(self._twin(branch) for _ in range(missing - 1))]
        replies = [Reply(self, branch, self._number(branch), replay=True, stops=tuple(stops)) for branch in answered]
        params = self._params(max_tokens, stops, json_schema)
        for branch in asked:
            reply = Reply(self, branch, self._number(branch), params, forked, False, branch.owner, tuple(stops))
            branch.owner = reply
            replies.append(reply)
        return replies

    def _params(self, max_tokens: int | None, stops: Sequence[str], json_schema: str | None) -> dict[str, Any]:
        params = dict(self._sampling_params)
        if max_tokens is not None:
            params["max_tokens"] = min(max_tokens, params.get("max_tokens") or max_tokens)
        if stops:
            params["stop"] = [*(params.get("stop") or ()), *stops]
        if json_schema is not None:
            params["json_schema"] = json_schema
        return params

    def _number(self, branch: _Branch) -> int:
        return self._branches.index(branch)

    def _continued(self, wanted: list[Message], tools: Schemas, choices: int) -> tuple[_Branch, bool]:
        """The branch that the request extends, or a new one, and whether that is a fork."""
        branch = self._extended(wanted, tools)
        self._check_branches(choices - (branch is not None))
        if branch is None:
            forked = bool(self._branches)
            branch = self._begun(wanted, tools)
            self.forks += forked
            return branch, forked
        new = wanted[len(branch.recorded()) :]
        if new and not branch.trajectory.add_messages(new):
            self.exhausted = True
            raise ContextLengthError(
                f"the {len(new)} new messages do not fit: {branch.trajectory.remaining} tokens are left of "
                "rollout.max_response_length and of the context"
            )
        return branch, False

    def _twin(self, branch: _Branch) -> _Branch:
        """A branch with the same record, for another answer to the same request."""
        history = list(branch.recorded())
        twin = _Branch(branch.trajectory.fork(), branch.tools, history=history, told=dict(branch.told))
        self._branches.append(twin)
        return twin

    def _check_branches(self, more: int) -> None:
        if more and len(self._branches) + more > self._max_branches:
            raise BranchLimitError(
                f"this trajectory has {len(self._branches)} branches and the request needs {more} more, but "
                f"max_branches is {self._max_branches}: send the whole history unchanged with each "
                "request, ask for fewer choices (n), or raise max_branches of the agent loop openai_agent"
            )

    def _begun(self, wanted: list[Message], tools: Schemas) -> _Branch:
        trajectory = self._session.trajectory(wanted, tools=tools)
        if trajectory.remaining <= 0:
            self.exhausted = True
            raise ContextLengthError(
                f"the messages have {trajectory.num_tokens} tokens, and the context of the model leaves no room for an "
                "answer"
            )
        branch = _Branch(trajectory, list(tools))
        self._branches.append(branch)
        return branch

    def _extended(self, wanted: list[Message], tools: Schemas) -> _Branch | None:
        """The idle branch with the longest record that the request begins with, and that an answer may follow."""
        best = None
        for branch in self._branches:
            recorded = branch.recorded()
            fits = branch.owner is None and list(branch.tools) == list(tools) and wanted[: len(recorded)] == recorded
            # An answer after an answer would be a second sample of the same turn: a fork.
            answers = len(wanted) > len(recorded) or branch.last_turn is None
            if fits and answers and (best is None or len(recorded) > len(best.recorded())):
                best = branch
        return best

    def _unanswered(self, wanted: list[Message], tools: Schemas) -> list[_Branch]:
        """The branches that are at work on the very same request: who asks again has given the first one up."""
        same = [branch for branch in self._branches if list(branch.tools) == list(tools)]
        return [branch for branch in same if branch.owner is not None and branch.recorded() == wanted]

    def _answered(self, wanted: list[Message], tools: Schemas) -> list[_Branch]:
        same = [branch for branch in self._branches if list(branch.tools) == list(tools)]
        return [branch for branch in same if branch.last_turn is not None and branch.recorded()[:-1] == wanted]

    def finish(self, termination: Termination) -> list[AgentLoopOutput]:
        """The rows of all branches.

        Raises what the last request failed with, if no later one succeeded: the trajectory failed with it. So it does
        after a request that the engine aborted: half an answer is in the record.
        """
        failure = self.aborted or self.failure
        if failure is not None:
            raise failure
        outputs: list[AgentLoopOutput] = []
        for branch in self._branches:
            finished = branch.trajectory.finish(termination)
            outputs += finished if isinstance(finished, list) else [finished]
        for output in outputs:
            output.metrics["endpoint_forks"] = float(self.forks)
        return outputs


@dataclass
class Reply:
    """One request whose messages are recorded and whose answer is still to be sampled."""

    conversation: Conversation
    branch: _Branch
    number: int
    sampling_params: dict[str, Any] = field(default_factory=dict)
    forked: bool = False
    replay: bool = False
    supersedes: "Reply | None" = None
    stops: tuple[str, ...] = ()
    _task: "asyncio.Task[Any] | None" = None

    async def generate(self) -> Completion:
        """Sample the answer. A cancelled call leaves the messages recorded and no answer: asking again continues."""
        trajectory = self.branch.trajectory
        self._task = asyncio.current_task()
        if self.supersedes is not None and (earlier := self.supersedes._task) is not None:
            earlier.cancel()
            await asyncio.wait({earlier})
        if self.replay:
            assert self.branch.last_turn is not None, "only an answered branch is replayed"
            turn = self.branch.last_turn
            before = trajectory.num_tokens - len(turn.token_ids)
            return Completion(turn, before, self.number, replayed=True, stop=self._stop_of(turn))
        self.branch.last_turn = None
        try:
            prompt_tokens = trajectory.num_tokens
            turn = await trajectory.generate(self.sampling_params)
        except Exception as error:
            self.conversation.failure = error
            raise
        finally:
            self.release()
        if turn.finish_reason == "abort":
            self.conversation.aborted = EngineError("the engine aborted a request of this conversation")
            raise self.conversation.aborted
        self.conversation.failure = None
        if turn.finish_reason == "length" and trajectory.remaining <= 0:
            self.conversation.exhausted = True
        completion = Completion(turn, prompt_tokens, self.number, self.forked, stop=self._stop_of(turn))
        if turn.token_ids:
            self.branch.last_turn = turn
            self.branch.told[len(trajectory.messages) - 1] = completion.text
        return completion

    def _stop_of(self, turn: Turn) -> str | None:
        """The first of the stop texts in what the policy said."""
        return min((stop for stop in self.stops if stop in turn.content), key=turn.content.index, default=None)

    def release(self) -> None:
        """Let other requests have the branch; may be called twice."""
        if self.branch.owner is self:
            self.branch.owner = None


def normalised(message: Mapping[str, Any]) -> Message:
    """A message as it is rendered and compared: text as one string, decoded arguments, no empty fields."""
    known = {key: value for key, value in message.items() if value is not None and value != [] and value != {}}
    if known.get("role") == "developer":
        known["role"] = "system"
    known["content"] = _normalised_content(message.get("content"))
    if "tool_calls" in known:
        known["tool_calls"] = [_normalised_call(call) for call in known["tool_calls"]]
    return known


def _normalised_content(content: Any) -> Any:
    """Texts in a row as one, and nothing but a text where there is no image."""
    if not isinstance(content, list):
        return "" if content is None else content
    parts: list[str | dict[str, Any]] = []
    for part in content:
        if part.get("type") != "text":
            parts.append(part)
        elif parts and isinstance(parts[-1], str):
            parts[-1] += part["text"]
        else:
            parts.append(part["text"])
    return content_of(parts)


def _normalised_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    return {
        "type": "function",
        "function": {"name": function.get("name"), "arguments": decoded(function.get("arguments"))},
        "id": call.get("id"),
    }


def decoded(arguments: Any) -> Any:
    """Arguments of a call as an object; a client sends them as a JSON text. Other text stays as it is."""
    if isinstance(arguments, str):
        try:
            return json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
    return arguments
