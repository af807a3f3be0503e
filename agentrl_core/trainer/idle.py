"""What trainer and rollout waited for in a run that samples while it trains, and what would help most."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import attrgetter

from agentrl_core.api.tree import Span
from agentrl_core.rollout.results import TrajectoryResult

MOST_ENDED = 0.9
"""Once this share of a batch has ended, the trainer waits for its slowest trajectory; before that, for the engines."""
ENGINES, NOTHING_RUNS = "engines", "trainer"


def activities(results: Iterable[TrajectoryResult]) -> list[Span]:
    """What the trajectory that ended last did, and when: ``generate``, ``tool <name>``, or a kind of its waits."""

    def of(result: TrajectoryResult) -> list[Span]:
        found = list(result.waits)
        for node in result.tree.nodes:
            if node.request is not None:
                found.append(Span("generate", node.request.start, node.request.seconds))
            found += [Span(f"tool {call.name}", call.start, call.seconds) for call in node.calls]
        return found

    def end(spans: Sequence[Span]) -> float:
        return max((span.start + span.seconds for span in spans), default=0.0)

    return max((of(result) for result in results), key=end, default=[])


class IdleTime:
    """Adds up seconds by cause."""

    def __init__(self) -> None:
        self._trainer: dict[str, float] = defaultdict(float)
        self._rollout: dict[str, float] = defaultdict(float)
        self._taken: dict[str, float] = {}
        self._idle_since: float | None = None
        self._begun: float | None = None
        self._last = 0.0

    def trainer_waited(
        self,
        begun: float,
        end: float,
        groups: Sequence[tuple[float, Sequence[Span]]],
        worked: Sequence[tuple[float, float]] = (),
    ) -> None:
        """The trainer waited for a batch.

        Args:
            begun, end: Unix times.
            groups: of the batch: when each ended, and :func:`activities`.
            worked: from when to when it computed something meanwhile.
        """

        def idle(start: float, until: float) -> float:
            busy = sum(max(min(until, last) - max(start, first), 0.0) for first, last in worked)
            return max(until - start - busy, 0.0)

        self._begun = begun if self._begun is None else self._begun
        self._last = end
        order = sorted(groups, key=lambda group: group[0])
        # At least one is the slowest, in a small batch too.
        slowest = max(1, math.ceil(round((1 - MOST_ENDED) * len(order), 6)))
        most = order[-1 - slowest][0] if len(order) > slowest else begun
        turning = min(max(most, begun), end)
        self._trainer[ENGINES] += idle(begun, turning)
        left = idle(turning, end)
        for kind, start, seconds in sorted(order[-1][1], key=attrgetter("start"), reverse=True) if order else ():
            overlap = min(idle(max(start, turning), min(start + seconds, end)), left)
            if overlap > 0:
                self._trainer[kind] += overlap
                left -= overlap
        self._trainer["other"] += left

    def running(self, is_any: bool, now: float) -> None:
        """Whether a group is under way from now on."""
        self._last = now
        if self._idle_since is not None:
            self._rollout[NOTHING_RUNS] += now - self._idle_since
        self._idle_since = None if is_any else now

    def paused(self, seconds: float) -> None:
        """The engines stood still for new weights."""
        self._rollout["weights"] += seconds

    def take(self, now: float) -> dict[str, float]:
        """Seconds from the last call until now, as metrics."""
        if self._idle_since is not None:
            self.running(False, now)
        all_so_far = {f"idle/trainer/{_name(cause)}": seconds for cause, seconds in self._trainer.items()}
        all_so_far |= {f"idle/rollout/{cause}": seconds for cause, seconds in self._rollout.items()}
        metrics = {name: seconds - self._taken.get(name, 0.0) for name, seconds in all_so_far.items()}
        self._taken = all_so_far
        return metrics

    def report(self, depth: int, most: int) -> list[str]:
        """The table, and a line with the one change that would help most; empty before the first batch."""
        if self._begun is None:
            return []
        whole = max(self._last - self._begun, 1e-9)
        rows = [("trainer", cause, seconds) for cause, seconds in self._trainer.items()]
        rows += [("rollout", cause, seconds) for cause, seconds in self._rollout.items()]
        rows = sorted((row for row in rows if row[2] >= 0.005 * whole), key=lambda row: -row[2])
        lines = [
            f"  {who}  {seconds:8.1f} s  {seconds / whole:5.1%}  for {_words(cause)}" for who, cause, seconds in rows
        ]
        if not rows:
            return ["neither trainer nor rollout waited for the other"]
        who, cause, _ = rows[0]
        return [f"waited, of {whole:.1f} s:", *lines, f"what would help most: {_advice(who, cause, depth, most)}"]


def _name(cause: str) -> str:
    return cause.replace(" ", "_")


_WORDS = {
    ENGINES: "the engines",
    "generate": "the slowest trajectory, which was being generated",
    "reward": "the slowest trajectory, which was being scored",
    "other": "the slowest trajectory, in its agent loop",
    NOTHING_RUNS: "the trainer",
    "weights": "new weights",
}


def _words(cause: str) -> str:
    return _WORDS.get(cause, f"the slowest trajectory, in {cause}")


def _advice(who: str, cause: str, depth: int, most: int) -> str:
    deeper = f"rollout.pipeline_depth={depth + 1}" if depth < most else f"rollout.max_staleness={most + 1}"
    if who == "rollout":
        if cause == "weights":
            return "a faster transport of weights (rollout.engine.weight_transfer)"
        return "fewer engine replicas or more training processes: the trainer is the slower of the two"
    if cause == ENGINES:
        return "more engine replicas (rollout.engine.replicas): the engines are the slower of the two"
    if cause == "reward":
        return "more reward workers (reward.num_workers), or a faster reward"
    if cause.startswith("tool "):
        return f"a faster {cause}, or {deeper}: trajectories that wait for it hold up the trainer"
    return f"{deeper}: the trainer waits for the slowest trajectory of a batch"
