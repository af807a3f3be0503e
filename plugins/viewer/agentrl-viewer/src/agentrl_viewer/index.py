"""An SQLite index of a run's trajectories: one entry per row of its rollout files, with what lists and filters need.

Rollout files are replaced as a whole, compressed later, and moved away when a run resumes. The index therefore keeps
one entry per file, re-reads a file whose size, time or inode changed, and drops what is gone. A line without its end
is left out until the file changes again.
"""

import errno
import gzip
import hashlib
import json
import os
import re
import sqlite3
import stat
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

from agentrl_core.api import DataError
from agentrl_core.api.message_parts import text_of
from agentrl_core.api.record_format import rows_of
from agentrl_viewer.tree import drawn

VERSION = 4
TEXT_CHARS = 16_000
"""Characters of a trajectory that the text filter sees: half of them from its start, half from its end."""
PREVIEW_CHARS = 160
TRAINED = frozenset({"completed", "length", "max_turns", "tool_error", "env_error"})

_FILE = re.compile(r"^(?P<validation>validation-)?step-(?P<step>\d{6,})\.jsonl(?P<gz>\.gz)?$")
_SCHEMA = """
CREATE TABLE files (
    id INTEGER PRIMARY KEY, name TEXT UNIQUE, size INTEGER, mtime INTEGER, inode INTEGER, crc INTEGER, length INTEGER,
    damage TEXT);
CREATE TABLE rows (
    file INTEGER, line INTEGER, start INTEGER, size INTEGER, split TEXT, step INTEGER, uid TEXT, sample INTEGER,
    trajectory TEXT, branch INTEGER, prompt TEXT, source TEXT, reward REAL, advantage REAL, termination TEXT,
    tools TEXT, calls INTEGER, failed_calls INTEGER, error TEXT, turns INTEGER, tokens INTEGER, seconds REAL,
    problem INTEGER, question TEXT, answer TEXT, body TEXT);
CREATE INDEX by_file ON rows (file, line);
CREATE INDEX by_step ON rows (step DESC, split, line);
CREATE INDEX by_problem ON rows (problem DESC, step DESC, split, line);
CREATE INDEX by_reward ON rows (reward, step, split, line);
CREATE INDEX by_tokens ON rows (tokens, step, split, line);
CREATE INDEX by_seconds ON rows (seconds, step, split, line);
CREATE INDEX by_uid ON rows (uid, step, split, line);
CREATE INDEX by_prompt ON rows (prompt, step, split, line);
CREATE INDEX by_termination ON rows (termination);
CREATE INDEX by_tools ON rows (tools);
CREATE INDEX by_trajectory ON rows (trajectory, step, split, line);
"""
ORDERS = {
    "newest": "step DESC, split, line",
    "oldest": "step, split DESC, line DESC",
    "failed": "problem DESC, step DESC, split, line",
    "reward": "reward, step, split, line",
    "-reward": "reward DESC, step DESC, split DESC, line DESC",
    "-tokens": "tokens DESC, step DESC, split DESC, line DESC",
    "-seconds": "seconds DESC, step DESC, split DESC, line DESC",
}
_LISTED = (
    "split, step, line, uid, sample, trajectory, branch, prompt, source, reward, advantage, termination, tools, calls, "
    "failed_calls, error, turns, tokens, seconds, problem, question, answer"
)


