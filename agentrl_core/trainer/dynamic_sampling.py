"""Replaces prompts whose samples all have the same reward, which give no gradient.

DAPO, arXiv 2503.14476, section 3.2.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

from agentrl_core.api import RolloutError
from agentrl_core.rollout.results import TrajectoryResult

More = Callable[[int, int], list[TrajectoryResult]]
"""Trajectories of further prompts, given the round, from 1, and the number of prompts."""


def fill(step: int, results: list[TrajectoryResult], rounds: int, more: More) -> list[TrajectoryResult]:
    """Sample further prompts until as many groups have a signal as there are groups in ``results``.

    Args:
        step: for the message.
        results: of the step's prompts.
        rounds: most rounds of further prompts.
        more: samples them.

    Returns:
        All trajectories. Those of groups without signal are marked ``replaced``, those of further prompts ``further``.

    Raises:
        RolloutError: after the last round the batch is not full.
    """
    everything, wanted = list(results), len(_prompts(results))
    missing = mark_replaced(results)
    for number in range(1, rounds + 1):
        if not missing:
            break
        further = more(number, missing)
        for result in further:
            result.further = True
        everything += further
        missing = mark_replaced(further)
    if missing:
        raise RolloutError(
            f"step {step}: only {wanted - missing} of {wanted} prompts have samples with different rewards after "
            f"{rounds} rounds of further prompts. The task is too easy or too hard for the policy, or the reward is "
            "constant: raise rollout.resample_rounds or rollout.n, or set rollout.resample_rounds=0"
        )
    return everything


def mark_replaced(results: Sequence[TrajectoryResult]) -> int:
    """Mark the trajectories of prompts without signal; returns the number of these prompts."""
    silent = [group for group in _prompts(results).values() if not _has_signal(group)]
    for group in silent:
        for result in group:
            result.replaced = True
    return len(silent)


def _prompts(results: Sequence[TrajectoryResult]) -> dict[str, list[TrajectoryResult]]:
    groups: dict[str, list[TrajectoryResult]] = defaultdict(list)
    for result in results:
        groups[result.prompt].append(result)
    return groups


def _has_signal(samples: Sequence[TrajectoryResult]) -> bool:
    """Whether an agent has different rewards in the samples of a prompt."""
    rewards: dict[str, set[float]] = defaultdict(set)
    for result in samples:
        if result.status.counts and result.reward is not None:
            rewards[result.row["uid"]].add(result.reward.score)
    return any(len(scores) > 1 for scores in rewards.values())
