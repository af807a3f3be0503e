"""Reads verl's overrides from the command line, shell scripts and YAML files into one flat mapping."""

import ast
import operator
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from agentrl_core.api import ConfigError

_OVERRIDE = re.compile(r"^([+~]{0,2})([A-Za-z_]\w*(?:\.\w+)+)=(.*)$", re.DOTALL)
_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_ARRAY = re.compile(r"^\s*\w+\+?=\(")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$([A-Za-z_]\w*)")
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)(?!\))")
_DEPTH = 4
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
}


def read(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Values by verl's dotted key, from overrides and files; later arguments win.

    Args:
        arguments: ``key=value``, a shell script, or a YAML file with a tree or a list of overrides.
        environment: for variables that a script does not set.

    Raises:
        ConfigError: an argument is neither an override nor a readable file, or holds no override.
    """
    found: dict[str, Any] = {}
    for argument in arguments:
        if _OVERRIDE.match(argument):
            found |= _overrides([argument])
            continue
        path = Path(argument)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{argument}: expected verl's key=value, a shell script or a YAML file, found none ({error})"
            ) from error
        values = _yaml(text, path) if path.suffix in (".yaml", ".yml") else _overrides(_words(text, environment))
        if not values:
            raise ConfigError(f"{argument}: found no override of verl, such as data.train_batch_size=256")
        found |= values
    return found


def _overrides(words: Sequence[str]) -> dict[str, Any]:
    matches = [match for match in map(_OVERRIDE.match, words) if match]
    return {key: _value(text) for prefix, key, text in (match.groups() for match in matches) if "~" not in prefix}


def _value(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return _number(value) if isinstance(value, str) else value


def _number(text: str) -> Any:
    # YAML 1.1 takes 1e-6 for a string.
    try:
        return float(text)
    except ValueError:
        return text


def _yaml(text: str, path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if isinstance(tree, list):
        return _overrides([str(item) for item in tree])
    return dict(_leaves(tree, ())) if isinstance(tree, dict) else {}


def _leaves(tree: dict[Any, Any], path: tuple[str, ...]) -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for key, value in tree.items():
        here = (*path, str(key))
        if isinstance(value, dict) and value:
            leaves += _leaves(value, here)
        elif here[-1] != "_target_" and here[0] not in ("defaults", "hydra") and value is not None:
            # `${a.b}` stands for the value of another key, which is converted itself.
            if not (isinstance(value, str) and "${" in value):
                leaves.append((".".join(here), _number(value) if isinstance(value, str) else value))
    return leaves


def _words(script: str, environment: Mapping[str, str]) -> list[str]:
    """The words of a script's commands after the replacement of variables; nothing is run."""
    variables = dict(environment)
    words: list[str] = []
    for line in re.sub(r"\\[ \t]*\n", " ", script).splitlines():
        try:
            line_words = shlex.split(_expanded(_ARRAY.sub("", line), variables), comments=True)
        except ValueError:
            # A quotation over several lines; overrides of verl stand on one.
            continue
        for word in line_words:
            assigned = _ASSIGNMENT.match(word)
            if assigned and "$(" not in word and "`" not in word:
                variables[assigned[1]] = assigned[2].rstrip(";")
        words += line_words
    return words


def _expanded(line: str, variables: Mapping[str, str]) -> str:
    def variable(match: re.Match[str]) -> str:
        value = variables.get(match[1] or match[3], None if match[2] is None else match[2].strip("\"'"))
        return match[0] if value is None else value.replace('"', r"\"")

    # A value may name other variables, or itself.
    for _ in range(_DEPTH):
        line = _VARIABLE.sub(variable, line)
    return _ARITHMETIC.sub(lambda match: _computed(match[1], variables) or match[0], line)


def _computed(text: str, variables: Mapping[str, str]) -> str | None:
    def number(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](number(node.left), number(node.right))
        if isinstance(node, ast.Name):
            return int(variables[node.id])
        return int(ast.literal_eval(node))

    try:
        return str(number(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
        return None
