"""The directory of one run: its files, and how an earlier run's files are moved without being lost.

runs/<name>/
  config.yaml              resolved configuration
  plugins.lock.json        the plugins that the run uses
  state.json               status and step
  metrics.jsonl            one object a step
  phases.jsonl             when each phase of a step was
  rollouts/                step-000001.jsonl, validation-step-000000.jsonl; older steps as .jsonl.gz
  checkpoints/             step-000010/
  log.txt
  superseded/<n>/          files replaced by a later or resumed run, in the same layout
  .lock                    held by the process that runs here
  .engine-changes/         requests of `agentrl engines add|drain`, and their answers
"""

import errno
import fcntl
import hashlib
import itertools
import json
import logging
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TextIO, TypeGuard, get_args

import yaml

from agentrl_core.api.dataset import Split
from agentrl_core.api.errors import ConfigError, DataError
from agentrl_core.runs.atomic import open_file, read_file, replace_file

RunStatus = Literal["running", "completed", "stopped", "failed"]
logger = logging.getLogger(__name__)

ROLLOUT_FILE = re.compile(r"^(?P<validation>validation-)?step-(?P<step>\d{6,})\.jsonl(\.gz)?$")
CHECKPOINT = re.compile(r"^step-(?P<step>\d{6,})$")


@dataclass(frozen=True)
class RunState:
    """How far a run got. ``running`` in a directory that no process holds: the process was killed.

    Args:
        status: ``running``, ``completed``, ``stopped`` or ``failed``.
        step: the last finished step.
        time: when the state was written, ISO 8601 with offset.
        warnings: what the run has warned of: ``check``, ``first``, ``last``, ``over`` and ``message`` of each.
        first_metrics: the first step in ``metrics.jsonl``; None where nothing writes that file.
        config: SHA-256 of ``config.yaml``.
    """

    status: RunStatus
    step: int
    time: str
    warnings: Sequence[Mapping[str, Any]] = ()
    first_metrics: int | None = None
    config: str | None = None

    @property
    def finished(self) -> bool:
        """Whether all steps ran."""
        return self.status == "completed"


