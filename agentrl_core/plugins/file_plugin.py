"""Unpackaged plugins: ``./reward.py:score`` in a slot names an object of a Python file.

The reference carries the file's text, so a worker on another machine runs the same code without having the file;
``__file__`` is the file's path where the machine has it, and ``<name.py>`` elsewhere. The module gets a name made of
the file's name and hash, the same in every process: what it defines can be pickled.
"""

import ast
import difflib
import hashlib
import inspect
import linecache
import os
import re
import sys
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl_core.api.config import NoConfig
from agentrl_core.api.errors import PluginBrokenError, PluginDriftError, PluginNotFoundError
from agentrl_core.api.plugin import KINDS, PluginRef, PluginSpec
from agentrl_core.plugins.class_environment import ClassConfig, is_environment_class
from agentrl_core.plugins.spec import capability_problems, config_problems, describe_exception

FILE_DIST = "file"
"""``PluginRef.dist`` of every unpackaged plugin."""

_FILE_NAME = re.compile(r"(?P<path>.+\.py):(?P<object>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)")


def is_file_name(name: str) -> bool:
    """Whether a slot's name is ``path/to/file.py:object``."""
    return _FILE_NAME.fullmatch(name) is not None


def file_ref(kind: str, name: str, base_dir: Path, run: bool = True) -> PluginRef:
    """Read ``path.py:object``, relative to ``base_dir``, run the file if ``run``, and make the reference.

    Raises:
        PluginNotFoundError: the file does not exist.
        PluginBrokenError: it cannot be read.
    """
    match = _FILE_NAME.fullmatch(name)
    if match is None:
        raise PluginNotFoundError(f"{name!r} is not of the form './file.py:object'")
    path = (base_dir / Path(match["path"]).expanduser()).resolve()
    title = f"{KINDS[kind].title} {name!r}"
    try:
        source = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise PluginNotFoundError(f"{title}: there is no file {path}{_nearest_file(path)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise PluginBrokenError(f"{title}: cannot read {path}: {error}") from error
    digest = hashlib.sha256(source.encode()).hexdigest()
    ref = PluginRef(kind, f"{path.name}:{match['object']}", FILE_DIST, digest, source, str(path))
    if run:
        _module_of(ref)
    return ref


def load_file_object(ref: PluginRef) -> Any:
    """The object that a reference names; the module is run once per process.

    Raises:
        PluginDriftError: the text is not the one whose hash the reference carries.
        PluginBrokenError: running the file raised, or it has no such object.
    """
    if hashlib.sha256(ref.source.encode()).hexdigest() != ref.version:
        raise PluginDriftError(f"the text of {ref.name!r} does not have the hash {ref.version}: start the run again")
    path = ref.name.rpartition(":")[2]
    module = _module_of(ref)
    try:
        found = reduce(getattr, path.split("."), module)
    except AttributeError as error:
        raise PluginBrokenError(f"{KINDS[ref.kind].title} {ref.name!r}: {_no_object(ref, path)}") from error
    if not callable(found):
        raise PluginBrokenError(
            f"{KINDS[ref.kind].title} {ref.name!r} is an object of type {type(found).__name__}, "
            "must be a function or a class"
        )
    return found


def file_spec(ref: PluginRef) -> PluginSpec:
    """The spec of a file's object: its attributes ``config_class`` and ``capabilities`` count where it has them."""
    found = load_file_object(ref)
    default = ClassConfig if ref.kind == "environment" and is_environment_class(found) else NoConfig
    config = getattr(found, "config_class", default)
    capabilities: Any = getattr(found, "capabilities", frozenset())
    problems = config_problems(config) + capability_problems(ref.kind, capabilities)
    if problems:
        raise PluginBrokenError(f"{KINDS[ref.kind].title} {ref.name!r}: " + "; ".join(problems))
    name = ref.name.rpartition(":")[2]
    summary = (inspect.getdoc(found) or "").strip().splitlines()
    return PluginSpec(
        kind=ref.kind,
        name=name,
        api_version=KINDS[ref.kind].api_version,
        summary=summary[0] if summary else f"from {ref.name}",
        factory=f"{_module_name(ref)}:{name}",
        config=config,
        capabilities=frozenset(capabilities),
    )


def unread_spec(ref: PluginRef) -> PluginSpec:
    """The spec of a file's object that is not run: ``config`` is ``dict``, as its options are unknown."""
    factory = f"{_module_name(ref)}:{ref.name.rpartition(':')[2]}"
    return PluginSpec(ref.kind, ref.name, KINDS[ref.kind].api_version, f"from {ref.name}", factory, config=dict)


def is_plain_function(ref: PluginRef, found: Any) -> bool:
    """Whether a file's object is itself the tool or reward function, and not a factory of one.

    A function with a ``config_class`` is a factory.
    """
    serves_itself = ref.dist == FILE_DIST and ref.kind in ("tool", "reward_function")
    return serves_itself and inspect.isfunction(found) and not hasattr(found, "config_class")


def top_level_names(source: str) -> list[str]:
    """Public functions and classes that a source text defines, in order; empty if it does not parse."""
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return []
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node.name for node in body if isinstance(node, kinds) and not node.name.startswith("_")]


def _module_name(ref: PluginRef) -> str:
    stem = re.sub(r"\W", "_", ref.name.rpartition(":")[0].removesuffix(".py"))
    return f"agentrl_file_{stem}_{ref.version[:16]}"


def _module_of(ref: PluginRef) -> ModuleType:
    name = _module_name(ref)
    if name in sys.modules:
        return sys.modules[name]
    elsewhere = f"<{ref.name.rpartition(':')[0]}>"
    module = ModuleType(name)
    module.__file__ = ref.path if os.path.isfile(ref.path) else elsewhere
    # Where the file is not on this machine, or another one is, tracebacks and inspect find the lines here.
    file_name = ref.path if _text_of(ref.path) == ref.source else elsewhere
    linecache.cache[file_name] = (len(ref.source), None, ref.source.splitlines(keepends=True), file_name)
    # Before the code runs, because dataclasses and pickling look the module up by its name.
    sys.modules[name] = module
    try:
        exec(compile(ref.source, file_name, "exec"), module.__dict__)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception | SystemExit):
            raise
        raise PluginBrokenError(
            f"{KINDS[ref.kind].title} {ref.name!r}: running {file_name} raised {describe_exception(error)}"
            + _import_hint(error, Path(file_name).parent)
        ) from error
    return module


def _text_of(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _import_hint(error: BaseException, folder: Path) -> str:
    if not isinstance(error, ModuleNotFoundError):
        return ""
    package = (error.name or "").partition(".")[0]
    if (folder / f"{package}.py").exists() or (folder / package).is_dir():
        return ". A plugin in a file may import installed packages only, no files next to it. Make it a package"
    return ". It is not installed in this environment: pip install the package that provides it"


def _no_object(ref: PluginRef, path: str) -> str:
    defined = top_level_names(ref.source)
    close = difflib.get_close_matches(path, defined, 1)
    hint = f", did you mean {close[0]!r}?" if close else ""
    return f"the file has no {path!r}{hint} (it defines {', '.join(defined) or 'no function or class'})"


def _nearest_file(path: Path) -> str:
    siblings = [each.name for each in path.parent.glob("*.py")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, siblings, 1)
    return f", did you mean {close[0]!r}?" if close else ""
