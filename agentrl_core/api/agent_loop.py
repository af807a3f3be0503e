"""The interface of agent loops: how one trajectory runs.

A loop's class is built once per worker with its :class:`AgentLoopContext`; ``run`` is one coroutine per trajectory.
It never fills token lists by hand: it drives a :class:`Trajectory`, which keeps ids, mask and log-probs equal in
length by construction and knows the budget.

    class OneShot(AgentLoopBase):
        async def run(self, sampling_params, *, session, raw_prompt, **row):
            trajectory = session.trajectory(raw_prompt)
            turn = await trajectory.generate(sampling_params)
            return trajectory.finish(turn.termination)

Ordinary exceptions may be raised: the worker classifies them, retries what is infrastructure, and always releases the
tools and interactions that the session opened.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from agentrl_core.api.engine import FinishReason
from agentrl_core.api.errors import ImageError
from agentrl_core.api.interaction import InteractionTurn
from agentrl_core.api.tool import ToolResponse
from agentrl_core.api.tool_parser import ToolCall, ToolParser

Message = dict[str, Any]
"""``{"role": …, "content": …}`` in the OpenAI chat format; assistants may carry ``tool_calls``."""

TruncationSide = Literal["left", "right", "middle"]


class Status(StrEnum):
    """What becomes of a trajectory."""

    TRAINED = "trained"
    EXCLUDED = "excluded"
    """It is recorded, and enters neither the loss nor the statistics of its group."""
    REPLACED = "replaced"
    """Another prompt is trained in its place; it enters the statistics."""
    FAILED = "failed"
    """The infrastructure failed: it starts again from a fresh state, and is excluded after the last attempt."""

    @property
    def counts(self) -> bool:
        """Whether it enters the statistics."""
        return self in (Status.TRAINED, Status.REPLACED)


class Termination(StrEnum):
    """Why a trajectory ended. Failure is data: it decides what is trained, retried or excluded."""

    COMPLETED = "completed"
    LENGTH = "length"
    MAX_TURNS = "max_turns"
    TOOL_ERROR = "tool_error"
    ENV_ERROR = "env_error"
    EPISODE_ERROR = "episode_error"
    ENGINE_ERROR = "engine_error"
    REWARD_ERROR = "reward_error"
    TIMEOUT = "timeout"
    ABORTED = "aborted"
    SKIPPED = "skipped"

    @property
    def status(self) -> Status:
        """What becomes of a trajectory that ends so."""
        return _STATUS.get(self, Status.TRAINED)


_STATUS = {
    Termination.EPISODE_ERROR: Status.FAILED, Termination.ENGINE_ERROR: Status.FAILED,
    Termination.REWARD_ERROR: Status.FAILED, Termination.TIMEOUT: Status.FAILED, Termination.ABORTED: Status.FAILED,
    Termination.SKIPPED: Status.EXCLUDED,
}  # fmt: skip


@dataclass
class AgentLoopOutput:
    """One finished row: what a loop returns, one or several (``trajectory_id`` ties those together).

    A loop gets it from :meth:`Trajectory.finish`; its tokens are then those of a path through the trajectory's tree.
    A row that a loop fills by hand becomes a separate path.

    Args:
        prompt_ids: ids before the first sampled token.
        response_ids: everything after the prompt: sampled, tool, user and template tokens.
        response_mask: 1 = sampled by the policy, 0 = everything else; as long as ``response_ids``.
        response_logprobs: log-probability of each id where mask is 1, 0.0 elsewhere; None if the engine has none.
        log_prob_settings: the different ``SamplingParams.log_prob_settings`` of the turns behind ``response_logprobs``.
            Only where they say one thing, the run's temperature, may the trainer reuse the log-probs as the policy's;
            empty: not known.
        termination: why the trajectory ended.
        trajectory_id: the same for all rows of one trajectory.
        agent: who sampled the row, where several agents act. Each agent is scored on its own, and compared with the
            same agent in the other samples of the prompt.
        trained: False: the row is recorded, and enters neither the loss nor the statistics of its group.
        num_turns: messages of user, assistant and tools in the conversation, the system prompt not counted.
        policy_versions: number of the weights that sampled each id, -1 where mask is 0.
        turn_ids: number of the agent's turn that sampled each id, from 0 over all rows, -1 where mask is 0. Of a row
            that is filled by hand, a turn begins where they change; empty: where the mask rises.
        reward_score: set by a loop only if it scores itself; otherwise by the reward manager.
        tool_rewards: set by a loop only if it collects rewards of tools itself; rewards then see these, and not what
            the session collected.
        tool_reward_names: the tool of each of ``tool_rewards``, if the loop knows it.
        turn_scores: the same, of interactions.
        messages: the conversation.
        prompt_text: the prompt, decoded with its special tokens.
        segments: the response in runs of equal mask, ``(mask, decoded text)``.
        turn_texts: what the policy wrote, turn by turn, stop tokens left out; rewards see it.
        full_text: everything after the first prompt, tool and user text included; rewards see it.
        error: why the trajectory ended, for terminations that are errors; the record shows it.
        metrics: finite numbers by name. The step's metrics hold the mean over the trajectories that name one, as
            ``loop/<name>``; several rows of one trajectory count once, with their mean.
        extra_fields: more objects of this row. Each key becomes a column of the training batch's
            ``non_tensor_batch`` (None in rows without it) and is kept in the rollout record.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None
    termination: Termination
    trajectory_id: str = ""
    agent: str = ""
    trained: bool = True
    log_prob_settings: list[dict[str, Any]] = field(default_factory=list)
    num_turns: int = 0
    policy_versions: list[int] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    reward_score: float | None = None
    tool_rewards: list[float] = field(default_factory=list)
    tool_reward_names: list[str] = field(default_factory=list)
    turn_scores: list[float] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    prompt_text: str = ""
    segments: list[tuple[int, str]] = field(default_factory=list)
    turn_texts: list[str] = field(default_factory=list)
    full_text: str = ""
    error: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    extra_fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """One turn of the policy.

    Args:
        token_ids: the sampled ids; empty where the budget was spent and nothing was requested.
        text: their decoded text without the stop token.
        finish_reason: ``stop`` | ``length`` | ``abort``.
        content: the text outside tool calls.
        tool_calls: calls that could be parsed, in order.
        parse_errors: one message for each call that could not, for the model to read.
        log_probs: of each sampled id, as in ``TokenOutput``; None if the engine has none.
    """

    token_ids: Sequence[int]
    text: str
    finish_reason: FinishReason
    content: str
    tool_calls: Sequence[ToolCall] = ()
    parse_errors: Sequence[str] = ()
    log_probs: Sequence[float] | None = None

    @property
    def termination(self) -> Termination:
        """How the trajectory ends if it ends with this turn."""
        if self.finish_reason == "abort":
            return Termination.ABORTED
        return Termination.LENGTH if self.finish_reason == "length" else Termination.COMPLETED


