"""The directory of one run: what lies where, and how an earlier run's records make room without being lost.

runs/<name>/
  config.yaml              resolved configuration
  plugins.lock.json        the plugins that ran
  state.json               status and step
  metrics.jsonl            one object a step
  rollouts/                step-000001.jsonl, validation-step-000000.jsonl; with .gz those of older steps
  checkpoints/             step-000010/
  log.txt
  superseded/<n>/          what a later run or a resume pushed aside, laid out in the same way
  .lock                    held by the process that runs here
"""

import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

from agentrl_core.api.dataset import Split
from agentrl_core.api.errors import ConfigError, DataError
from agentrl_core.runs.atomic import replace_file
from agentrl_core.runs.metrics import parse_metrics_line, read_metrics

RunStatus = Literal["running", "completed", "stopped", "failed"]

_ROLLOUT_FILE = re.compile(r"^(?P<validation>validation-)?step-(?P<step>\d{6,})\.jsonl(\.gz)?$")
_CHECKPOINT = re.compile(r"^step-(?P<step>\d{6,})$")


@dataclass(frozen=True)
class RunState:
    """How far a run came. ``running`` in a directory that nobody holds: the process was killed.

    Args:
        status: ``running``, ``completed``, ``stopped`` or ``failed``.
        step: the last finished step.
        time: when this was written, ISO 8601 with offset.
    """

    status: RunStatus
    step: int
    time: str

    @property
    def finished(self) -> bool:
        """All steps ran."""
        return self.status == "completed"


