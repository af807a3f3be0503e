"""What a run has shown so far, as far as a person watching it needs it."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl_trackers_basic.metrics import PHASE_LABELS, Accuracy, is_number, validation_accuracies

REWARD = "reward/mean"
LENGTH = "response_length/mean"
TOOL_SHARE = "rollout/tool_call_share"
SPEED = "perf/tokens_per_second"
TOKENS = "rollout/sampled_tokens"
FAILED = "rollout/failed_fraction"
TOOL_FAILURES = "rollout/tool_failures"
_SUMMED = (TOKENS, FAILED, TOOL_FAILURES)
_SERIES = (REWARD, LENGTH, TOOL_SHARE, SPEED)


@dataclass
class Progress:
    """Series for the curves, the newest value of every metric, and the time that is left.

    Args:
        run_name: shown in the title.
        total_steps: of the whole run.
        started: seconds of the clock whose readings :meth:`add` gets.
    """

    run_name: str
    total_steps: int
    started: float
    overlaps: bool = False
    """Trajectories are sampled while the trainer trains."""
    step: int = 0
    now: float = 0.0
    latest: dict[str, float] = field(default_factory=dict)
    """The metrics of the newest step."""
    series: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in _SERIES})
    accuracies: dict[Accuracy, list[tuple[int, float]]] = field(default_factory=dict)
    """``(step, accuracy)`` of every validation."""
    rewards: list[tuple[int, float]] = field(default_factory=list)
    """``(step, mean reward)`` of every step."""
    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SUMMED, 0.0))
    """Sums over all steps: of sampled tokens, of the share of failed trajectories, of failed calls a trajectory."""
    activity: str = ""
    """The phase that goes on within the step."""
    done: int = 0
    total: int = 0
    """Trajectories of this phase, or since none was under way: those that have ended, and all."""
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=10))

    def __post_init__(self) -> None:
        self.now = self.started

    def remember(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take a step into the series, without a reading of the clock: history of a resumed run."""
        self.step = step
        for name in _SERIES:
            value = metrics.get(name)
            if is_number(value):
                self.series[name].append(float(value))
        for name in _SUMMED:
            value = metrics.get(name)
            self.totals[name] += value if is_number(value) else 0.0
        if is_number(metrics.get(REWARD)):
            self.rewards.append((step, float(metrics[REWARD])))
        for accuracy, value in validation_accuracies(metrics).items():
            self.accuracies.setdefault(accuracy, []).append((step, value))

    def add(self, step: int, metrics: Mapping[str, float], now: float) -> None:
        """Take a step that has just ended."""
        self.remember(step, metrics)
        self.report("")
        self.activity = ""
        self.latest = {name: float(value) for name, value in metrics.items() if is_number(value)}
        if step > 0:
            # What came before the first step of this process is start-up, not a step.
            own = self.latest.get("timing/step")
            self._durations.append(now - self.now if self._durations or own is None else own)
        self.now = now

    def report(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Take what ``Tracker.progress`` says. Where both overlap, a phase of training says nothing of trajectories."""
        self.activity = phase or self.activity
        if total or not self.overlaps:
            self.done, self.total = done, total

    @property
    def lanes(self) -> list[tuple[str, str]]:
        """What rollout and training do, or wait for; empty where one follows the other."""
        if not self.overlaps:
            return []
        under_way = self.total - self.done
        rollout = f"{under_way} trajectories under way" if under_way else "waits for the trainer"
        label = PHASE_LABELS.get(self.activity, "")
        return [
            ("rollout", rollout),
            ("training", "waits for a batch" if label == "rollout" else label or "between steps"),
        ]

    @property
    def going_on(self) -> str:
        """What happens within the step: ``rollout, 12 of 64 trajectories``."""
        if self.overlaps:
            return ", ".join(f"{lane}: {text}" for lane, text in self.lanes) if self.activity else ""
        label = PHASE_LABELS.get(self.activity, "")
        return f"{label}, {self.done} of {self.total} trajectories" if label and self.total else label

    @property
    def elapsed(self) -> float:
        """Seconds from the start to the newest step."""
        return self.now - self.started

    @property
    def remaining(self) -> float | None:
        """Seconds that the steps to come will take, at the pace of the last ten; None before the first step."""
        if not self._durations:
            return None
        return sum(self._durations) / len(self._durations) * max(0, self.total_steps - self.step)
