"""The interface of samplers: which prompts a step trains on.

The factory ``(config, SamplerContext) -> PromptSampler`` is called once, in the trainer's process, before any worker
starts; all calls come from one thread. Methods are plain ones, never coroutines.

``batch`` must depend on the context, the step and what ``state_dict`` holds, and on nothing else: a resumed run then
trains on the prompts that an uninterrupted one would have trained on. Draw random numbers from
``numpy.random.default_rng([context.seed, step])``, for example.

    class EveryOther(PromptSampler):
        def __init__(self, config, context):
            self.context = context

        def batch(self, step):
            first, size = (step - 1) * self.context.batch_size, self.context.batch_size
            return [2 * position % len(self.context.rows) for position in range(first, first + size)]
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SamplerContext:
    """What a sampler gets when it is built.

    Args:
        rows: the training rows that fit, at least one.
        batch_size: prompts of one step; may exceed the number of rows.
        seed: of the run.
        reward_range: lowest and highest weighted sum of the reward functions; None unless all declare their ``range``.
    """

    rows: Sequence[Mapping[str, Any]]
    batch_size: int
    seed: int
    reward_range: tuple[float, float] | None = None


@dataclass(frozen=True)
class PromptOutcome:
    """How the trajectories of one prompt ended.

    Args:
        row: number of the prompt's row.
        rewards: of its trajectories that were scored; empty if the infrastructure failed for all of them.
    """

    row: int
    rewards: Sequence[float]


class PromptSampler(ABC):
    """Chooses the rows of each step."""

    @abstractmethod
    def batch(self, step: int) -> Sequence[int]:
        """Return the row numbers of step ``step`` (from 1), ``context.batch_size`` of them. May be called repeatedly
        for one step."""

    def update(self, step: int, outcomes: Sequence[PromptOutcome]) -> None:  # noqa: B027 - optional
        """Learn from a finished step, one outcome per prompt in the order of ``batch(step)``. By default: nothing."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep, as JSON values. By default: nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - optional
        """Restore what :meth:`state_dict` returned; called before the first ``batch`` of a resumed run."""