class RunDir:
    """Paths and records of one run. Creating the object changes nothing on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.lock_file = path / "plugins.lock.json"
        self.state_file = path / "state.json"
        self.metrics_file = path / "metrics.jsonl"
        self.phases_file = path / "phases.jsonl"
        self.rollouts_dir = path / "rollouts"
        self.checkpoints_dir = path / "checkpoints"
        self.log_file = path / "log.txt"
        self.superseded_dir = path / "superseded"
        self._lock = path / ".lock"
        self._first_metrics: int | None = None

    @classmethod
    def create(cls, output_dir: Path, name: str) -> "RunDir":
        """Create the directory ``output_dir/name`` if it is absent. Its files stay: see :meth:`archive`.

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
            str(run_dir.path).encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"trainer.output_dir, trainer.name: {str(run_dir.path)!r} is not UTF-8, and could not be written into "
                "the run's records. Choose another name"
            ) from error
        try:
            # Conversations and weights are nobody else's; a directory that exists keeps its rights.
            run_dir.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = run_dir.path / f".link-{os.getpid()}"  # two may start at the same time
            probe.unlink(missing_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            file = next(path for path in [run_dir.path, *run_dir.path.parents] if path.exists())
            raise ConfigError(
                f"trainer.output_dir, trainer.name: cannot create the directory {run_dir.path}, because {file} is a "
                "file. Choose another trainer.name or trainer.output_dir"
            ) from error
        except OSError as error:
            raise ConfigError(_unwritable(run_dir.path, error)) from error
        try:
            probe.symlink_to("checkpoints")
            probe.unlink()
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise ConfigError(_unwritable(run_dir.path, error)) from error
            raise ConfigError(
                f"trainer.output_dir: the file system of {run_dir.path} has no symbolic links, which name the latest "
                "checkpoint. Choose another trainer.output_dir"
            ) from error
        return run_dir

    # The process that holds the directory

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory during the block. The lock ends with the process, however that exits.

        A file system without locks, as some network ones are, gets a warning.

        Raises:
            ConfigError: another process holds it.
        """
        try:
            lock = self._lock.open("a+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(_unwritable(self.path, error)) from error
        with lock as file:
            try:
                _lock_alone(file)
            except BlockingIOError as error:
                file.seek(0)
                raise ConfigError(
                    f"trainer.name: {file.read().strip()} is training in {self.path}. Stop that process, or choose "
                    "another trainer.name"
                ) from error
            except OSError as error:
                logger.warning(
                    "the file system of %s has no locks (%s), so agentrl does not notice a second run in this "
                    "directory: do not start one", self.path, error.strerror or error,
                )  # fmt: skip
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            yield

    def is_in_use(self) -> bool:
        """Whether a process holds the directory; False where the file system has no locks."""
        try:
            with open_file(self._lock) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def shown_status(self) -> str:
        """The status for a person: ``interrupted`` if a killed process left ``running``, ``-`` without a run."""
        state = self.read_state()
        if state is None:
            return "-"
        return "interrupted" if state.status == "running" and not self.is_in_use() else state.status

    def remove_leftovers(self) -> None:
        """Delete files that a killed process did not finish writing or deleting."""
        files = [*self.path.glob(".*.tmp"), *self.rollouts_dir.glob(".*.tmp"), *self.checkpoints_dir.glob(".*.link")]
        for file in files:
            file.unlink()
        for checkpoint in self.checkpoints_dir.glob(".step-*"):
            shutil.rmtree(checkpoint, ignore_errors=True)

    # State

    def read_state(self) -> RunState | None:
        """Read the state of the last run in this directory; None if no run wrote one.

        Raises:
            DataError: ``state.json`` is no state.
        """
        try:
            state = json.loads(read_file(self.state_file))
            if state["status"] not in get_args(RunStatus):
                raise ValueError(f"status {state['status']!r}")
            warnings = [warning for warning in state.get("warnings", ()) if str(warning["message"])]
            first, config = state.get("first_metrics"), state.get("config")
            return RunState(
                state["status"],
                int(state["step"]),
                str(state["time"]),
                warnings,
                None if first is None else int(first),
                None if config is None else str(config),
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            raise DataError(
                f'{self.state_file} is damaged: {error}; allowed is {{"status": …, "step": …, "time": …}} as agentrl '
                f"writes it. Move {self.path} away to start again"
            ) from error

    def write_state(self, status: RunStatus, step: int, warnings: Sequence[Mapping[str, Any]] = ()) -> None:
        """Record how far the run got, atomically."""
        now = datetime.now().astimezone().isoformat(timespec="milliseconds")
        if self._first_metrics is None:
            before, rows = self.read_state(), self.read_metrics()
            known = before.first_metrics if before else None
            self._first_metrics = rows[0]["step"] if known is None and rows else known
        state = RunState(status, step, now, warnings, self._first_metrics, self._config_checksum())
        replace_file(self.state_file, json.dumps(asdict(state)) + "\n")

    def _config_checksum(self) -> str | None:
        try:
            return hashlib.sha256(read_file(self.config_file)).hexdigest()
        except OSError:
            return None

    def lost_records(self) -> list[str]:
        """What the run recorded and the directory no longer holds, in one sentence each.

        Raises:
            DataError: ``state.json`` is no state.
        """
        state = self.read_state()
        if state is None:
            return []
        lost = []
        if state.first_metrics is not None:
            gaps = _gaps(state.first_metrics, state.step, {row["step"] for row in self.read_metrics()})
            if gaps:
                problem = f"holds no row of step {_shown(gaps)}" if self.metrics_file.exists() else "is missing"
                lost.append(
                    f"{self.metrics_file} {problem}, which the run wrote. Copy it back from where you have it; "
                    "otherwise curves and comparisons lack these steps"
                )
        return lost + self.changed_config()

    def changed_config(self) -> list[str]:
        """One sentence if ``config.yaml`` is not as the run wrote it.

        Raises:
            DataError: ``state.json`` is no state.
        """
        state = self.read_state()
        if state is None or state.config in (None, self._config_checksum()):
            return []
        return [
            f"{self.config_file} is not as the run wrote it. Copy it back from where you have it, such as the "
            "config.yaml of a checkpoint; otherwise comparisons and replays use other values than the run"
        ]

    def read_metrics(self) -> list[dict[str, Any]]:
        """Read what the tracker ``jsonl`` wrote: one dict per step, empty without a file."""
        try:
            return read_metrics(self.metrics_file)
        except FileNotFoundError:
            return []

    def append_phases(self, step: int, phases: Sequence[tuple[str, float, float]]) -> None:
        """Record when each phase of a step was: name, start as Unix time, seconds."""
        with self.phases_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "phases": phases}) + "\n")

    # Rollouts

    def rollout_file(self, step: int, split: Split) -> Path:
        """The file with the trajectories of a step; older files are compressed."""
        plain = self.rollouts_dir / rollout_file_name(step, split)
        packed = plain.with_name(plain.name + ".gz")
        return packed if packed.exists() and not plain.exists() else plain

    def rollout_steps(self, split: Split) -> list[int]:
        """The steps whose trajectories are on disk, ascending."""
        matches = (match for match, _ in entries(self.rollouts_dir, ROLLOUT_FILE))
        return sorted({int(match["step"]) for match in matches if bool(match["validation"]) == (split != "train")})

    @property
    def unrecorded(self) -> str:
        """One sentence if the run records not all trajectories; empty if it does, or no configuration says so."""
        try:
            config = yaml.safe_load(read_file(self.config_file))
            records = config["rollout"].get("records", "all")
        except (OSError, yaml.YAMLError, LookupError, TypeError, AttributeError):
            return ""
        texts = {
            "sample": "This run recorded the trajectories of some prompts of each step only (rollout.records=sample)",
            "none": "This run recorded no trajectories (rollout.records=none)",
        }
        return texts.get(records, "") if isinstance(records, str) else ""

    # Superseding

    def archive(self) -> Path | None:
        """Move an earlier run into ``superseded/<n>`` and return that directory; None if there was no run.

        Nothing is deleted. Hidden files and earlier superseded runs stay where they are.

        Raises:
            ConfigError: the directory holds files but no run. Moving them would surprise their owner.
        """
        # The entries that mark a run are moved last, so that an interrupted move is recognised and finished.
        marks = [self.checkpoints_dir, self.rollouts_dir, self.log_file, self.metrics_file, self.lock_file]
        marks = [mark for mark in [*marks, self.config_file, self.state_file] if mark.exists()]
        visible = (entry for entry in sorted(self.path.iterdir()) if not entry.name.startswith("."))
        others = [entry for entry in visible if entry not in [*marks, self.superseded_dir]]
        if not marks and not others:
            return None
        if not marks:
            raise ConfigError(
                f"trainer.output_dir, trainer.name: {self.path} holds {others[0].name!r} but no agentrl run. "
                "Allowed is a new or empty directory, or that of an earlier run. Choose another trainer.name"
            )
        destination = self._next_superseded()
        for entry in [*others, *marks]:
            entry.rename(destination / entry.name)
        return destination

    def supersede_after(self, step: int) -> Path | None:
        """Move all records of steps after ``step`` into ``superseded/<n>``, for a run that resumes from there.

        The records are lines of ``metrics.jsonl`` and ``phases.jsonl``, rollout files of training and validation, and
        checkpoints. A line that a killed process left unfinished moves too. Returns the directory, None if no step was
        later.

        An interrupted call that is repeated loses nothing, but lines can then be in two superseded directories.
        """
        split = {file: _lines_until(file, step) for file in (self.metrics_file, self.phases_file)}
        found = [*entries(self.rollouts_dir, ROLLOUT_FILE), *entries(self.checkpoints_dir, CHECKPOINT)]
        moves = [path for match, path in found if int(match["step"]) > step]
        if not moves and not any(later for _, later in split.values()):
            return None
        destination = self._next_superseded()
        for file, (kept, later) in split.items():
            if later:
                replace_file(destination / file.name, b"".join(line + b"\n" for line in later))
                replace_file(file, b"".join(line + b"\n" for line in kept))
        for path in moves:
            target = destination / path.relative_to(self.path)
            target.parent.mkdir(exist_ok=True)
            path.rename(target)
        return destination

    def _next_superseded(self) -> Path:
        destination = next_numbered(self.superseded_dir)
        destination.mkdir(parents=True)
        return destination


def _lock_alone(file: TextIO) -> None:
    """Take the lock that a running process holds. Who only asks for it, as `runs list` does, lets go of it at once.

    Raises:
        BlockingIOError: a process holds it.
    """
    for _ in range(1000):
        with suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # This fails where a run holds the lock, and not where somebody asks.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        time.sleep(0.01)
    raise BlockingIOError


def _lines_until(file: Path, step: int) -> tuple[list[bytes], list[bytes]]:
    """The lines of a ``.jsonl`` file of steps until ``step``, and the others."""
    kept: list[bytes] = []
    later: list[bytes] = []
    try:
        lines = read_file(file).split(b"\n")
    except FileNotFoundError:
        lines = []
    for line in filter(None, lines):
        row = parse_metrics_line(line)
        (kept if row is not None and row["step"] <= step else later).append(line)
    return kept, later


def next_numbered(folder: Path) -> Path:
    """The next path of ``folder/1``, ``folder/2``, …"""
    numbers = (int(entry.name) for entry in folder.glob("*") if entry.name.isdecimal())
    return folder / str(max(numbers, default=0) + 1)


def entries(folder: Path, pattern: re.Pattern[str]) -> list[tuple[re.Match[str], Path]]:
    """The entries of a folder whose names match, in order; none if there is no folder."""
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    return [(match, entry) for entry in entries if (match := pattern.match(entry.name))]


def rollout_file_name(step: int, split: Split) -> str:
    """Return ``step-000010.jsonl`` or ``validation-step-000010.jsonl``."""
    return f"{'validation-' if split == 'validation' else ''}step-{step:06d}.jsonl"


def ranges(steps: Sequence[int]) -> str:
    """Ascending steps for a person: ``1-4, 6, 8-20``."""
    found: list[tuple[int, int]] = []
    for step in steps:
        if found and step == found[-1][1] + 1:
            found[-1] = (found[-1][0], step)
        else:
            found.append((step, step))
    return _shown(found)


def _shown(found: Sequence[tuple[int, int]]) -> str:
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def _gaps(first: int, last: int, there: Set[int]) -> list[tuple[int, int]]:
    """The ranges of steps that are not there. A damaged state may name a step that nobody could count up to."""
    edges = [first - 1, *sorted(step for step in there if first <= step <= last), last + 1]
    return [(before + 1, after - 1) for before, after in itertools.pairwise(edges) if after - before > 1]


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a metric's value is an int or float that a float can hold, and finite."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:
        return False


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a ``metrics.jsonl``: one dict per step, in the order of the file, without lines cut by a killed process.

    Raises:
        FileNotFoundError: there is no such file.
    """
    rows = (parse_metrics_line(line) for line in read_file(path).split(b"\n"))
    return [row for row in rows if row is not None]


def parse_metrics_line(line: bytes) -> dict[str, Any] | None:
    """One line of ``metrics.jsonl``, or None for what is no complete record."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems such as vfat and exfat say."""


def _unwritable(path: Path, error: OSError) -> str:
    reason = (error.strerror or str(error)).lower()
    return f"trainer.output_dir: {path} cannot be written: {reason}. Choose another trainer.output_dir"
