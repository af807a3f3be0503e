"""What the pages show of one run directory: state, metrics, configuration, trajectories, tokens and times."""

import fcntl
import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from agentrl_core.engine_kit.media import is_name
from agentrl_viewer.index import Filter, Index, open_file, read_file

MAX_SAMPLES = 64
"""Samples of a prompt, and trajectories of the same prompt in other steps, that a page lists."""
IMAGES = "media"
"""The folder of a run's images."""
MAX_LANES = 400


class Run:
    """One run directory, read only. Methods can be called from several threads.

    Args:
        path: the run directory.
        name: what the pages call it.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.index = Index(path)
        self.problem = ""
        self._metrics_lock = threading.Lock()
        self._metrics: dict[int, dict[str, Any]] = {}
        self._read_to = 0
        self._inode = -1

    def refresh(self) -> None:
        """Bring the index up to date; a failure, such as a full disk, is in :meth:`summary` until it is over."""
        try:
            self.index.refresh()
            self.problem = ""
        except (OSError, sqlite3.Error) as error:
            self.problem = f"{self.index.path}: {error}"

    # Metrics

    def metrics(self) -> list[dict[str, Any]]:
        """One dict per step, ascending; of lines that a resumed run repeats, the last one. Reads only what is new."""
        with self._metrics_lock:
            try:
                with open_file(self.path / "metrics.jsonl") as file:
                    self._read_metrics(file)
            except OSError:
                self._metrics, self._read_to = {}, 0
            return [self._metrics[step] for step in sorted(self._metrics)]

    def _read_metrics(self, file: Any) -> None:
        inode, size = _status(file)
        if inode != self._inode or size < self._read_to:
            self._metrics, self._read_to, self._inode = {}, 0, inode
        file.seek(self._read_to)
        new = file.read()
        # A line without its end is read when it has one.
        whole = new[: new.rfind(b"\n") + 1]
        self._read_to += len(whole)
        for line in whole.split(b"\n"):
            try:
                row = json.loads(line)
                self._metrics[int(row["step"])] = row
            except (ValueError, KeyError, TypeError):
                continue

    def series(self) -> dict[str, Any]:
        """Every metric as columns: ``steps``, ``times`` (Unix seconds or None), and ``values`` by name."""
        rows = self.metrics()
        names = sorted({name for row in rows for name in row if name not in ("step", "time")})
        values = {name: [_number(row.get(name)) for row in rows] for name in names}
        times = [_unix(row.get("time")) for row in rows]
        return {"steps": [row["step"] for row in rows], "times": times, "values": values}

    # State and configuration

    def damage(self) -> list[str]:
        """What the run wrote and the directory no longer holds, in one sentence each; pages show the rest."""
        found = [f"{each}; its other trajectories are shown" for each in self.index.damaged()]
        file = self.path / "state.json"
        state, rollout = _json_file(file), self.config().get("rollout")
        records = rollout.get("records") if isinstance(rollout, dict) else None
        if records in ("sample", "none"):
            which = "the trajectories of some prompts of each step only" if records == "sample" else "no trajectories"
            found.append(f"this run recorded {which} (rollout.records={records})")
        if not state:
            return [
                *found,
                f"{file} is {'damaged' if os.path.lexists(file) else 'missing'}: status and step are unknown",
            ]
        first, last = state.get("first_metrics"), state.get("step")
        if isinstance(first, int) and isinstance(last, int):
            lost = last + 1 - first - sum(first <= row["step"] <= last for row in self.metrics())
            if lost > 0:
                found.append(f"{self.path / 'metrics.jsonl'}: missing or damaged; the curves lack {lost} steps")
        try:
            checksum = hashlib.sha256(read_file(self.path / "config.yaml")).hexdigest()
        except OSError:
            checksum = ""
        if state.get("config") not in (None, checksum):
            found.append(f"{self.path / 'config.yaml'} is not as the run wrote it, so its values may be wrong")
        return found

    def summary(self) -> dict[str, Any]:
        """What the head of each page shows."""
        state = _json_file(self.path / "state.json")
        status = str(state.get("status", "-"))
        rows = self.metrics()
        done, files = self.index.progress
        trainer = self.config().get("trainer")
        return {
            "name": self.name,
            "path": str(self.path),
            "status": "interrupted" if status == "running" and not _is_locked(self.path / ".lock") else status,
            "step": state.get("step", 0),
            "steps": trainer.get("steps") if isinstance(trainer, dict) else None,
            "rows": len(rows),
            "last": rows[-1] if rows else {},
            "warnings": _warnings(state.get("warnings")),
            "version": f"{self.index.version}.{len(rows)}.{self._read_to}.{state.get('time')}",
            "problem": self.problem or " ".join(self.damage()),
            "indexing": {"done": done, "files": files},
        }

    def config(self) -> dict[str, Any]:
        """The resolved configuration; empty without one."""
        try:
            content = _parsed(read_file(self.path / "config.yaml"))
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            return {}
        return content if isinstance(content, dict) else {}

    def flat_config(self) -> dict[str, str]:
        """The configuration by dotted key, values as text."""
        return dict(_flat(self.config(), ""))

    # Trajectories

    def trajectory(self, split: str, step: int, line: int) -> dict[str, Any] | None:
        """A trajectory's rows with the text of each token, the samples of its prompt, and the same prompt elsewhere."""
        rows = self.index.trajectory(split, step, line)
        if not rows:
            return None
        nodes = rows[0].pop("nodes")
        for row in rows:
            row["prompt_tokens"] = self._texts(row.get("prompt_ids") or [])
            row["response_tokens"] = self._texts(row.get("response_ids") or [])
        here = self.index.listed(Filter(split=split, first_step=step, last_step=step, uid=str(rows[0]["uid"])), 0, 64)
        prompt = here["rows"][0]["prompt"]
        same = self.index.listed(Filter(prompt=prompt, order="oldest"), 0, MAX_SAMPLES)["rows"]
        return {
            "run": self.name,
            "split": split,
            "step": step,
            "line": line,
            "rows": rows,
            "nodes": nodes,
            "samples": here["rows"],
            "same_prompt": [row for row in same if (row["split"], row["step"]) != (split, step)],
        }

    def _texts(self, ids: list[int]) -> list[str] | None:
        tokenizer = _tokenizer(self._tokenizer_file())
        if tokenizer is None:
            return None
        # Bytes of one character can be several tokens: the last of them gets the text.
        stream = DecodeStream(skip_special_tokens=False)
        try:
            return [stream.step(tokenizer, token) or "" for token in ids]
        except Exception:  # noqa: BLE001 - the tokenizers package raises bare Exceptions, for ids that are not its own
            return None

    def _tokenizer_file(self) -> Path | None:
        model = (self.config().get("model") or {}).get("path")
        saved = sorted(self.path.glob("checkpoints/step-*/actor/tokenizer.json"))
        given = [Path(model) / "tokenizer.json"] if isinstance(model, str) else []
        return next((file for file in [*reversed(saved), *given] if file.is_file()), None)

    def image(self, name: Any) -> bytes | None:
        """The file of an image of the run; None for what is no name of one, or is not there."""
        try:
            return read_file(self.path / IMAGES / name) if is_name(name) else None
        except OSError:
            return None

    # Times

    def timeline(self, split: str, step: int) -> dict[str, Any]:
        """When everything of a step was.

        ``lanes``: trajectories with their spans, the longest first. ``spans``: those of all trajectories; ``others``:
        those of the step's other split. ``phases``: name, start as Unix time, seconds. ``timing``: the step's metrics.
        A span of kind ``generate`` has two more items where the run recorded them (``known``): replica and seconds of
        waiting there.
        """
        lanes: dict[str, dict[str, Any]] = {}
        for record in self.index.records(split, step):
            lanes[record["trajectory_id"]] = {
                "id": record["trajectory_id"],
                "line": record["line"],
                "termination": record.get("termination"),
                "reward": record.get("reward"),
                "spans": _spans(record),
                "timings": record.get("timings") or {},
            }
        ordered = sorted(lanes.values(), key=lambda lane: -(lane["timings"].get("total") or 0.0))
        rows = {row["step"]: row for row in self.metrics()}
        spans = [span for lane in ordered for span in lane["spans"]]
        other = "validation" if split == "train" else "train"
        others = {record["trajectory_id"]: _spans(record) for record in self.index.records(other, step)}
        return {
            "lanes": ordered[:MAX_LANES],
            "left_out": len(ordered[MAX_LANES:]),
            "timing": {name: value for name, value in rows.get(step, {}).items() if name.startswith("timing/")},
            "spans": spans,
            "others": [span for each in others.values() for span in each],
            "phases": self._phases(step),
            "known": any(len(span) > 3 for span in spans),
        }

    def _phases(self, step: int) -> list[list[Any]]:
        """The phases of a step, in order; none where an older agentrl wrote the run."""
        try:
            lines = read_file(self.path / "phases.jsonl").split(b"\n")
        except OSError:
            return []
        for line in reversed(lines):
            if line.startswith(b'{"step": %d,' % step):
                try:
                    found = json.loads(line)["phases"]
                    return sorted((list(phase) for phase in found if phase[0] != "step"), key=lambda phase: phase[1])
                except (ValueError, KeyError, TypeError, IndexError):
                    continue
        return []