@dataclass(frozen=True)
class Filter:
    """Which trajectories to list; None or empty: all.

    Args:
        split: ``train`` or ``validation``.
        first_step, last_step: both included.
        min_reward, max_reward: both included; trajectories without a reward do not match.
        termination: its name, or ``failed``: infrastructure failed or the loop skipped it.
        tool: name of a tool that was called.
        error: part of the error's text; ``*``: any error or failed call.
        text: part of the conversation, case ignored for ASCII letters.
        uid, prompt: samples of one prompt in its step; the same prompt in all steps.
        order: ``newest``, ``oldest``, ``failed`` (problems first), ``reward``, ``-reward``, ``-tokens``, ``-seconds``.
    """

    split: str = ""
    first_step: int | None = None
    last_step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    termination: str = ""
    tool: str = ""
    error: str = ""
    text: str = ""
    uid: str = ""
    prompt: str = ""
    order: str = "newest"

    def where(self) -> tuple[str, list[Any]]:
        """The SQL condition and its values."""
        failed = f"termination NOT IN ({', '.join(map(repr, sorted(TRAINED)))})"
        parts: list[tuple[str, list[Any]]] = [
            ("split = ?", [self.split]) if self.split else ("", []),
            ("step >= ?", [self.first_step]) if self.first_step is not None else ("", []),
            ("step <= ?", [self.last_step]) if self.last_step is not None else ("", []),
            ("reward >= ?", [self.min_reward]) if self.min_reward is not None else ("", []),
            ("reward <= ?", [self.max_reward]) if self.max_reward is not None else ("", []),
            ("uid = ?", [self.uid]) if self.uid else ("", []),
            ("prompt = ?", [self.prompt]) if self.prompt else ("", []),
            ("instr(tools, ?)", [f"\n{self.tool}\n"]) if self.tool else ("", []),
            ("body LIKE ? ESCAPE '\\'", [_like(self.text)]) if self.text else ("", []),
        ]
        if self.termination:
            parts.append((failed, []) if self.termination == "failed" else ("termination = ?", [self.termination]))
        if self.error:
            any_error = self.error == "*"
            parts.append(("problem > 0", []) if any_error else ("error LIKE ? ESCAPE '\\'", [_like(self.error)]))
        used = [(sql, values) for sql, values in parts if sql]
        return " AND ".join(sql for sql, _ in used) or "1", [value for _, values in used for value in values]


def _like(text: str) -> str:
    return "%" + re.sub(r"([\\%_])", r"\\\1", text) + "%"


