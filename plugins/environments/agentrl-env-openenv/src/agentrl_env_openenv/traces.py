"""OpenEnv's ``TrainingTrace``, schema version 1: recorded trajectories as traces, and traces as rows to train on.

A trace is ``{"schema_version": 1, "turns": [...]}``. A turn is one call of the engine: ``prompt_token_ids``,
``completion_token_ids``, ``per_token_logps`` of the completion, and ``loss_mask`` over both. Nothing is encoded again.
"""

import gzip
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from agentrl_core.api import DataError, Status, Termination
from agentrl_core.api.record_format import rows_of
from agentrl_core.engine_kit.media import parts_of

Json = dict[str, Any]
SCHEMA_VERSION = 1
SOURCE = "training_trace"
_IDS = "prompt_token_ids", "completion_token_ids", "loss_mask"
_ROLES = "system", "user", "assistant", "tool"


def read_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Each JSON value of a file with its place: a line of ``.jsonl`` or ``.jsonl.gz``, or a whole ``.json``.

    Raises:
        DataError: no such file, or no JSON in it.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8", newline="\n") as file:
        texts = [file.read()] if path.suffix == ".json" else file
        for number, text in enumerate(texts, start=1):
            place = str(path) if path.suffix == ".json" else f"{path}:{number}"
            if not text.strip():
                continue
            try:
                yield place, json.loads(text)
            except ValueError as error:
                raise DataError(f"{place}: not JSON: {error}") from error


def traces(path: Path) -> Iterator[Json | None]:
    """The trace of each trajectory in a run's file ``rollouts/step-….jsonl``; None where the trajectory failed, or the
    policy sampled nothing. The turns of an agent that is not trained have mask 0.

    Raises:
        DataError: the file holds no records, or the engine gave no log-probabilities.
    """
    rows = (row for place, line in read_lines(path) for row in _rows(place, line))
    for name, group in groupby(rows, key=lambda row: str(row["trajectory_id"])):
        records = list(group)
        failed = Termination(records[-1]["termination"]).status is not Status.TRAINED
        turns = [] if failed else list(_turns(f"{path}: {name}", name, records))
        yield {"schema_version": SCHEMA_VERSION, "turns": turns} if turns else None


def _rows(place: str, line: Any) -> list[Json]:
    if not isinstance(line, dict) or "trajectory_id" not in line:
        raise DataError(f"{place}: no record of a trajectory; expected RUN/rollouts/step-….jsonl")
    try:
        return rows_of(line)
    except DataError as error:
        raise DataError(f"{place}: {error}") from error


def _turns(where: str, name: str, records: Sequence[Json]) -> Iterator[Json]:
    number = 0
    # Rows of one conversation share its messages, so the last ones of the assistant are these turns.
    for messages, group in groupby(records, key=lambda record: record["messages"]):
        if any(parts_of(message) for message in messages):
            raise DataError(f"{where}: shows images, which a TrainingTrace cannot hold; leave this file out")
        spans = [(record, start, end) for record in group for start, end in _sampled(record)]
        said = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
        places: Sequence[int | None] = said[-len(spans) :] if 0 < len(spans) <= len(said) else [None] * len(spans)
        for (record, start, end), place in zip(spans, places, strict=True):
            prompt = record["prompt_ids"] + record["response_ids"][:start]
            log_probs = record["response_logprobs"]
            if log_probs is None:
                raise DataError(f"{where}: has no log-probabilities, which a TrainingTrace must have")
            shown = place is not None
            yield {
                "node_id": f"{name}/{number}",
                "prompt_token_ids": prompt,
                "completion_token_ids": record["response_ids"][start:end],
                # Engines round: a certain token can come with a log-probability just above 0.
                "per_token_logps": [min(0.0, value) for value in log_probs[start:end]],
                "loss_mask": [0] * len(prompt) + [int(record.get("trained", True))] * (end - start),
                "request": {"messages": messages[:place], "tools": record["tool_schemas"]} if shown else {},
                "response": {"choices": [{"message": messages[place]}]} if shown else {},
                "metadata": {
                    "turn": number,
                    **{key: record.get(key) for key in ("step", "uid", "agent", "data_source", "termination")},
                    "reward": records[-1]["reward"],
                },
            }
            number += 1


