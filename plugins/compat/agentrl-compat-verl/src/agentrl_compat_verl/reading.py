"""Reads verl's overrides from the command line, shell scripts and YAML files into one flat mapping."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl_compat_verl import hydra
from agentrl_compat_verl.shell import Script, Word
from agentrl_core.api import ConfigError

_OVERRIDE = re.compile(r"^([+~]{0,2})([A-Za-z_]\w*(?:\.\w+)+)=(.*)$", re.DOTALL)
_GROUP = re.compile(r"^[+~]{0,2}([A-Za-z_][\w/@.]*)=(.*)$", re.DOTALL)
_DELETION = re.compile(r"^~([A-Za-z_]\w*(?:\.\w+)*)(=.*)?$")
_ENTRY = re.compile(r"^([\w./]*[./])?main_\w+(\.py)?$|^verl\.[\w.]+$")
_REFERENCE = re.compile(r"\$\{(?:oc\.(env|select):)?([\w.]+)(?:,([^{}]*))?\}")
_OTHER = re.compile(r"sft|main_gen|main_eval|main_server")
_DEPTH = 8


@dataclass
class Reading:
    """What the sources say.

    Args:
        values: by verl's dotted key.
        roots: directories in which the files that they name are looked for.
        missing: what could not be read, by what names it.
        notes: what was chosen or left out, by key.
        taken: number of values that were read, overridden ones too.
    """

    values: dict[str, Any] = field(default_factory=dict)
    roots: list[Path] = field(default_factory=lambda: [Path()])
    missing: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    taken: int = 0


def read(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Reading:
    """Values by verl's dotted key, from overrides and files; later arguments win.

    Args:
        arguments: ``key=value``, a shell script, or a YAML file with a tree or a list of overrides.
        environment: for variables that a script does not set.

    Raises:
        ConfigError: an argument is neither an override nor a readable file, or holds no override.
    """
    reading = Reading()
    for argument in arguments:
        if _OVERRIDE.match(argument):
            _take(reading, [Word(argument)])
            continue
        path = Path(argument)
        try:
            text = hydra.read_text(path)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{argument}: expected verl's key=value, a shell script or a YAML file, found none ({error})"
            ) from error
        before = reading.taken
        reading.roots += [folder for folder in path.absolute().parents if folder not in reading.roots]
        if path.suffix in (".yaml", ".yml"):
            _read_yaml(reading, path)
        else:
            _read_script(reading, text, path, environment)
        if reading.taken == before and not reading.missing:
            raise ConfigError(f"{argument}: found no override of verl, such as data.train_batch_size=256")
    reading.values = _resolved(reading, environment)
    return reading


def _read_yaml(reading: Reading, path: Path) -> None:
    tree = hydra.load_yaml(path)
    if isinstance(tree, list):
        _take(reading, [Word(str(item)) for item in tree])
    elif isinstance(tree, dict):
        _compose(reading, path.stem, [path.parent])


def _compose(reading: Reading, name: str, folders: Sequence[Path]) -> None:
    found = hydra.Composition(reading.roots)
    found.add(name, folders)
    reading.taken += len(found.values)
    reading.values |= {key: _number(value) if isinstance(value, str) else value for key, value in found.values.items()}
    reading.missing |= found.missing
    reading.notes |= found.assumed


def _read_script(reading: Reading, text: str, path: Path, environment: Mapping[str, str]) -> None:
    try:
        script = Script(text, environment, path.absolute().parent)
    except RecursionError as error:
        raise ConfigError(f"{path}: its quotations or ${{…}} are nested too deeply to be read") from error
    first: dict[str, Any] = {}
    for words in script.commands:
        if words and words[0].text in ("echo", "printf"):
            continue
        entry = next((at for at, word in enumerate(words) if _ENTRY.match(word.text)), None)
        before = dict(reading.values)
        if entry is not None and _OTHER.search(words[entry].text):
            reading.missing[words[entry].text] = "no counterpart: agentrl trains by reinforcement learning only"
        elif entry is not None:
            _read_files(reading, words[entry].text, [word.text for word in words[entry + 1 :]])
        _take(reading, words, from_entry=entry)
        # Of two commands with the same key the first is the training, more often than not.
        for key, value in first.items():
            if entry is not None and reading.values.get(key) != value and before.get(key) == value:
                reading.notes[key] = f"the script starts verl twice; taken: {value}, not {reading.values.get(key)}"
                reading.values[key] = value
        if entry is not None:
            first = {**{key: value for key, value in reading.values.items() if before.get(key) != value}, **first}


def _read_files(reading: Reading, module: str, words: Sequence[str]) -> None:
    """The configuration that Hydra composes before the overrides."""
    options = hydra.flags(words)
    beside = "/".join(module.removesuffix(".py").replace(".", "/").split("/")[:-1])
    name, place = options.get("name"), options.get("path", "config")
    if name is None:
        if not module.startswith("verl.trainer") and not module.startswith("verl/trainer"):
            reading.notes[module] = (
                "its default configuration is not read, verl's own is assumed. Pass its YAML file before the script"
            )
        return
    if "$" in name or "$" in place:
        reading.missing["--config-name"] = f"{place}/{name} has a value that only the running script knows"
        return
    places = [place] if "path" in options else [f"{beside}/{place}"]
    places += [options["dir"]] if "dir" in options else []
    near = [*reading.roots, *(root / beside for root in reading.roots)]
    _compose(reading, name, [found for one in places for found in hydra.find(one, near, folder=True)])


def _take(reading: Reading, words: Sequence[Word], from_entry: int | None = None) -> None:
    for at, word in enumerate(words):
        matched = _OVERRIDE.match(word.text)
        if matched:
            prefix, key, text = matched.groups()
            reading.taken += 1
            if "~" in prefix:
                reading.values.pop(key, None)
                continue
            reading.values[key] = _value(text)
            if word.alternatives:
                others = ", ".join(other.partition("=")[2] or other for other in word.alternatives)
                reading.notes[key] = f"the script has several values; taken: {text}, not: {others}"
        elif from_entry is not None and at > from_entry:
            _take_rest(reading, word.text)


def _take_rest(reading: Reading, text: str) -> None:
    """What Hydra understands and an override of one key is not."""
    if (deleted := _DELETION.match(text)) is not None:
        for key in [key for key in reading.values if f"{key}.".startswith(f"{deleted[1]}.")]:
            del reading.values[key]
    elif (group := _GROUP.match(text)) is not None:
        reading.notes[group[1]] = f"{group[2]}: a group of verl's configuration, or a key of no section; not read"
    elif text.startswith("$"):
        reading.notes[text] = "arguments that only the running script knows"
    elif "=" in text and not text.startswith("-"):
        reading.notes[text] = "not read: no key=value of verl. Write each key out"


def _value(text: str) -> Any:
    try:
        value = hydra.parse_yaml(text)
    except ValueError:
        return text
    return _number(value) if isinstance(value, str) else value


def _number(text: str) -> Any:
    # YAML 1.1 takes 1e-6 for a string.
    try:
        return float(text)
    except ValueError:
        return text


def _resolved(reading: Reading, environment: Mapping[str, str]) -> dict[str, Any]:
    """The values with ``${a.b}``, ``${oc.env:A,b}`` and ``${oc.select:a.b,c}`` replaced."""
    values = dict(reading.values)

    def target(match: re.Match[str]) -> str:
        kind, name, default = match.groups()
        if kind is None and "." not in name:
            return match[0]
        found = environment.get(name) if kind == "env" else values.get(name)
        found = default if found is None else found
        return match[0] if found is None else str(found)

    for key, value in reading.values.items():
        if not isinstance(value, str) or "${" not in value:
            continue
        text = value
        for _ in range(_DEPTH):
            whole = _REFERENCE.fullmatch(text)
            if whole is not None and whole[1] != "env" and not isinstance(values.get(whole[2], ""), str):
                text = values[whole[2]]
                break
            text = _REFERENCE.sub(target, text)
        values[key] = _value(text) if isinstance(text, str) else text
        left = _REFERENCE.search(text) if isinstance(text, str) else None
        if left is not None and left[1] != "env" and (left[1] == "select" or "." in left[2]):
            # It names a key that the sources leave at verl's default.
            reading.notes[key] = f"{value}: follows a key that is not given; verl's default holds"
            del values[key]
    return values