class Index:
    """The index of one run directory. Methods can be called from several threads.

    Args:
        run: the run directory.
    """

    def __init__(self, run: Path) -> None:
        self.rollouts = run / "rollouts"
        self.progress = (0, 0)
        self.version = 0
        self._lock = threading.Lock()
        self._unreadable: dict[str, str] = {}
        self._contents: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self.path = self._opened(run)

    def _opened(self, run: Path) -> Path:
        """The first place that can be written: the run directory or the user's cache; made again if it is damaged."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl"
        name = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:20]
        places = [run / ".viewer.sqlite", cache / f"viewer-{name}.sqlite"]
        for place in places:
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                with closing(sqlite3.connect(place, timeout=30)) as database:
                    _prepare(database)
                return place
            except sqlite3.DatabaseError as error:
                if not isinstance(error, sqlite3.OperationalError):
                    place.unlink()
                    return self._opened(run)
            except OSError:
                continue
        raise PermissionError(f"neither {places[0]} nor {places[1]} can be written: set XDG_CACHE_HOME to a folder")

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, timeout=30)) as database:
            database.row_factory = sqlite3.Row
            yield database

    # Writing

    def refresh(self) -> bool:
        """Read files that are new or have changed, and forget those that are gone; returns whether there were any."""
        with self._lock, self._connected() as database:
            database.execute("PRAGMA synchronous=OFF")
            known = {row["name"]: row for row in database.execute("SELECT * FROM files")}
            self._unreadable.clear()
            found = self._files()
            changed = {name: stat for name, stat in found.items() if not _is_same(known.get(name), stat)}
            gone = known.keys() - found.keys()
            for done, (name, stat) in enumerate(changed.items()):
                self.progress = (done, len(changed))
                self._read_file(database, name, stat, known, gone)
            for name in gone & {row["name"] for row in database.execute("SELECT name FROM files")}:
                _forget(database, name)
            database.commit()
            self.progress = (0, 0)
            self.version += bool(changed or gone)
            return bool(changed or gone)

    def _files(self) -> dict[str, os.stat_result]:
        """The rollout files; of a plain and a compressed one of a step, the plain one."""
        found: dict[str, os.stat_result] = {}
        try:
            entries = sorted(os.scandir(self.rollouts), key=lambda entry: entry.name)
        except FileNotFoundError:
            return found
        names = {entry.name for entry in entries}
        for entry in entries:
            if _FILE.match(entry.name) and entry.name.removesuffix(".gz") not in names - {entry.name}:
                try:
                    found[entry.name] = entry.stat()
                except FileNotFoundError:  # moved away since
                    continue
                except OSError as error:
                    self._unreadable[entry.name] = error.strerror or str(error)
        return found

    def _read_file(
        self, database: sqlite3.Connection, name: str, stat: os.stat_result, known: Mapping[str, Any], gone: set[str]
    ) -> None:
        plain = name.removesuffix(".gz")
        before = known.get(plain) if plain in gone else None
        if before is not None and _trailer(self.rollouts / name) == (before["crc"], before["length"] % 2**32):
            # The run has compressed it, and the checksum says that the content is the same.
            values = (name, stat.st_size, stat.st_mtime_ns, stat.st_ino, before["id"])
            database.execute("UPDATE files SET name = ?, size = ?, mtime = ?, inode = ? WHERE id = ?", values)
            database.commit()
            return
        content, damage = b"", ""
        try:
            content = _content(self.rollouts / name)
            content.decode()
        except FileNotFoundError:
            return
        except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
            damage = str(error)
        except OSError as error:
            # Not in the index: rights change without a new time of the file.
            self._unreadable[name] = error.strerror or str(error)
            return _forget(database, name)
        _forget(database, name)
        match = _FILE.match(name)
        assert match is not None, "only files that match are read"
        split = "validation" if match["validation"] else "train"
        signature = (name, stat.st_size, stat.st_mtime_ns, stat.st_ino, zlib.crc32(content), len(content))
        rows = list(_rows(content, split, int(match["step"])))
        whole = len({start for _, start, *_ in rows})
        missing = len([line for line in content.split(b"\n") if line.strip()]) - whole
        if missing or not rows:
            damage = damage or (f"{missing} lines are no trajectories" if missing else "it is empty")
        sql = "INSERT INTO files (name, size, mtime, inode, crc, length, damage) VALUES (?, ?, ?, ?, ?, ?, ?)"
        file = database.execute(sql, (*signature, damage)).lastrowid
        marks = ", ".join("?" * 26)
        database.executemany(f"INSERT INTO rows VALUES ({marks})", ((file, *row) for row in rows))
        database.commit()

    # Reading

    def damaged(self) -> list[str]:
        """The rollout files from which trajectories are left out, with what is wrong."""
        with self._connected() as database:
            found = database.execute("SELECT name, damage FROM files WHERE damage != '' ORDER BY name").fetchall()
        return [f"{self.rollouts / name}: {why}" for name, why in (*found, *sorted(self._unreadable.items()))]

    def listed(self, chosen: Filter, offset: int, limit: int) -> dict[str, Any]:
        """``total`` and the ``rows`` from ``offset`` on."""
        where, values = chosen.where()
        order = ORDERS[chosen.order]
        with self._connected() as database:
            (total,) = database.execute(f"SELECT count(*) FROM rows WHERE {where}", values).fetchone()
            # The inner query sorts and skips in an index, the outer one reads only the rows of this page.
            sql = (
                f"SELECT {_LISTED} FROM rows WHERE rowid IN (SELECT rowid FROM rows WHERE {where} ORDER BY {order} "
                f"LIMIT ? OFFSET ?) ORDER BY {order}"
            )
            rows = [dict(row) for row in database.execute(sql, [*values, limit, offset])]
        return {"total": total, "rows": [row | {"tools": row["tools"].split()} for row in rows]}

    def facets(self) -> dict[str, Any]:
        """Steps by split, and the names to filter by."""
        with self._connected() as database:
            steps = database.execute("SELECT split, step, count(*) AS n FROM rows GROUP BY step, split ORDER BY step")
            counts = [dict(row) for row in steps]
            named = "SELECT termination, count(*) FROM rows GROUP BY termination"
            terminations = {name: count for name, count in database.execute(named)}
            tools = database.execute("SELECT DISTINCT tools FROM rows").fetchall()
        names = sorted({name for (joined,) in tools for name in joined.split()})
        return {"steps": counts, "terminations": terminations, "tools": names, "total": sum(c["n"] for c in counts)}

    def trajectory(self, split: str, step: int, line: int) -> list[dict[str, Any]]:
        """All rows of one entry's trajectory, each with the number of its entry as ``line``, and the nodes of its tree
        in the first one; empty if there is no such entry."""
        here = "SELECT trajectory FROM rows WHERE split = ? AND step = ? AND line = ?"
        sql = (
            "SELECT name, mtime, line, start, rows.size AS size, trajectory FROM rows "
            "JOIN files ON files.id = rows.file "
            f"WHERE trajectory = ({here}) AND split = ? AND step = ? ORDER BY line"
        )
        with self._connected() as database:
            places = database.execute(sql, (split, step, line, split, step)).fetchall()
        records: list[dict[str, Any]] = []
        for _, group in groupby(places, key=lambda place: (place["name"], place["start"])):
            here_too = list(group)
            place = here_too[0]
            content = self._kept(place["name"], place["mtime"])
            whole = content[place["start"] : place["start"] + place["size"]]
            name = here_too[0]["trajectory"]
            rows = [row for row in parsed(whole) if row["trajectory_id"] == name]
            records += [row | {"line": at["line"]} for row, at in zip(rows, here_too, strict=False)]
        if records:
            nodes = drawn(json.loads(whole), records)
            records[0]["nodes"] = nodes
        return records

    def records(self, split: str, step: int) -> list[dict[str, Any]]:
        """All records of a step."""
        with self._connected() as database:
            sql = "SELECT name, mtime FROM files WHERE id = (SELECT file FROM rows WHERE split = ? AND step = ?)"
            file = database.execute(sql, (split, step)).fetchone()
        if file is None:
            return []
        lines = _numbered(self._kept(file["name"], file["mtime"]))
        return [record | {"line": number} for number, _, _, record in lines]

    def _kept(self, name: str, mtime: int) -> bytes:
        """The content of a file; the last few stay in memory, because compressed ones are read from their start."""
        content = self._contents.get((name, mtime))
        if content is None:
            try:
                content = _content(self.rollouts / name)
            except FileNotFoundError:
                # The run has compressed it, or moved it away, since the last refresh.
                try:
                    content = _content(self.rollouts / (name + ".gz"))
                except (OSError, EOFError, zlib.error):
                    content = b""
            except (OSError, EOFError, zlib.error):
                content = b""
            self._contents[name, mtime] = content
            while len(self._contents) > 4:
                self._contents.popitem(last=False)
        return content


def parsed(line: bytes) -> list[dict[str, Any]]:
    """The rows of a line; none for a line that is cut or no record."""
    try:
        content = json.loads(line)
        rows = rows_of(content) if isinstance(content, dict) and "trajectory_id" in content else []
    except (ValueError, RecursionError, DataError):
        return []
    return rows if all(map(_is_well_formed, rows)) else []


def _is_well_formed(record: Mapping[str, Any]) -> bool:
    names = ("tool_calls", "segments", "messages", "response_mask", "spans", "turn_rewards")
    lists = [record.get(name) or [] for name in names]
    return (
        isinstance(record.get("trajectory_id"), str)
        and all(isinstance(record.get(name), str | None) for name in ("prompt_text", "error", "agent"))
        and all(isinstance(record.get(name, 0), int) for name in ("sample", "num_turns"))
        and isinstance(record.get("timings"), dict | None)
        and all(isinstance(each, list) for each in lists)
        and all(isinstance(call, dict) for call in lists[0])
        and all(isinstance(segment, list) and [type(part) for part in segment] == [int, str] for segment in lists[1])
        and {int}.issuperset(map(type, lists[3]))
    )


def _numbered(content: bytes) -> Iterator[tuple[int, int, int, dict[str, Any]]]:
    """Each row of a file: its number, start and size of its line, and the row. A line without rows counts as one."""
    number = start = 0
    for line in content.split(b"\n"):
        rows = parsed(line)
        for place, row in enumerate(rows):
            yield number + place, start, len(line), row
        number += max(len(rows), 1)
        start += len(line) + 1


def conversation(record: Mapping[str, Any]) -> str:
    """A trajectory's text: its prompt, and everything behind it."""
    return (record.get("prompt_text") or "") + "".join(text for _, text in record.get("segments") or [])


