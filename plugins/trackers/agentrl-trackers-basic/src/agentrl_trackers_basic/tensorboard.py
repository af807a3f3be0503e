"""Metrics as TensorBoard event files in the run's ``tensorboard/``, through ``torch.utils.tensorboard``."""

from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from agentrl_core.api import NoConfig, Tracker, TrackerContext


class TensorboardTracker(Tracker):
    """One scalar per metric and step. A resumed run hides the steps that it repeats."""

    def __init__(self, config: NoConfig, context: TrackerContext) -> None:
        super().__init__(config, context)
        purge_step = context.first_step if context.first_step > 1 else None
        log_dir = str(context.run_dir / "tensorboard")
        self._writer = SummaryWriter(log_dir, purge_step=purge_step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def finish(self, status: str) -> None:
        self._writer.close()