class Trajectory(ABC):
    """Builds the rows of one trajectory; obtained from :meth:`TrajectorySession.trajectory`."""

    messages: list[Message]
    """The conversation so far, the parsed assistant messages with their ``tool_calls`` included."""

    @property
    @abstractmethod
    def remaining(self) -> int:
        """Tokens left: the smaller of response budget and context."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Tokens so far, those of the prompt included."""

    @abstractmethod
    async def generate(self, sampling_params: Mapping[str, Any]) -> Turn:
        """Sample one turn and append it with mask 1.

        ``sampling_params`` may hold temperature, top_p, top_k, min_p, the penalties, logit_bias and json_schema of
        :class:`SamplingParams`, max_tokens, stop: texts that end the turn, and seed: in place of the run's seed, step
        and prompt; samples and turns still differ. With no budget left nothing is requested and the turn is empty with
        ``finish_reason`` ``length``. The stop token belongs to the policy, and so does a
        stop text: the turn ends with the token that completes it.

        Raises:
            PluginError: ``sampling_params`` holds something else.
        """

    @abstractmethod
    def add_messages(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> bool:
        """Append tool, user or system messages with mask 0, rendered by the chat template.

        Returns False, and appends nothing, if they do not fit: the trajectory should then finish with ``LENGTH``.
        Messages that fit exactly are kept.
        """

    @abstractmethod
    def fork(self) -> "Trajectory":
        """A second branch that shares everything so far. A turn before the fork is trained once, in the first row that
        has it; in the others it is part of the prompt."""

    @abstractmethod
    def finish(self, termination: Termination) -> AgentLoopOutput | list[AgentLoopOutput]:
        """The finished rows: one, or one per segment where the template was not append-only.

        It closes the branch.

        Raises:
            ProtocolError: the branch is closed already. So do the other methods; the trajectory fails.
        """


@dataclass(frozen=True)
class ToolOutcome:
    """One tool call, finished. ``message`` is ready for :meth:`Trajectory.add_messages`; with ``done`` it is the last
    one of the trajectory."""

    message: Message
    response: ToolResponse
    failed: bool = False
    done: bool = False


class TrajectorySession(ABC):
    """One trajectory's handle on the world: tools and a partner, opened once and always released.

    Both come from the configuration or from the row's environment; a loop sees no difference.
    """

    trajectory_id: str
    agent: str = ""
    """Whose turn it is, as the environment or the interaction said last; empty where only one agent acts. A loop that
    decides it by itself sets this before it generates: with several policies, the one that plays the agent samples."""
    fetch_images: bool = False
    """Whether a loop may fetch images that its clients name by http(s) address, see ``model.images.urls``."""
    max_images: int | None = None
    """Images of a conversation at most, see ``model.images.max_count``; None: nothing is known of it. A loop that gets
    images from clients counts them before it reads them."""

    @abstractmethod
    def trajectory(self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()) -> Trajectory:
        """Start the token record with these messages and tool schemas.

        Called again, it starts another branch of the same trajectory, with its own record.
        """

    @abstractmethod
    async def open_tools(self) -> list[dict[str, Any]]:
        """Create this row's tool instances, once; returns their schemas in the order of the config.

        Where ``need_tools_kwargs`` is set in a row's ``extra_info``, only the tools named in ``tools_kwargs``.
        """

    @abstractmethod
    async def call_tool(self, call: ToolCall) -> ToolOutcome:
        """Run one call within its deadline. An unknown tool, bad arguments, an exception or a deadline become an
        observation with ``failed`` set.

        Run several calls with :func:`~agentrl_core.api.concurrency.together`. Calls that still run when the loop has
        returned or raised are cancelled.

        Raises:
            ToolUnavailableError: what the tool needs failed, which is not the model's fault. Let it pass: the worker
                retries the trajectory.
            EngineError: the same, of an engine that the tool asked.
        """

    async def image(self, value: Any) -> dict[str, Any]:
        """The part of a message's content that shows an image, for :meth:`Trajectory.add_messages`.

        Args:
            value: bytes, a data URL, base64, a PIL image, an array [height, width, 3] of uint8, or the name of an
                image of the run.

        Raises:
            ImageError: it cannot be read or shown.
        """
        raise ImageError("this session shows no images")

    async def image_bytes(self, name: str) -> bytes:
        """The file of an image, for an agent that is given the row's prompt.

        Raises:
            ImageError: there is none of this name.
        """
        raise ImageError("this session shows no images")

    @abstractmethod
    async def open_interaction(self) -> bool:
        """Start this row's interaction, once; False if it has neither one (``extra_info.interaction_kwargs``) nor an
        environment."""

    @abstractmethod
    async def interact(self, messages: Sequence[Message]) -> InteractionTurn:
        """The interaction's answer to the conversation so far; its reward is recorded as a turn score."""


class ChatRenderer(ABC):
    """The model's tokenizer and chat template, the only way from messages to tokens."""

    @abstractmethod
    def render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, generation_prompt: bool = False
    ) -> str:
        """The conversation as text."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text; no special tokens are added, those in the text are recognised."""

    @abstractmethod
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ids."""

    def from_outside(self, message: Message) -> Message:
        """The message of a user, tool or environment as :meth:`encode` keeps it text: what looks like a control token
        in it becomes none. Messages of other roles come back as they are."""
        return message

    def image_tokens(self, name: str) -> int:
        """How many tokens an image takes.

        Args:
            name: in a message that the session has shown.
        """
        return 0

    @abstractmethod
    def truncate(self, text: str, max_tokens: int, side: TruncationSide) -> str:
        """At most ``max_tokens`` tokens of a text.

        ``left`` drops the left and keeps the tail, ``right`` drops the right and keeps the head, ``middle`` keeps
        both ends. A text that fits exactly is returned unchanged.
        """


@dataclass(frozen=True)
class AgentLoopContext:
    """What a loop gets when it is built.

    Args:
        renderer: tokenizer and chat template.
        tool_parser: the configured parser.
        tools: names of the configured tools' functions, in order.
        interactions: names of the configured interactions, in order.
        max_response_length: tokens after the prompt, all turns together.
        engine_capabilities: of the engine that samples.
    """

    renderer: ChatRenderer
    tool_parser: ToolParser | None
    tools: tuple[str, ...]
    interactions: tuple[str, ...]
    max_response_length: int
    engine_capabilities: frozenset[str] = frozenset()


class AgentLoopBase(ABC):
    """One way to run a trajectory. Built once per worker; ``run`` must not keep state between trajectories.

    Args:
        config: the plugin's own dataclass, validated.
        context: renderer, parser, limits.
    """

    def __init__(self, config: Any, context: AgentLoopContext) -> None:
        self.config = config
        self.context = context

    @abstractmethod
    async def run(
        self, sampling_params: dict[str, Any], *, session: TrajectorySession, raw_prompt: list[Message], **row: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Run one trajectory. ``row`` holds the other fields of the dataset row (``extra_info``, …)."""

    async def close(self) -> None:
        """End what the loop keeps running; called once, when no trajectory runs any more."""
        return None