def _prepare(database: sqlite3.Connection) -> None:
    """Make the tables, again where another version made them."""
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version != VERSION:
        for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            database.execute(f"DROP TABLE {table}")
        database.executescript(_SCHEMA)
    # In any case: where nothing can be written, this raises.
    database.execute(f"PRAGMA user_version = {VERSION}")
    database.commit()


def _is_same(known: Any, stat: os.stat_result) -> bool:
    signature = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
    return known is not None and (known["size"], known["mtime"], known["inode"]) == signature


def _forget(database: sqlite3.Connection, name: str) -> None:
    database.execute("DELETE FROM rows WHERE file = (SELECT id FROM files WHERE name = ?)", (name,))
    database.execute("DELETE FROM files WHERE name = ?", (name,))


def _content(path: Path) -> bytes:
    if path.suffix != ".gz":
        return read_file(path)
    return gzip.decompress(read_file(path))


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading. What else may lie there could keep the reader waiting, or never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return path.open("rb")


def read_file(path: Path) -> bytes:
    """The content of a regular file."""
    with open_file(path) as file:
        return file.read()


def _trailer(path: Path) -> tuple[int, int] | None:
    """Checksum and length of a gzip file's content, as its last eight bytes say."""
    try:
        with path.open("rb") as file:
            file.seek(-8, os.SEEK_END)
            last = file.read(8)
    except OSError:
        return None
    return int.from_bytes(last[:4], "little"), int.from_bytes(last[4:], "little")


