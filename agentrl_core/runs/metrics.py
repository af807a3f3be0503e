"""Reading metrics: flat ``area/name`` keys, one dict of floats per step."""

import json
import math
from pathlib import Path
from typing import Any, TypeGuard


def is_number(value: Any) -> TypeGuard[float]:
    """A finite int or float."""
    return isinstance(value, int | float) and math.isfinite(value)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps of a ``metrics.jsonl``, in the order of the file; a line torn by a killed process is passed over.

    Raises:
        FileNotFoundError: there is no such file.
    """
    rows = (parse_metrics_line(line) for line in path.read_bytes().split(b"\n"))
    return [row for row in rows if row is not None]


def parse_metrics_line(line: bytes) -> dict[str, Any] | None:
    """One line of ``metrics.jsonl``, or None for what is no complete record."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
