"""Updates that changed nothing because no gradient was finite."""

import logging
from collections.abc import Mapping

from agentrl_core.api import WorkerError

logger = logging.getLogger(__name__)


class SkippedUpdates:
    """Warns when an update skips every optimizer step, and stops the run after several such updates in a row.

    An update that had nothing to train counts neither way.

    Args:
        role: ``actor`` or ``critic``.
        limit: ``<role>.max_skipped_updates``.
        policy: for messages, where there are several.
    """

    def __init__(self, role: str, limit: int, policy: str = "") -> None:
        self._role = role
        self._whose = f"the {role}'s" if not policy else f"policy {policy!r}'s"
        self._limit = limit
        self._in_a_row = 0

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """Look at the metrics of an update.

        Raises:
            WorkerError: it is the last one that ``<role>.max_skipped_updates`` allows.
        """
        role, skipped = self._role, int(metrics.get(f"{self._role}/skipped_steps", 0))
        if f"{role}/grad_norm" in metrics:
            self._in_a_row = 0
        elif skipped:
            self._in_a_row += 1
            message = (
                f"step {step}: {self._whose} weights did not change, because the gradients of all its {skipped} "
                f"optimizer steps were infinite or NaN. Look at reward/max and critic/advantages/max: scale the "
                f"rewards down, or lower {role}.optimizer.lr"
            )
            if self._in_a_row >= self._limit:
                raise WorkerError(
                    f"{message}. This was update number {self._in_a_row} in a row; {role}.max_skipped_updates="
                    f"{self._limit}"
                )
            if self._in_a_row == 1:
                logger.warning("%s", message)