def _rows(content: bytes, split: str, step: int) -> Iterator[tuple[Any, ...]]:
    """The rows of a file without its number, in the order of the table's columns."""
    branches: dict[str, int] = {}
    for number, start, size, record in _numbered(content):
        name = str(record["trajectory_id"])
        branches[name] = branches.get(name, -1) + 1
        yield (number, start, size, split, step, *_columns(record, name, branches[name]))


def _columns(record: Mapping[str, Any], name: str, branch: int) -> tuple[Any, ...]:
    calls = record.get("tool_calls") or []
    failed_calls = sum(bool(call.get("failed")) for call in calls)
    termination = str(record.get("termination"))
    # Infrastructure before the policy's own mistakes.
    problem = 2 if termination not in TRAINED else 1 if failed_calls or record.get("error") else 0
    text = conversation(record)
    half = TEXT_CHARS // 2
    body = text if len(text) <= TEXT_CHARS else text[:half] + "\n" + text[-half:]
    messages = record.get("messages") or []
    tools = sorted({str(call.get("name")).replace("\n", " ").replace(" ", "_") for call in calls})
    return (
        str(record.get("uid")), record.get("sample", 0), name, branch,
        hashlib.blake2b((record.get("prompt_text") or "").encode("utf-8", "replace"), digest_size=8).hexdigest(),
        str(record.get("data_source", "")), _number(record.get("reward")), _number(record.get("advantage")),
        termination, "\n" + "".join(tool + "\n" for tool in tools), len(calls), failed_calls,
        (record.get("error") or "")[-2000:], record.get("num_turns", 0), sum(record.get("response_mask") or []),
        _number((record.get("timings") or {}).get("total")), problem, _preview(messages, "user", 0),
        _preview(messages, "assistant", -1), body.encode("utf-8", "replace").decode(),
    )  # fmt: skip


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return None


def _preview(messages: list[Any], role: str, which: int) -> str:
    texts = [
        message.get("content") for message in messages if isinstance(message, dict) and message.get("role") == role
    ]
    text = texts[which] if texts else ""
    text = text_of({"content": text}) if isinstance(text, list) else text if isinstance(text, str) else json.dumps(text)
    return " ".join(text.encode("utf-8", "replace").decode().split())[:PREVIEW_CHARS]
