"""An index over a corpus on disk: built once, memory-mapped by every process that searches it."""

import json
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import bm25s
import pyarrow as pa
import pyarrow.parquet as pq

from agentrl_core.api import ConfigError, DataError

COLUMNS = ("contents", "text", "content", "passage")
"""Columns that are taken for the text, the first that the corpus has."""
K1, B = 1.5, 0.75
_TEXTS, _SETTINGS = "documents.arrow", "search-index.json"


class Hit(NamedTuple):
    """A document that was found."""

    text: str
    score: float


def build_index(files: Sequence[Path], folder: Path, column: str | None = None, stopwords: str = "en") -> int:
    """Index the rows of jsonl and parquet files; returns how many there are.

    Args:
        folder: gets the index; must not exist, or be an index that is replaced.
        column: that holds the text; a column ``title`` is put in front. None: the first of :data:`COLUMNS`.
        stopwords: language of the words that are left out, as bm25s names it; an empty text: none.

    Raises:
        DataError: a file cannot be read, a row has no text, or ``folder`` holds something else.
    """
    if folder.exists() and not (folder / _SETTINGS).exists() and any(folder.iterdir()):
        raise DataError(f"{folder} exists and is not a search index; choose another directory or remove it")
    texts = [text for file in files for text in _texts(file, column)]
    if not texts:
        raise DataError(f"the corpus is empty: {', '.join(map(str, files))}")
    tokens: Any = bm25s.tokenize(texts, stopwords=stopwords or [], show_progress=False)
    if not tokens.vocab.keys() - {""}:
        raise DataError("no document of the corpus has a word of two letters or more that is not a stop word")
    retriever = bm25s.BM25(K1, B)
    retriever.index(tokens, show_progress=False)
    new = folder.with_name(f".{folder.name}.building-{os.getpid()}")
    shutil.rmtree(new, ignore_errors=True)
    try:
        retriever.save(new, show_progress=False)
        table = pa.table({"text": pa.array(texts, pa.large_string())})
        with pa.OSFile(str(new / _TEXTS), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        settings = {"stopwords": stopwords, "documents": len(texts), "files": [str(file) for file in files]}
        (new / _SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return len(texts)


def _texts(file: Path, column: str | None) -> Iterator[str]:
    for number, row in _rows(file):
        where = f"{file}: row {number}"
        name = column or next((each for each in COLUMNS if each in row), None)
        if name is None or name not in row:
            wanted = f"no column {column!r}" if column else f"none of the columns {', '.join(COLUMNS)}"
            raise DataError(f"{where} has {wanted}; it has {', '.join(row) or 'none'}. Choose one with --column")
        text = row[name]
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{where} has no text in the column {name!r}, but {text!r:.80}. Remove the row")
        title = row.get("title")
        yield f"{title}\n{text}" if isinstance(title, str) and name != "title" else text


def _rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows by their number, from 0 in parquet files and the line's number in jsonl files."""
    if file.suffix == ".parquet":
        try:
            batches = pq.ParquetFile(file).iter_batches()
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from enumerate(rows)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{file} cannot be read as parquet: {error}") from error
        return
    if file.suffix not in (".jsonl", ".json"):
        raise DataError(f"{file}: a corpus is a .jsonl or a .parquet file")
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise DataError(f"{file}: line {number} is not a JSON object")
                    yield number, row
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{file} cannot be read as jsonl: {error}") from error


class Index:
    """An open index.

    Args:
        folder: that :func:`build_index` made.

    Raises:
        ConfigError: it is not there, or not an index.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / _SETTINGS).is_file():
            what = "is not a search index" if folder.exists() else "does not exist"
            raise ConfigError(f"index: {folder} {what}; build one with `agentrl search-index CORPUS {folder}`")
        self._stopwords: str = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))["stopwords"]
        self._retriever = bm25s.BM25.load(folder, mmap=True)
        self._texts = pa.ipc.open_file(pa.memory_map(str(folder / _TEXTS))).read_all().column("text")
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._texts)

    def search(self, query: str, most: int) -> list[Hit]:
        """The documents that share a word with the query, best first."""
        words = bm25s.tokenize(query, stopwords=self._stopwords or [], return_ids=False, show_progress=False)
        known = [word for word in words[0] if word in self._retriever.vocab_dict]
        if not known:
            return []
        with self._lock:
            found, scores = self._retriever.retrieve([known], k=min(most, len(self)), show_progress=False)
        pairs = zip(found[0].tolist(), scores[0].tolist(), strict=True)
        return [Hit(self._texts[number].as_py(), score) for number, score in pairs if score > 0]


@lru_cache(maxsize=8)
def open_index(folder: Path) -> Index:
    """The index of a directory; one object in a process."""
    return Index(folder)
