"""The interface of trackers: where metrics go.

The factory ``(config, TrackerContext) -> Tracker`` is called once, when the run's directory is there; then ``log`` once
a step, steps ascending, and ``finish`` once, however the run ends. Everything runs in the trainer's process, each
tracker in one thread of its own, for which the run waits: a slow tracker makes the step slower, and one that talks to a
network queues. Methods are plain ones, never coroutines. A call that raises, or has not returned after two minutes, is
reported once and disables the tracker; the run continues. Metrics are Python floats by name.

    class Memory(Tracker):
        def __init__(self, config, context):
            super().__init__(config, context)
            self.rows = []

        def log(self, metrics, step):
            self.rows.append((step, dict(metrics)))
"""

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl_core.api.hooks import EndedTrajectory
from agentrl_core.api.message_parts import text_of


@dataclass(frozen=True)
class TrackerContext:
    """What a tracker gets when it is built.

    Args:
        run_name: ``trainer.name``.
        run_dir: the run's directory, which exists.
        total_steps: of the whole run.
        config: the resolved configuration as plain containers.
        first_step: the first step that this process will log; greater than 1 on resume.
    """

    run_name: str
    run_dir: Path
    total_steps: int
    config: Mapping[str, Any]
    first_step: int = 1

    @property
    def run_id(self) -> str:
        """32 hexadecimal digits, for trackers that name runs by an id. A resumed run has that of the run it continues.

        ``run-id`` in the run's directory keeps it.
        """
        file = self.run_dir / "run-id"
        if not file.exists():
            file.write_text(uuid.uuid4().hex + "\n", encoding="utf-8")
        return file.read_text(encoding="utf-8").strip()


class Tracker(ABC):
    """Takes one flat dict of floats per step. A tracker that raises or hangs is reported once and disabled."""

    def __init__(self, config: Any, context: TrackerContext) -> None:
        self.config = config
        self.context = context

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Metrics of one step. Step 0 is the validation before training."""

    def progress(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Something happens within a step; called often, never for every token.

        Args:
            phase: what has begun or goes on: ``rollout``, ``update_actor``, ``validation`` and so on, as in
                ``timing/<phase>``; empty while trajectories end, which they do in every phase where rollout and
                training overlap.
            done, total: trajectories that have ended, and all of this rollout, or since none was under way; 0 where
                ``phase`` is not empty.
        """
        return None

    def log_trajectories(self, trajectories: Sequence[EndedTrajectory], step: int) -> None:  # noqa: B027 - optional
        """All trajectories of one rollout, of training or of a validation; before the ``log`` of the step."""

    def finish(self, status: str) -> None:
        """The run has ended: ``completed``, ``stopped`` or ``failed``. Called once."""
        return None


def trajectory_table(
    trajectories: Sequence[EndedTrajectory], step: int, limit: int
) -> dict[str, tuple[list[str], list[list[Any]]]]:
    """The first ``limit`` trajectories of each split as a table: names of columns, and rows of strings and numbers."""
    tables: dict[str, tuple[list[str], list[list[Any]]]] = {}
    for each in trajectories:
        rows = tables.setdefault(each.split, (list(_COLUMNS), []))[1]
        if len(rows) < limit:
            text = "\n\n".join(f"{message['role']}: {_text(message)}" for message in each.messages)
            outcome = [each.reward, each.termination, each.num_turns, each.sampled_tokens, each.error or ""]
            rows.append([step, each.trajectory_id, each.data_source, text, *outcome])
    return tables if limit else {}


_COLUMNS = ("step", "trajectory", "data_source", "messages", "reward", "termination", "turns", "tokens", "error")


def _text(message: Mapping[str, Any]) -> str:
    parts = [text_of(message)]
    parts += [json.dumps(call, ensure_ascii=False, default=str) for call in message.get("tool_calls") or ()]
    return "\n".join(part for part in parts if part)
