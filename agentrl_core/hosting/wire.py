"""The answers of a child process: JSON, which cannot execute code, within limits of size and depth.

Reading an answer creates numbers, texts, lists, dicts, the result types of tools and rewards, and nothing else.
"""

import json
import re
import struct
from collections.abc import Mapping
from os import PathLike
from typing import Any

from agentrl_core.api import RewardResult, ToolResponse, ToolResult
from agentrl_core.engine_kit.images import read_image

ID_BYTES = 16
HEADER = struct.Struct(f"!Q{ID_BYTES}s")
"""The length in bytes of the message that follows, and the random id of a request. An answer has the id of its request,
which nobody can guess: so none can be written ahead."""
MAX_BYTES = 64 << 20
MAX_DEPTH = 64
"""Maximum nesting of lists and dicts; picklers, templates and JSON readers fail beyond some hundreds."""
MAX_VALUES = 1 << 19
"""Maximum lists, dicts and commas in an answer: reading it keeps the run from everything else, and takes far more
memory than its bytes."""

_TEXT = re.compile(r'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_SCALARS = frozenset({str, int, float, bool, type(None)})
_TYPES = {cls.__name__: cls for cls in (ToolResult, ToolResponse, RewardResult)}


def encode(value: Any) -> bytes:
    """Write a value as JSON.

    Raises:
        TypeError: it holds something that JSON and the result types cannot express.
        ValueError: it is too large or nested too deeply.
    """
    text = json.dumps(_plain(value, MAX_DEPTH))
    if len(text) > MAX_BYTES:
        raise ValueError(f"a result of {len(text):,} bytes cannot leave its process; at most {MAX_BYTES:,} can")
    if _has_too_many_values(text):
        raise ValueError(f"a result of more than {MAX_VALUES:,} values cannot leave its process")
    return text.encode()


def decode(data: bytes) -> Any:
    """Read what :func:`encode` wrote, with lists for tuples. Raises ValueError for anything else."""
    text = data.decode()
    if _has_too_many_values(text):
        raise ValueError(f"an answer of more than {MAX_VALUES:,} values")
    try:
        return _value(json.loads(text))
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a message of a child process: {error}") from error


def _has_too_many_values(text: str) -> bool:
    def found(part: str) -> bool:
        return sum(map(part.count, "[{,")) > MAX_VALUES

    # Without what stands in texts, where it matters.
    return found(text) and found(_TEXT.sub("", text))


def read_answer(data: bytes) -> list[Any]:
    """An answer: ``["ok", value]`` or ``["error", kind, message, trace]``. Raises ValueError for anything else."""
    answer: Any = decode(data)
    match answer:
        case ["ok", _] | ["error", str(), str(), str()]:
            return list(answer)
    raise ValueError("expected ['ok', value] or ['error', kind, message, trace]")


def is_too_deep(value: Any, most: int = MAX_DEPTH) -> bool:
    """Whether lists and dicts are nested more than ``most`` levels deep."""
    level = [value]
    for _ in range(most + 1):
        level = [item for each in level for item in _items(each)]
        if not level:
            return False
    return True


def _items(value: Any) -> list[Any]:
    if type(value) in _SCALARS:  # Mapping is slow to ask
        return []
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []


def _plain(value: Any, levels: int) -> Any:
    if levels < 0:
        raise ValueError(f"a result nested more than {MAX_DEPTH} levels deep cannot leave its process")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = next((name for name, cls in _TYPES.items() if isinstance(value, cls)), "dict")
    if kind != "dict" or isinstance(value, Mapping):
        named = value._asdict() if kind == "ToolResult" else vars(value) if kind != "dict" else value
        return {"type": kind, "fields": {str(key): _plain(item, levels - 1) for key, item in named.items()}}
    if isinstance(value, list | tuple):
        return [_plain(item, levels - 1) for item in value]
    if _is_image(value):
        return read_image(value).data_url
    if hasattr(value, "item"):
        # A scalar of numpy or torch.
        return _plain(value.item(), levels - 1)
    raise TypeError(f"a {type(value).__name__} cannot leave its process; allowed are numbers, texts, lists and dicts")


def _is_image(value: Any) -> bool:
    """Whether a value can only be meant as an image, readable or not. Arrays of one element are scalars."""
    if isinstance(value, bytes | PathLike) or hasattr(value, "getexif"):
        return True
    return hasattr(value, "__array_interface__") and getattr(value, "ndim", 0) > 1 and value.size > 1


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(item) for item in plain]
    if isinstance(plain, dict):
        named = {key: _value(item) for key, item in plain["fields"].items()}
        return named if plain["type"] == "dict" else _TYPES[plain["type"]](**named)
    return plain
