"""The one way from a Python annotation to a JSON schema: for tools' parameters and for plugins' options."""

import types
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, Literal, Union, get_args, get_origin

_SIMPLE = {bool: "boolean", int: "integer", float: "number", str: "string", types.NoneType: "null"}


def json_type(hint: Any, section: Callable[[type], dict[str, Any]] | None = None) -> dict[str, Any]:
    """The JSON schema of values of an annotation.

    Args:
        hint: an evaluated annotation.
        section: makes the schema of a dataclass; None: dataclasses have none.

    Raises:
        TypeError: the annotation has no JSON type.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    kind = origin or hint
    if hint is Any:
        return {}
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    if section is not None and isinstance(hint, type) and is_dataclass(hint):
        return section(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [json_type(argument, section) for argument in arguments]}
    if kind in (list, tuple):
        return {"type": "array", **({"items": json_type(arguments[0], section)} if arguments else {})}
    if kind is dict:
        return {"type": "object", **({"additionalProperties": json_type(arguments[1], section)} if arguments else {})}
    raise TypeError(f"{hint!r} has no JSON type; allowed are str, int, float, bool, list, dict, Literal and unions")
