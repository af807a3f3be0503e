"""Where the trajectories of a step come from: sampled and waited for, one batch after the other."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

from agentrl_core.config import ResolvedConfig
from agentrl_core.data.rows import PromptBatch
from agentrl_core.rollout.manager import AgentLoopManager
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.trainer.algorithm import add_baselines
from agentrl_core.trainer.checkpoint import Position
from agentrl_core.trainer.dynamic_sampling import fill
from agentrl_core.trainer.metrics import PhaseTimer
from agentrl_core.trainer.prompt_data import PromptData


class Rollouts:
    """Samples the prompts of each step, and waits for the last trajectory.

    Args:
        config: resolved.
        data: prompts.
        steps: of the whole run.
        manager: samples.
        timer: measures phases.
        ahead: called in another thread with groups that have ended while others run; computes what models add to them.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        data: PromptData,
        steps: int,
        manager: AgentLoopManager,
        timer: PhaseTimer,
        ahead: Callable[[Sequence[TrajectoryResult]], None] | None = None,
    ) -> None:
        self._config = config
        self._data = data
        self._steps = steps
        self._manager = manager
        self._timer = timer
        self._ahead = ahead

    def batch(self, step: int) -> list[TrajectoryResult]:
        """The trajectories of a step, each scored when it ends and then as part of its group.

        Groups without a signal are replaced if ``rollout.resample_rounds`` asks for it.

        Raises:
            RolloutError: too many failed, or too few groups have a signal.
        """
        results = self._sample(self._prompts(step, step))
        rounds = self._config.rollout.resample_rounds
        return fill(step, results, rounds, partial(self._sample_further, step)) if rounds else results

    def _prompts(self, step: int, drawn: int, split: str = "train") -> PromptBatch:
        rollout = self._config.rollout
        return PromptBatch.sampled(self._data.batch(drawn), step, split, rollout.n, asdict(rollout.sampling))

    def _sample(self, prompts: PromptBatch) -> list[TrajectoryResult]:
        with self._timer.phase("rollout"):
            results = self._manager.generate_sequences(prompts, self._ahead)
        with self._timer.phase("score"):
            self._manager.score_groups(results)
        if self._config.some_advantage_has("greedy_baseline"):
            with self._timer.phase("baseline"):
                add_baselines(results, self._manager.generate_sequences(prompts.greedy()))
        return results

    def _sample_further(self, step: int, number: int, prompts: int) -> list[TrajectoryResult]:
        """Trajectories of prompts that no step has: those of steps behind the last one."""
        drawn = self._steps + (step - 1) * self._config.rollout.resample_rounds + number
        further = self._prompts(step, drawn, f"train.{number}")
        self._data.drawn.pop(drawn)
        return self._sample(further.first(prompts))

    def trained(self, step: int, results: Sequence[TrajectoryResult]) -> None:
        """Tell the sampler how the prompts of a finished step ended."""
        rewards: list[list[float]] = [[] for _ in range(self._config.data.batch_size)]
        for result in results:
            if not result.further:
                rewards[result.row["prompt_index"]] += scores([result])
        self._data.update(step, rewards)

    def before_weights(self) -> None:
        """Called before the engines get new weights."""

    def weights_changed(self, version: int) -> None:
        """Called when the engines have the weights of this version."""

    def metrics(self, pause: float) -> dict[str, float]:
        """Of the last batch, beyond those of any.

        Args:
            pause: seconds for which requests stood still for new weights.
        """
        return {}

    def report(self) -> list[str]:
        """Lines for a person, at the end of the run."""
        return []

    @property
    def position(self) -> Position | None:
        """What a checkpoint must keep in addition to the number of finished steps."""
        return None


def scores(results: Sequence[TrajectoryResult]) -> list[float]:
    """Rewards of the trajectories that count."""
    return [result.reward.score for result in results if result.status.counts and result.reward is not None]