class RunDir:
    """Paths and records of one run. Building one touches nothing on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.lock_file = path / "plugins.lock.json"
        self.state_file = path / "state.json"
        self.metrics_file = path / "metrics.jsonl"
        self.rollouts_dir = path / "rollouts"
        self.checkpoints_dir = path / "checkpoints"
        self.log_file = path / "log.txt"
        self.superseded_dir = path / "superseded"
        self._lock = path / ".lock"

    @classmethod
    def create(cls, output_dir: Path, name: str) -> "RunDir":
        """The directory ``output_dir/name``, made if absent. What it holds stays: see :meth:`archive`.

        Raises:
            ConfigError: ``name`` is no single directory name, or a file is in the way.
        """
        if not name or name in (".", "..") or re.search(r"[/\\\0]", name):
            raise ConfigError(
                f"trainer.name: found {name!r}; allowed is the name of one directory below trainer.output_dir, "
                "such as 'calculator'"
            )
        run_dir = cls(output_dir / name)
        try:
            run_dir.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            file = next(path for path in [run_dir.path, *run_dir.path.parents] if path.exists())
            raise ConfigError(
                f"trainer.output_dir, trainer.name: {run_dir.path} cannot be made a directory, because {file} is a "
                "file; choose another trainer.name or trainer.output_dir"
            ) from error
        except OSError as error:
            raise ConfigError(_unwritable(run_dir.path, error)) from error
        return run_dir

    # The process that runs here

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory; however the process ends, its lock ends with it.

        Raises:
            ConfigError: another process holds it.
        """
        try:
            lock = self._lock.open("a+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(_unwritable(self.path, error)) from error
        with lock as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                raise ConfigError(
                    f"trainer.name: {file.read().strip()} is training in {self.path}. Stop that process, or choose "
                    "another trainer.name"
                ) from error
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            yield

    def is_in_use(self) -> bool:
        """Whether a process holds the directory."""
        try:
            with self._lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def shown_status(self) -> str:
        """The status for a person: ``interrupted`` where ``running`` is what a killed process left; ``-``: no run."""
        state = self.read_state()
        if state is None:
            return "-"
        return "interrupted" if state.status == "running" and not self.is_in_use() else state.status

    def remove_leftovers(self) -> None:
        """Delete what a killed process had not finished writing or deleting."""
        files = [*self.path.glob(".*.tmp"), *self.rollouts_dir.glob(".*.tmp"), *self.checkpoints_dir.glob(".*.link")]
        for file in files:
            file.unlink()
        for checkpoint in self.checkpoints_dir.glob(".step-*"):
            shutil.rmtree(checkpoint, ignore_errors=True)

    # State

    def read_state(self) -> RunState | None:
        """What the last run in this directory left; None if none ever wrote its state.

        Raises:
            DataError: ``state.json`` holds something else.
        """
        try:
            state = json.loads(self.state_file.read_bytes())
            return RunState(_checked_status(state["status"]), int(state["step"]), str(state["time"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f'{self.state_file}: found {error}; allowed is {{"status": …, "step": …, "time": …}} as agentrl '
                f"writes it. Move {self.path} away to start afresh"
            ) from error

    def write_state(self, status: RunStatus, step: int) -> None:
        """Record how far the run came, atomically."""
        replace_file(self.state_file, json.dumps(asdict(RunState(status, step, timestamp()))) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """What the tracker ``jsonl`` wrote, by step; empty if there is nothing. Torn lines are skipped."""
        return read_metrics(self.metrics_file) if self.metrics_file.exists() else []

    # Rollouts

    def rollout_file(self, step: int, split: Split) -> Path:
        """Where the trajectories of a step lie; older files are compressed."""
        plain = self.rollouts_dir / rollout_file_name(step, split)
        packed = plain.with_name(plain.name + ".gz")
        return packed if packed.exists() and not plain.exists() else plain

    def rollout_steps(self, split: Split) -> list[int]:
        """The steps whose trajectories are on disk, ascending."""
        return sorted({step for step, found, _ in self._rollout_files() if found == split})

    # Superseding

    def archive(self) -> Path | None:
        """Move everything of an earlier run into ``superseded/<n>``; returns that directory, None if it was empty.

        Nothing is deleted; hidden files and what was superseded before stay where they are.

        Raises:
            ConfigError: the directory holds files but no run: moving them would surprise their owner.
        """
        # The entries that tell a run go last, so that an archive which was cut short is recognised and finished.
        marks = [self.checkpoints_dir, self.rollouts_dir, self.log_file, self.metrics_file, self.lock_file]
        marks = [mark for mark in [*marks, self.config_file, self.state_file] if mark.exists()]
        visible = (entry for entry in sorted(self.path.iterdir()) if not entry.name.startswith("."))
        others = [entry for entry in visible if entry not in [*marks, self.superseded_dir]]
        if not marks and not others:
            return None
        if not marks:
            raise ConfigError(
                f"trainer.output_dir, trainer.name: {self.path} holds {others[0].name!r} but no agentrl run; "
                "allowed is a new or empty directory, or that of an earlier run. Choose another trainer.name"
            )
        destination = self._next_superseded()
        for entry in [*others, *marks]:
            entry.rename(destination / entry.name)
        return destination

    def supersede_after(self, step: int) -> Path | None:
        """Move all records of steps after ``step`` into ``superseded/<n>``, for a run that resumes from there.

        These are lines of ``metrics.jsonl``, rollout files of training and validation, and checkpoints. A metrics line
        that a killed process left unfinished moves too. Returns the directory, None if nothing was later.

        Cut short and repeated, it loses nothing; lines can then stand in two superseded directories.
        """
        kept, later = self._split_metrics(step)
        moves = [file for file_step, _, file in self._rollout_files() if file_step > step]
        moves += [path for path_step, path in self._checkpoints() if path_step > step]
        if not later and not moves:
            return None
        destination = self._next_superseded()
        if later:
            replace_file(destination / self.metrics_file.name, b"".join(line + b"\n" for line in later))
            replace_file(self.metrics_file, b"".join(line + b"\n" for line in kept))
        for path in moves:
            target = destination / path.relative_to(self.path)
            target.parent.mkdir(exist_ok=True)
            path.rename(target)
        return destination

    def _split_metrics(self, step: int) -> tuple[list[bytes], list[bytes]]:
        kept: list[bytes] = []
        later: list[bytes] = []
        content = self.metrics_file.read_bytes() if self.metrics_file.exists() else b""
        for line in content.split(b"\n"):
            if line:
                row = parse_metrics_line(line)
                (kept if row is not None and row["step"] <= step else later).append(line)
        return kept, later

    def _rollout_files(self) -> list[tuple[int, Split, Path]]:
        if not self.rollouts_dir.is_dir():
            return []
        matches = ((_ROLLOUT_FILE.match(file.name), file) for file in sorted(self.rollouts_dir.iterdir()))
        return [(int(match["step"]), "validation" if match["validation"] else "train", file)
                for match, file in matches if match]  # fmt: skip

    def _checkpoints(self) -> list[tuple[int, Path]]:
        if not self.checkpoints_dir.is_dir():
            return []
        matches = ((_CHECKPOINT.match(path.name), path) for path in sorted(self.checkpoints_dir.iterdir()))
        return [(int(match["step"]), path) for match, path in matches if match]

    def _next_superseded(self) -> Path:
        self.superseded_dir.mkdir(exist_ok=True)
        numbers = [int(entry.name) for entry in self.superseded_dir.iterdir() if entry.name.isdecimal()]
        destination = self.superseded_dir / str(max(numbers, default=0) + 1)
        destination.mkdir()
        return destination


def rollout_file_name(step: int, split: Split) -> str:
    """``step-000010.jsonl`` or ``validation-step-000010.jsonl``."""
    return f"{'validation-' if split == 'validation' else ''}step-{step:06d}.jsonl"


def timestamp() -> str:
    """Now, as ISO 8601 with offset, to the millisecond."""
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


def _unwritable(path: Path, error: OSError) -> str:
    reason = (error.strerror or str(error)).lower()
    return f"trainer.output_dir: {path} cannot be written: {reason}. Choose another trainer.output_dir"


def _checked_status(value: Any) -> RunStatus:
    for status in get_args(RunStatus):
        if value == status:
            found: RunStatus = status
            return found
    raise ValueError(f"status {value!r}")