def _sampled(record: Json) -> Iterator[tuple[int, int]]:
    """Where each turn of the policy begins and ends in the response."""
    mask, turns = record["response_mask"], record.get("turn_ids") or record["response_mask"]
    place = 0
    for (bit, _), group in groupby(zip(mask, turns, strict=True)):
        end = place + len(list(group))
        if bit:
            yield place, end
        place = end


def row(where: str, trace: Any, reward: float | None = None) -> Json | None:
    """The data row of a trace; None where no token of it is to be trained.

    A turn whose prompt begins with everything before it continues a token row; another one begins a new token row.
    ``reward`` is that of a trace whose metadata has none.

    Raises:
        DataError: the trace does not follow the schema; names ``where`` and the turn.
    """
    turns = trace.get("turns") if isinstance(trace, dict) else None
    if not isinstance(turns, list) or trace.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise DataError(f'{where}: no TrainingTrace of schema version {SCHEMA_VERSION}, {{"turns": [...]}}')
    for number, turn in enumerate(turns):
        _check(f"{where}: turn {number}", turn)
    if not any(any(turn["loss_mask"]) for turn in turns):
        return None
    token_rows: list[Json] = []
    so_far: list[int] = []
    for turn in turns:
        prompt, sampled = turn["prompt_token_ids"], turn["completion_token_ids"]
        if not token_rows or prompt[: len(so_far)] != so_far:
            token_rows.append({"prompt_ids": prompt, "response_ids": [], "response_mask": [], "response_logprobs": []})
            so_far = prompt
        grown, context = token_rows[-1], prompt[len(so_far) :]
        grown["response_ids"] += context + sampled
        grown["response_mask"] += [0] * len(context) + turn["loss_mask"][len(prompt) :]
        grown["response_logprobs"] += [0.0] * len(context) + turn["per_token_logps"]
        so_far = prompt + sampled
    metadata = turns[-1].get("metadata") or {}
    return {
        "prompt": _messages(turns[0]),
        "data_source": metadata.get("data_source") or SOURCE,
        "reward_model": {"ground_truth": ""},
        "token_rows": [each for each in token_rows if any(each["response_mask"])],
        "trace_reward": reward if metadata.get("reward") is None else metadata["reward"],
    }


def _check(where: str, turn: Any) -> None:
    if not isinstance(turn, dict):
        raise DataError(f"{where}: is a {type(turn).__name__}, not an object")
    for name in _IDS:
        ids = turn.get(name)
        if not isinstance(ids, list) or any(type(each) is not int or each < 0 for each in ids):
            raise DataError(f"{where}: {name} must be a list of integers from 0")
    log_probs = turn.get("per_token_logps")
    if not isinstance(log_probs, list) or not all(_is_log_prob(each) for each in log_probs):
        raise DataError(f"{where}: per_token_logps must be a list of finite numbers up to 0")
    prompt, sampled, mask = (turn[name] for name in _IDS)
    if not prompt or len(mask) != len(prompt) + len(sampled) or len(log_probs) != len(sampled):
        raise DataError(
            f"{where}: {len(prompt)} prompt and {len(sampled)} completion tokens, but loss_mask has {len(mask)} entries"
            f" and per_token_logps {len(log_probs)}; loss_mask covers both, and the prompt must not be empty"
        )
    if any(mask[: len(prompt)]) or not {*mask} <= {0, 1}:
        raise DataError(f"{where}: loss_mask must be 0 on the prompt, and 0 or 1 on the completion")


def _is_log_prob(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value <= 0


def _messages(turn: Mapping[str, Any]) -> list[Json] | str:
    """The conversation before the first turn, where it is one that chat templates take; it is only shown."""
    messages = (turn.get("request") or {}).get("messages") or []
    plain = all(
        isinstance(each, dict) and each.get("role") in _ROLES and isinstance(each.get("content"), str)
        for each in messages
    )
    return messages if messages and plain else SOURCE
