"""The interfaces of reward functions and reward managers.

A reward function scores one trajectory; a reward manager combines functions, tool rewards and turn scores into the
one number that is trained. Both see the typed :class:`RewardTrajectory`. An exception, a deadline or a value that is
not a finite number is a ``reward_error`` of that trajectory, never a silent zero.

Both are built once per reward worker and called as each trajectory ends, many concurrently on one event loop: a
function that is a coroutine must not block it; a plain one runs inline, or where it declares
``isolation = "process"`` (a function from a file by default) in its own process, one call at a time, killed when the
deadline passes.

    def exact(trajectory: RewardTrajectory) -> float:
        return float(trajectory.model_text.strip() == trajectory.ground_truth)

A plain function like this one is a reward function as it is (``name: ./reward.py:exact``); a packaged one has a
factory ``(config, RewardFunctionContext) -> RewardFunction``.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentrl_core.api.engine_client import Engines


@dataclass(frozen=True)
class RewardTrajectory:
    """A finished trajectory as a reward sees it.

    Args:
        messages: the conversation, system prompt and tool messages included.
        model_text: what the policy wrote, all turns, nothing else.
        last_text: what the policy wrote in its last turn.
        full_text: everything after the prompt: tool and user text too.
        ground_truth: ``reward_model.ground_truth`` of the row, None if it has none.
        data_source: of the row.
        extra_info: of the row.
        tool_rewards, turn_scores: as collected by the session, in order; those of an environment are in
            ``environment`` instead.
        tool_reward_names: the tool of each of ``tool_rewards``; empty if the loop set those itself.
        tool_reward_turns, turn_score_turns: the turn of the policy, from 0, that earned each of them; empty if the loop
            set those itself.
        num_turns: as in ``AgentLoopOutput``.
        environment: what the row's environment gave, its calls and replies included; None without one.
        sampled_tokens: number of tokens that the policy sampled, all turns; 0 in records of runs that did not keep it.
        termination: a value of ``Termination``.
        row: all other fields of the dataset row.
        agent: whose part of the trajectory this is, where several agents act.
        token_rows: prompt ids, response ids and response mask of each row of the trajectory, as in ``AgentLoopOutput``.
        images: the files, PNG or JPEG, of the images in ``messages``, by name: that of the part
            ``{"type": "image", "image": name}``.
    """

    messages: Sequence[Mapping[str, Any]]
    model_text: str
    last_text: str
    full_text: str
    ground_truth: Any = None
    data_source: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    tool_rewards: Sequence[float] = ()
    turn_scores: Sequence[float] = ()
    num_turns: int = 0
    termination: str = "completed"
    row: Mapping[str, Any] = field(default_factory=dict)
    tool_reward_names: Sequence[str] = ()
    tool_reward_turns: Sequence[int] = ()
    turn_score_turns: Sequence[int] = ()
    sampled_tokens: int = 0
    environment: "RewardResult | None" = None
    agent: str = ""
    token_rows: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]] = ()
    images: Mapping[str, bytes] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class RewardResult:
    """A score, with details.

    Args:
        score: everything that the trajectory earned, ``turn_rewards`` and ``token_rewards`` included. The rest of it,
            the outcome, stands on the last sampled token. So does what turns and tokens earned that are not trained:
            their row is recorded only, or the template rewrote history.
        metrics: averaged and logged under ``reward/``.
        components: the parts that the score is made of, by name and not weighted; logged like metrics, and given to
            advantage estimators with the capability ``components``.
        turn_rewards: what each turn of the policy earned, in order; turns at the end may be left out. Each stands on
            the last token of its turn.
        token_rewards: what each token that the policy sampled earned, in order, over all rows of the trajectory; empty
            or one number for each.
        answer: what the policy answered, in a form in which equal answers are equal texts: majority votes of a
            validation (``maj_at_<k>``) count it.
    """

    score: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    components: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: Sequence[float] = ()
    token_rewards: Sequence[float] = ()
    answer: str | None = None


@dataclass(frozen=True)
class RewardFunctionContext:
    """What a reward function gets when it is built.

    Args:
        name: the name under which the run knows it.
        engines: clients of the configured engines, by name; none in a child process.
        check_only: the object is built to report what cannot work, before a run starts or for a process that builds
            its own, and is never called: load no weights.
    """

    name: str
    engines: Engines = field(default_factory=Engines)
    check_only: bool = False


class RewardFunction(Protocol):
    """Scores one trajectory. May be a coroutine function. Attribute ``isolation``: see ``Tool.isolation``."""

    def __call__(self, trajectory: RewardTrajectory) -> Any:
        """A number, a bool or a :class:`RewardResult` (or an awaitable of one)."""


class BoundRewardFunction(Protocol):
    """A configured function as a manager sees it: deadline, isolation and checks are already around it."""

    name: str
    weight: float

    async def __call__(self, trajectory: RewardTrajectory) -> RewardResult:
        """Score one trajectory.

        Raises:
            RewardError: the function raised, passed its deadline, or returned what is not a finite number.
        """


@dataclass(frozen=True)
class RewardManagerContext:
    """What a reward manager gets when it is built.

    Args:
        functions: the configured functions, in order.
        loops_reward: an agent loop has the capability ``rewards``. The manager scores only the trajectories for which
            the loop returns no reward.
    """

    functions: Sequence[BoundRewardFunction]
    loops_reward: bool = False


class RewardManager(ABC):
    """Turns a trajectory into its reward. Built once per reward worker."""

    def __init__(self, config: Any, context: RewardManagerContext) -> None:
        self.config = config
        self.context = context

    @abstractmethod
    async def score(self, trajectory: RewardTrajectory) -> RewardResult:
        """Score one trajectory, as soon as it has ended."""

    async def score_group(
        self, trajectories: Sequence[RewardTrajectory], results: Sequence[RewardResult]
    ) -> Sequence[RewardResult]:
        """Revise the scores of all samples of one prompt; called only with the capability ``group``."""
        return results
