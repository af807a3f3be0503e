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
    everything, wanted = list(results), len(_groups(results))
    missing = _mark_replaced(results)
    for number in range(1, rounds + 1):
        if not missing:
            break
        further = more(number, missing)
        for result in further:
            result.further = True
        everything += further
        missing = _mark_replaced(further)
    if missing:
        raise RolloutError(
            f"step {step}: only {wanted - missing} of {wanted} prompts have samples with different rewards after "
            f"{rounds} rounds of further prompts. The task is too easy or too hard for the policy, or the reward is "
            "constant: raise rollout.resample_rounds or rollout.n, or set rollout.resample_rounds=0"
        )
    return everything


def _mark_replaced(results: Sequence[TrajectoryResult]) -> int:
    """Mark the trajectories of groups without signal; returns the number of these groups."""
    silent = [group for group in _groups(results).values() if len(_rewards(group)) < 2]
    for group in silent:
        for result in group:
            result.replaced = True
    return len(silent)


def _groups(results: Sequence[TrajectoryResult]) -> dict[str, list[TrajectoryResult]]:
    groups: dict[str, list[TrajectoryResult]] = defaultdict(list)
    for result in results:
        groups[result.row["uid"]].append(result)
    return groups


def _rewards(group: Sequence[TrajectoryResult]) -> set[float]:
    return {result.reward.score for result in group if result.termination.trained and result.reward is not None}
