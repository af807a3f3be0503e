"""The interface of environments: tasks, tools, answers and scores in one plugin.

The factory ``(config, EnvironmentContext) -> Environment`` is called once in each agent-loop worker and once in the
trainer's process, which reads ``tasks`` before any worker starts and opens the first task as a trial. A worker calls
``open`` for each trajectory. What it returns, an :class:`Episode`, lives for that trajectory alone and is always
closed, also after a cancellation.

    class Parity(Environment):
        def tasks(self, split):
            return [{} for _ in range(1000 if split == "train" else 50)]

        async def open(self, task, seed):
            return Question(seed % 100)


    class Question(Episode):
        def __init__(self, number):
            self.number = number
            self.messages = [{"role": "user", "content": f"Is {number} even or odd?"}]

        async def score(self, trajectory):
            return float(("odd" if self.number % 2 else "even") in trajectory.last_text)

All coroutines run on the worker's event loop, so blocking work belongs into a thread. Calls of one episode never
overlap, and each has the slot's ``timeout``. What ``call`` raises is an observation that the model reads; what
``reply`` raises ends the trajectory with ``env_error``, and it is trained. What ``open`` or ``score`` raises, and an
error of an engine from ``context.engines`` in ``reply``, fails the attempt, which starts again from a fresh episode.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl_core.api.dataset import Split
from agentrl_core.api.engine_client import Engines
from agentrl_core.api.interaction import InteractionTurn
from agentrl_core.api.reward import RewardResult, RewardTrajectory
from agentrl_core.api.tool import ToolResult


@dataclass(frozen=True)
class EnvironmentContext:
    """What an environment gets when it is built.

    Args:
        name: the name under which the run knows it.
        seed: of the run.
        engines: clients of the configured engines, by name.
        shows_images: the model can be shown images.
    """

    name: str
    seed: int = 0
    engines: Engines = field(default_factory=Engines)
    shows_images: bool = False


class Episode(ABC):  # noqa: B024 - messages is what a subclass must have
    """One task under way. Every method has a default: an episode without ``call`` and ``reply`` is a question.

    Attributes:
        messages: the conversation that the policy answers first; at least one message, its content text, or a list of
            parts with images.
        tools: OpenAI function schemas of the tools that the episode offers.
        agent: who answers ``messages``, where several agents act; the loop ``multi_agent`` plays them.
    """

    messages: Sequence[dict[str, Any]] = ()
    tools: Sequence[dict[str, Any]] = ()
    agent: str = ""

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Run one tool call. ``done`` of the result ends the trajectory. May raise: the model reads the error."""
        raise NotImplementedError(f"{type(self).__name__} offers the tool {name!r}, but has no method `call`")

    async def reply(self, messages: Sequence[dict[str, Any]]) -> InteractionTurn:
        """Answer the conversation so far, whose last message is a turn of the policy without a tool call.

        By default the trajectory ends. Where several agents act, ``messages`` are those that the agent of this turn has
        seen, the reward is its own, and ``agent`` of the answer names who is next.
        """
        return InteractionTurn(terminate=True, text="")

    async def score(self, trajectory: RewardTrajectory) -> RewardResult | float:
        """Score the finished trajectory, in addition to the rewards of its calls and replies.

        A :class:`RewardResult` names the parts in ``components``. Called once, before :meth:`close`; where several
        agents act, once for each that had a turn, with its part of the trajectory and its name in ``trajectory.agent``.
        """
        return 0.0

    async def close(self) -> None:  # noqa: B027 - optional
        """Release what the episode holds. Called once, whatever went before."""


class Environment(ABC):
    """Lists tasks and opens them.

    Attributes:
        scores: False: episodes neither score nor reward, so the run needs a reward function.
    """

    scores: bool = True

    def __init__(self, config: Any, context: EnvironmentContext) -> None:
        self.config = config
        self.context = context

    def tasks(self, split: Split) -> Sequence[Mapping[str, Any]] | None:
        """The tasks of a split: dicts of JSON values, by index; the same every time.

        Keys of dataset rows have their meaning there too (``data_source``, ``agent_name``, ``extra_info``). None: the
        tasks are the rows of the data files that name this environment, or no environment at all.
        """
        return None

    @abstractmethod
    async def open(self, task: Mapping[str, Any], seed: int) -> Episode:
        """Begin a task.

        The same task and seed must give the same episode: the samples of a prompt are compared with each other. In
        training each step brings other seeds, in validation a prompt always has the same one. ``seed`` is in
        [0, 2^63).
        """

    async def close(self) -> None:  # noqa: B027 - optional
        """Release what all episodes share. Called once, when no trajectory runs any more."""
