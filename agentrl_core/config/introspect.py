"""What the loader needs to know about option dataclasses: their members, and words for their types."""

import types
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from operator import ge, gt, le, lt
from typing import Any, Literal, TypeGuard, Union, get_args, get_origin, get_type_hints

from agentrl_core.api.config import OptionInfo
from agentrl_core.api.errors import PluginBrokenError
from agentrl_core.config.slots import Slot

NO_INFO = OptionInfo()

_NOUNS: dict[Any, tuple[str, str]] = {
    Any: ("any value", "values"),
    bool: ("true or false", "true or false"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
}
_LONGEST_FOUND = 80


@dataclass(frozen=True)
class Member:
    """One key of an option dataclass. ``default`` makes its default; None where the key is required."""

    name: str
    type: Any
    info: OptionInfo
    default: Callable[[], Any] | None


def members(cls: type[Any]) -> dict[str, Member]:
    """The keys of an option dataclass, in order; internal fields are left out.

    Raises:
        PluginBrokenError: an annotation cannot be evaluated.
    """
    key: Any = cls  # mypy takes classes of unhashable instances for unhashable
    return _members(key)


@cache
def _members(cls: type[Any]) -> dict[str, Member]:
    try:
        hints = get_type_hints(cls)
    except Exception as error:  # noqa: BLE001 - evaluating a plugin's annotations may raise anything
        name = f"{cls.__module__}:{cls.__qualname__}"
        raise PluginBrokenError(f"the option types of {name} cannot be evaluated: {error}") from error
    found: dict[str, Member] = {}
    for field in fields(cls):
        if field.metadata.get("internal") or not field.init:
            continue
        default: Callable[[], Any] | None = None
        if field.default_factory is not MISSING:
            default = field.default_factory
        elif field.default is not MISSING:
            default = lambda value=field.default: value  # noqa: E731 - binds this field's default
        info = field.metadata.get("agentrl", NO_INFO)
        found[field.name] = Member(field.name, hints[field.name], info, default)
    return found


def is_section(tp: Any) -> TypeGuard[type]:
    return isinstance(tp, type) and is_dataclass(tp)


def is_slot(tp: Any) -> TypeGuard[type[Slot]]:
    return isinstance(tp, type) and issubclass(tp, Slot)


def union_arms(tp: Any) -> tuple[Any, ...]:
    """The alternatives of ``A | B | None``, None left out; other types are their own only alternative."""
    if get_origin(tp) in (Union, types.UnionType):
        return tuple(arm for arm in get_args(tp) if arm is not types.NoneType)
    return (tp,)


def allows_none(tp: Any) -> bool:
    if get_origin(tp) in (Union, types.UnionType, Literal):
        return types.NoneType in get_args(tp) or None in get_args(tp)
    return tp is Any or tp is types.NoneType


def element_type(tp: Any) -> Any:
    """The type of a list's elements or of a mapping's values; Any where that is not known."""
    (arm, *others) = union_arms(tp)
    if others or get_origin(arm) not in (list, dict, tuple):
        return Any
    arguments = get_args(arm)
    return arguments[1] if get_origin(arm) is dict else arguments[0]


def member_of(tp: Any, key: Any) -> Member:
    """The key ``key`` of a section or mapping type; typed Any where it is unknown."""
    (arm, *others) = union_arms(tp)
    if not others and is_section(arm) and key in members(arm):
        return members(arm)[key]
    return Member(str(key), element_type(tp), NO_INFO, None)


def keys(cls: type, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Member]]:
    """Every key of an option dataclass and of the sections below it, with its path; not those in lists and mappings."""
    for name, member in members(cls).items():
        yield (*path, name), member
        (arm, *_) = union_arms(member.type)
        if is_section(arm):
            yield from keys(arm, (*path, name))


def bounds(info: OptionInfo) -> str:
    """``"> 0 and <= 1"``; empty without bounds."""
    return " and ".join(f"{sign} {bound:g}" for sign, _, bound in _bounds(info))


def within(value: float, info: OptionInfo) -> bool:
    return all(compare(value, bound) for _, compare, bound in _bounds(info))


def _bounds(info: OptionInfo) -> list[tuple[str, Callable[[float, float], bool], float]]:
    found = ((">=", ge, info.ge), (">", gt, info.gt), ("<=", le, info.le), ("<", lt, info.lt))
    return [(sign, compare, bound) for sign, compare, bound in found if bound is not None]


def expected(tp: Any, info: OptionInfo, plural: bool = False) -> str:
    """What a key accepts, in words: ``"a number > 0 or null"``."""
    origin = get_origin(tp)
    if info.choices or origin is Literal:
        return "one of " + ", ".join(found(choice) for choice in info.choices or get_args(tp))
    if origin in (Union, types.UnionType):
        words = " or ".join(expected(arm, info, plural) for arm in union_arms(tp))
        return f"{words} or null" if allows_none(tp) else words
    if is_slot(tp):
        return "plugins, each a name or {name: …, config: …}" if plural else "a plugin: a name or {name: …, config: …}"
    if is_section(tp):
        return "sections" if plural else "a section (a mapping)"
    if tp is dict or origin is dict:
        return "mappings" if plural else "a mapping"
    if tp in (list, tuple) or origin in (list, tuple):
        return "lists" if plural else f"a list of {_elements(tp, info)}"
    noun = _NOUNS[tp][plural] if tp in _NOUNS else type_name(tp)
    return f"{noun} {bounds(info)}" if tp in (int, float) and bounds(info) else noun


def _elements(tp: Any, info: OptionInfo) -> str:
    words = expected(element_type(tp), info, plural=True)
    arguments = get_args(tp)
    return f"{len(arguments)} {words}" if get_origin(tp) is tuple and Ellipsis not in arguments else words


def found(value: Any) -> str:
    """A value as a message shows it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = repr(value)
    return text if len(text) <= _LONGEST_FOUND else f"{text[: _LONGEST_FOUND - 1]}…"


def type_name(tp: Any) -> str:
    """A type as the list of options shows it: ``"list[str]"``, ``"int | null"``, ``"'a' | 'b'"``."""
    origin = get_origin(tp)
    if tp is types.NoneType:
        return "null"
    if origin is Literal:
        return " | ".join(found(choice) for choice in get_args(tp))
    if origin in (Union, types.UnionType):
        return " | ".join(type_name(arm) for arm in get_args(tp))
    if origin is not None:
        arguments = ("…" if argument is Ellipsis else type_name(argument) for argument in get_args(tp))
        return f"{type_name(origin)}[{', '.join(arguments)}]"
    if is_slot(tp):
        return f"{tp.kind} slot"
    return "any" if tp is Any else getattr(tp, "__name__", str(tp))
