"""Processes by their ancestry, as ``/proc`` shows it."""

from contextlib import suppress
from pathlib import Path


def family(pid: int, whole_session: bool = False) -> set[int]:
    """Ids of a process and its descendants, and with ``whole_session`` of all others in the session that it leads."""
    table: dict[int, tuple[int, int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name in parentheses may hold anything, spaces included.
            fields = path.read_text().rpartition(")")[2].split()
            table[int(path.parent.name)] = int(fields[1]), int(fields[3])
    found, new = {pid}, {pid}
    if whole_session:
        new |= {each for each, (_, session) in table.items() if session == pid}
    while new:
        found |= new
        new = {each for each, (parent, _) in table.items() if parent in new} - found
    return found
