"""Rollout files: one line per trajectory, complete enough to show it and to score it again."""

import builtins
import collections.abc
import functools
import gzip
import io
import json
import math
import shutil
import types
import typing
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from agentrl_core.api.agent_loop import AgentLoopOutput, Termination
from agentrl_core.api.dataset import Split
from agentrl_core.api.errors import DataError
from agentrl_core.api.record_format import rows_of
from agentrl_core.api.reward import RewardResult, RewardTrajectory
from agentrl_core.api.tree import Node
from agentrl_core.runs.atomic import open_file, replacing
from agentrl_core.runs.run_dir import ROLLOUT_FILE, entries, rollout_file_name

PLAIN_STEPS = 10
"""The files of this many newest steps stay plain; older ones are compressed."""
PLAIN_BYTES = 64 * 2**20
"""Files that are larger are compressed as soon as they are written."""
_REMEDY = ". The file is damaged: copy it back from where you have it, or take another step"


@dataclass(kw_only=True)
class RolloutRecord(AgentLoopOutput):
    """One row of a step as it is read: the row that the loop returned, and its outcome.

    Args:
        step: step of the run; 0 is the validation before training.
        split: ``train`` or ``validation``.
        uid: identifies the prompt; the samples of one prompt share it.
        sample: number of the prompt's sample, from 0.
        data_source: of the dataset row.
        tool_schemas: OpenAI function schemas that the policy was shown.
        tool_calls: in order, each with ``name``, ``arguments``, ``response`` (what the policy saw) and ``failed``.
        reward: None where the trajectory has none.
        reward_components: its parts by name, not weighted.
        turn_rewards: what each turn of the policy earned; part of ``reward``.
        tool_reward_turns, turn_score_turns: the turn of each of ``tool_rewards`` and ``turn_scores``.
        reward_metrics: details of the reward. NaN, here or elsewhere, reads back as None.
        ground_truth: of the dataset row.
        timings: seconds by name.
        spans: when each of them was: name, start as Unix time, seconds.
        served: of each ``generate`` span, in order: number of the engine replica that answered, -1 where none did, and
            the seconds that the request waited in it.
        policy: that played the agent, where a run has several; else empty.
        status, reason: what became of the trajectory, a value of ``Status``, and why; empty in version 1.
        advantage: mean advantage of the row's sampled tokens.
        advantages: of each id, to five decimals, 0.0 where mask is 0; empty where ``advantage`` is that of all tokens.
        old_log_probs: the actor's log-probability of each id before the update, in the same form; empty where it was
            not computed because the engine's was used.
        reward_input: what rewards saw and no other field has: ``model_text``, ``last_text``, ``full_text``,
            ``extra_info``, ``row``, ``sampled_tokens``, ``environment``, and ``termination`` before scoring. Only the
            last row of a scored trajectory has it; None in the others.
    """

    schema_version: int = 1
    step: int
    split: Split
    uid: str
    sample: int = 0
    data_source: str = ""
    response_logprobs: list[float] | None = None
    termination: Termination = Termination.COMPLETED
    tool_schemas: list[dict[str, Any]] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    reward: float | None = None
    reward_components: dict[str, float] = field(default_factory=dict)
    turn_rewards: list[float] = field(default_factory=list)
    tool_reward_turns: list[int] = field(default_factory=list)
    turn_score_turns: list[int] = field(default_factory=list)
    reward_metrics: dict[str, float] = field(default_factory=dict)
    ground_truth: Any = None
    timings: dict[str, float] = field(default_factory=dict)
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    served: list[tuple[int, float]] = field(default_factory=list)
    policy: str = ""
    status: str = ""
    reason: str = ""
    advantage: float | None = None
    advantages: list[float] = field(default_factory=list)
    old_log_probs: list[float] = field(default_factory=list)
    reward_input: dict[str, Any] | None = None

    @property
    def content(self) -> dict[str, Any]:
        """As a line of schema version 1."""
        # Not asdict, which copies every id.
        return {name: getattr(self, name) for name in _FIELDS}

    @classmethod
    def from_content(cls, content: dict[str, Any]) -> "RolloutRecord":
        """Read a row, as ``rows_of`` gives it; unknown keys are ignored.

        Raises:
            DataError: a required key is absent, or a value is of the wrong type.
        """
        missing = [name for name in _REQUIRED if name not in content]
        if missing:
            raise DataError(f"a rollout record without {', '.join(missing)}")
        for name, hint in _hints().items():
            if name in content and not _fits(content[name], hint):
                raise DataError(f"a rollout record whose {name} is {content[name]!r:.60}")
        record = cls(**{name: content[name] for name in _FIELDS if name in content})
        for call in record.tool_calls:
            texts = [call.get("name"), call.get("response")]
            if not all(isinstance(text, str) for text in texts) or not isinstance(call.get("arguments"), dict):
                raise DataError(
                    f"a rollout record with the tool call {call!r:.60}, without name, arguments or response"
                )
        try:
            record.termination = Termination(record.termination)
        except ValueError as error:
            raise DataError(f"a rollout record with an unknown termination: {error}") from None
        try:
            record.segments = [(int(mask), str(text)) for mask, text in record.segments]
        except (TypeError, ValueError) as error:
            raise DataError(f"a rollout record whose segments are no pairs of mask and text: {error}") from None
        return record