class _NoAliases(yaml.SafeLoader):
    """Of YAML without references: agentrl writes none, and a few of them can stand for gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("a reference")
        return super().compose_node(parent, index)


@lru_cache(maxsize=8)
def _parsed(content: bytes) -> Any:
    # Each trajectory asks for it, and parsing takes 40 ms.
    return yaml.load(content, _NoAliases)


def _spans(record: Mapping[str, Any]) -> list[list[Any]]:
    """The spans of a record, those of requests with replica and wait."""
    served = iter(record.get("served") or [])
    return [[*span, *(next(served, ()) if span[0] == "generate" else ())] for span in record.get("spans") or []]


def _flat(value: Any, prefix: str) -> list[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        return [pair for key, item in value.items() for pair in _flat(item, f"{prefix}.{key}" if prefix else str(key))]
    if isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        return [pair for number, item in enumerate(value) for pair in _flat(item, f"{prefix}[{number}]")]
    return [(prefix, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))]


@lru_cache(maxsize=8)
def _loaded(file: Path, mtime: int) -> Tokenizer | None:
    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # noqa: BLE001 - the tokenizers package raises bare Exceptions
        return None


def _tokenizer(file: Path | None) -> Tokenizer | None:
    return None if file is None else _loaded(file, file.stat().st_mtime_ns)


def _status(file: Any) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_ino, status.st_size


def _json_file(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _is_locked(path: Path) -> bool:
    """Whether the training process holds its lock; also where the file system cannot tell."""
    try:
        with open_file(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _warnings(found: Any) -> list[dict[str, Any]]:
    """What a run has warned of: ``message``, and whether it is ``over``."""
    listed = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    return [{"message": str(each.get("message")), "over": bool(each.get("over"))} for each in listed]


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return None


def _unix(time: Any) -> float | None:
    try:
        return datetime.fromisoformat(str(time)).timestamp()
    except ValueError:
        return None
