"""Prompts from parquet or JSON-lines files, through Hugging Face ``datasets``.

Columns: ``prompt`` (messages), ``images``, ``data_source``, ``agent_name``, ``reward_model.ground_truth``,
``extra_info`` with ``index``, ``tools_kwargs``, ``interaction_kwargs``; others are passed on as they are.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import datasets
import fsspec

from agentrl_core.api import DataError, DatasetContext, PromptDataset
from agentrl_dataset_prompts.config import PromptsConfig

Row = dict[str, Any]

_ARRAY = re.compile(rb"(?:\xef\xbb\xbf)?\[")
_NULL = re.compile(rb"(?:\A(?:\xef\xbb\xbf)?|})\s*null")
_ESCAPED = re.compile(rb"\\.")
_READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}


_AHEAD = 1000
"""Rows that are decoded together where rows are read in their order."""
_AHEAD_WITH_IMAGES = 16
"""The same where their images may take megabytes each."""


class PromptsFromFiles(PromptDataset):
    """The rows of several files, in their order.

    Rows stay in the memory-mapped files that ``datasets`` makes in its cache, and are decoded when they are read.

    Raises:
        DataError: a file that cannot be read or lacks the prompt column; from indexing, a row that cannot be used.
            The message names file and row.
    """

    def __init__(self, config: PromptsConfig, context: DatasetContext) -> None:
        self._config = config
        names = [name for pattern in context.files for name in _found(pattern, context.split)]
        self._files = [(name, _read(name, config)) for name in names]
        self._ends = list(accumulate(len(rows) for _, rows in self._files))
        self._ahead: dict[int, Row] = {}
        self._last = -1

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        at = bisect_right(self._ends, index)
        file, rows = self._files[at]
        first = self._ends[at] - len(rows)
        if index not in self._ahead:
            ahead = _AHEAD_WITH_IMAGES if {self._config.image_key, "image"} & {*rows.column_names} else _AHEAD
            count = ahead if index == self._last + 1 else 1
            try:
                columns = rows[index - first : index - first + count]
            except Exception as failure:  # noqa: BLE001 - a table that its own library wrote may still not be decoded
                until = min(index - first + count, len(rows)) - 1
                problem = f"cannot be decoded: {type(failure).__name__}: {failure}"
                raise DataError(f"{file}, rows {index - first} to {until}: {problem}") from failure
            decoded = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
            self._ahead = dict(enumerate(decoded, index))
        self._last = index
        return _normalise(dict(self._ahead[index]), self._config, f"{file}, row {index - first}")


def _found(file: str, split: str) -> list[str]:
    """The files that a name, or the pattern in an address, stands for.

    Raises:
        DataError: there are none, or the address cannot be reached.
    """
    key = f"data.{split}_files"
    if "://" not in file:
        return [file]
    try:
        files, path = fsspec.url_to_fs(file)
        # The path of a file is a pattern that matches it, unless its name has brackets.
        found = [path] if files.isfile(path) else sorted(each for each in files.glob(path) if files.isfile(each))
    except Exception as failure:  # noqa: BLE001 - each file system and its client has errors of its own
        raise DataError(f"{key}: {file}: cannot be reached: {type(failure).__name__}: {failure}") from failure
    if not found:
        raise DataError(f"{key}: {file}: no such file. Check the address, and that you may read there")
    return [files.unstrip_protocol(each) for each in found]


def _read(file: str, config: PromptsConfig) -> datasets.Dataset:
    reader = _READERS.get(Path(file).suffix)
    if reader is None:
        raise DataError(f"{file}: unknown file type; allowed are {', '.join(_READERS)}")
    local = "://" not in file
    if local and not Path(file).is_file():
        raise DataError(f"{file}: no such file")
    path = file
    try:
        with _no_progress_bars():
            # Where load_dataset would keep it too.
            path = file if local else str(datasets.DownloadManager().download(file))
            if not Path(path).stat().st_size:
                raise DataError(f"{file}: the file is empty; expected one row per line, with a prompt")
            if reader == "json":
                _reject_null(path, file)
            rows = _undecoded(datasets.load_dataset(reader, data_files=path, split="train"))
    except DataError:
        raise
    except Exception as failure:  # noqa: BLE001 - what a reader raises depends on the file and on the library behind it
        place, problem = _bad_line(path, file) if reader == "json" else (file, "")
        # The library says only that something failed; its cause says what.
        cause = failure.__cause__ or failure
        problem = problem or f"cannot be read as {reader}: {type(cause).__name__}: {cause}"
        raise DataError(f"{place}: {problem}") from failure
    if config.prompt_key not in rows.column_names:
        raise DataError(
            f"{file}: no column {config.prompt_key!r}; it has {', '.join(rows.column_names)}. "
            "Set data.dataset.config.prompt_key to the column that holds the messages"
        )
    return rows


def _undecoded(rows: datasets.Dataset) -> datasets.Dataset:
    """Images stay what the file has of them, ``{"bytes", "path"}``: nobody needs their pixels here."""

    def feature(found: Any) -> Any:
        if isinstance(found, datasets.Image):
            return datasets.Image(mode=found.mode, decode=False)
        if isinstance(found, datasets.List | datasets.LargeList):
            return type(found)(feature(found.feature))
        if isinstance(found, dict):
            return {name: feature(each) for name, each in found.items()}
        return [feature(each) for each in found] if isinstance(found, list) else found

    features = datasets.Features({name: feature(each) for name, each in rows.features.items()})
    return rows if features == rows.features else rows.cast(features)


def _bad_line(path: str, file: str) -> tuple[str, str]:
    """The first line that is no JSON object, and what is wrong with it.

    A file that is one array, or where no line is at fault, has ``file`` and an empty text.
    """
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            place = f"{file}, line {number}"
            if number == 1 and _ARRAY.match(line):
                break
            if not line.strip():
                continue
            try:
                row = json.loads(line, strict=False)
            except (ValueError, RecursionError) as error:
                return place, f"not valid JSON: {error}"
            if not isinstance(row, dict):
                return place, f"expected an object with a prompt, found {line[:60].decode(errors='replace')!r}"
    return file, ""


def _reject_null(path: str, file: str) -> None:
    """Reject a row that is ``null``: Arrow's reader of JSON ends the process with a segmentation fault.

    Raises:
        DataError: with the name ``file`` and the line, or the number of the element in a file that is one array.
        ValueError: such an array is not valid JSON.
    """
    expected = "found null; expected an object with a prompt"
    with open(path, "rb") as handle, mmap(handle.fileno(), 0, access=ACCESS_READ) as content:
        if _ARRAY.match(content):
            rows = json.loads(content[:], strict=False)
            if None in rows:
                raise DataError(f"{file}, element {rows.index(None)} of the array: {expected}")
            return
        for found in _NULL.finditer(content):
            start = content.rfind(b"\n", 0, found.start()) + 1
            # A text has no line breaks of its own.
            in_text = _ESCAPED.sub(b"", content[start : found.start()]).count(b'"') % 2
            if not in_text:
                number = content[: found.end()].count(b"\n") + 1
                raise DataError(f"{file}, line {number}: {expected}")


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    disabled = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not disabled:
            datasets.enable_progress_bars()


def _normalise(row: Row, config: PromptsConfig, where: str) -> Row:
    prompt = row.pop(config.prompt_key)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt or not all(isinstance(m, dict) and "role" in m for m in prompt):
        raise DataError(
            f"{where}: {config.prompt_key!r} must be a text or a list of messages with role and content, "
            f"found {json.dumps(prompt, default=str)[:80]}"
        )
    row = {key: drop_none(value) for key, value in row.items() if value is not None}
    if config.image_key != "images" and config.image_key in row:
        row["images"] = row.pop(config.image_key)
    reward_model = row.get("reward_model")
    if config.require_ground_truth and (not isinstance(reward_model, dict) or "ground_truth" not in reward_model):
        raise DataError(
            f"{where}: no reward_model.ground_truth; add it, or set data.dataset.config.require_ground_truth=false "
            "if the reward does not need it"
        )
    row["raw_prompt"] = [drop_none(message) for message in prompt]
    return row


def drop_none(value: Any) -> Any:
    """The value without None entries of dicts: parquet gives every row the union of all rows' keys."""
    if isinstance(value, dict):
        return {key: drop_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [drop_none(item) for item in value]
    return value