def to_json(content: Mapping[str, Any]) -> str:
    """Return one line: arrays as lists, NaN and infinities as null, other types without JSON as their ``str``."""
    try:
        line = json.dumps(content, ensure_ascii=False, allow_nan=False, default=_plain)
        line.encode()
    except ValueError:
        # NaN, or half of a surrogate pair, which a model can write as an escape in a tool call's JSON.
        finite = _without_nan(json.loads(json.dumps(content, default=_plain)))
        line = json.dumps(finite, allow_nan=False)
    return line


def records_of(line: str) -> list[RolloutRecord]:
    """Read the rows of one line.

    Raises:
        DataError: no JSON object, a damaged one, or one of an unknown schema version.
    """
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"a rollout record that is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"a rollout record must be a JSON object, found {type(content).__name__}")
    return [RolloutRecord.from_content(row) for row in rows_of(content)]


_REWARD_INPUT = (
    "model_text",
    "last_text",
    "full_text",
    "extra_info",
    "row",
    "termination",
    "sampled_tokens",
    "environment",
)
_COLLECTED = ("tool_rewards", "tool_reward_names", "tool_reward_turns", "turn_scores", "turn_score_turns")
_REQUIRED = ("step", "split", "uid", "trajectory_id", "prompt_ids", "response_ids", "response_mask")
# ``reward`` and ``reward_input`` hold these.
_FIELDS = tuple(
    item.name for item in fields(RolloutRecord) if item.name not in ("reward_score", "turn_texts", "full_text")
)


class RolloutWriter:
    """Writes the trajectories of a step into ``rollouts_dir``, one file per step and split."""

    def __init__(self, rollouts_dir: Path) -> None:
        self.rollouts_dir = rollouts_dir

    def write(self, step: int, split: Split, lines: Iterable[Mapping[str, Any]]) -> Path:
        """Write or replace the file of a step, line by line and atomically; return its path."""
        self.rollouts_dir.mkdir(parents=True, exist_ok=True)
        path = self.rollouts_dir / rollout_file_name(step, split)
        with replacing(path) as target:
            for line in lines:
                target.write(f"{to_json(line)}\n".encode())
        # What else lies there is somebody's own.
        for match, file in entries(self.rollouts_dir, ROLLOUT_FILE):
            is_due = int(match["step"]) <= step - PLAIN_STEPS or file.stat().st_size > PLAIN_BYTES
            if is_due and file.suffix == ".jsonl" and file.is_file():
                _compress(file)
        return path


def _compress(file: Path) -> None:
    with replacing(file.with_name(file.name + ".gz")) as raw, file.open("rb") as source:
        with gzip.open(raw, "wb", compresslevel=1) as target:
            shutil.copyfileobj(source, target)
    file.unlink()


def read_rollouts(path: Path) -> Iterator[RolloutRecord]:
    """Read the records of one file, compressed or not, one by one.

    Raises:
        DataError: a line is no record, or the file cannot be read; names file and line.
        FileNotFoundError: there is no such file.
    """
    number = 0
    try:
        with open_file(path) as raw:
            content = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if path.suffix == ".gz" else raw
            file = io.TextIOWrapper(content, encoding="utf-8", newline="\n")
            for number, line in enumerate(file, start=1):  # noqa: B007 - the messages below name it
                yield from records_of(line)
    except DataError as error:
        raise DataError(f"{path}:{number}: {error}{_REMEDY}") from error
    except FileNotFoundError:
        raise
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DataError(f"{path}:{number + 1}: cannot be read: {reason}{_REMEDY}") from error


def reward_input(trajectory: RewardTrajectory) -> dict[str, Any]:
    """What :attr:`RolloutRecord.reward_input` keeps."""
    return {name: getattr(trajectory, name) for name in _REWARD_INPUT}


def reward_trajectory_of(record: RolloutRecord) -> RewardTrajectory | None:
    """What rewards saw of a record's trajectory; None if it was never scored, or another of its rows has it."""
    if record.reward_input is None:
        return None
    names = {item.name for item in fields(RewardTrajectory)}.difference(_REWARD_INPUT, {"token_rows", "images"})
    seen = {name: getattr(record, name) for name in names} | record.reward_input
    if strange := record.reward_input.keys() - {*_REWARD_INPUT, *_COLLECTED}:
        raise DataError(f"a rollout record whose reward_input has {', '.join(sorted(strange))}{_REMEDY}")
    if seen["sampled_tokens"] == sum(record.response_mask):
        # Otherwise the trajectory has more rows than this record.
        seen["token_rows"] = [(record.prompt_ids, record.response_ids, record.response_mask)]
    empty: dict[str, Any] = {name: () for name, value in seen.items() if value == []}
    if isinstance(given := seen.get("environment"), dict):
        empty["environment"] = RewardResult(**given)
    return RewardTrajectory(**seen | empty)


@functools.cache
def _hints() -> dict[str, Any]:
    return {name: hint for name, hint in typing.get_type_hints(RolloutRecord).items() if name in _FIELDS}


_LARGE = 1 << 1000
_NUMBERS: dict[Any, set[type]] = {int: {int, bool}, float: {int, float, bool, type(None)}, str: {str}}
"""Types of what JSON makes of values; NaN is None."""


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value that was read can be one of this type; elements of tuples may be anything."""
    arguments = typing.get_args(hint)
    match typing.get_origin(hint) or hint:
        case types.NoneType:
            return value is None
        case types.UnionType | typing.Union:
            return any(_fits(value, each) for each in arguments)
        case typing.Literal:
            return value in arguments
        case builtins.list if arguments[0] in _NUMBERS:
            return isinstance(value, list) and _NUMBERS[arguments[0]].issuperset(map(type, value)) and _holds(value)
        case builtins.list:
            return isinstance(value, list) and all(_fits(each, arguments[0]) for each in value)
        case builtins.dict | collections.abc.Mapping:
            return isinstance(value, dict) and (not arguments or all(_fits(v, arguments[1]) for v in value.values()))
        case builtins.tuple:
            return isinstance(value, list) and len(value) == len(arguments)
        case kind if kind in (int, float, str):
            return type(value) in _NUMBERS[kind] and _holds([value])
        case _:
            return True


def _holds(values: list[Any]) -> bool:
    """Whether no int is too large for a float."""
    return not any(type(value) is int and not -_LARGE < value < _LARGE for value in values)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        # Without the turn of a tool call, from which the whole tree can be reached.
        content = ((item.name, getattr(value, item.name)) for item in fields(value))
        return {name: item for name, item in content if not isinstance(item, Node)}
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return value
