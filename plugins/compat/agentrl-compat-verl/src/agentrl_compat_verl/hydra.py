"""Composes the YAML files of a Hydra configuration: ``--config-path``, ``--config-name`` and ``defaults`` lists.

verl's own files are not read: the tables of :mod:`agentrl_compat_verl.keys` have their defaults.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from agentrl_core.api import ConfigError

OWN = ("ppo_trainer", "ppo_megatron_trainer", "ppo_torchtitan_trainer", "ppo_veomni_trainer")
"""verl's primary configurations."""
_OWN_FOLDER = ("verl", "trainer", "config")
_DEPTH, _SIZE = 50, 100_000
"""Levels and values of a YAML text, with what its aliases repeat; no configuration comes near them."""
MAX_BYTES = 256 * 1024
"""Of a script or a YAML file; verl's longest have 20 KB."""
_FLAGS = {
    "--config-path": "path", "-cp": "path", "--config-name": "name", "-cn": "name", "--config-dir": "dir", "-cd": "dir",
}  # fmt: skip


@dataclass
class Composition:
    """What the files say, by dotted key.

    Args:
        roots: directories in which relative paths are looked for.
        missing: what was not found, by what names it: the configuration lacks it.
        assumed: defaults that were not found and are taken for verl's own.
    """

    roots: Sequence[Path]
    values: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    assumed: dict[str, str] = field(default_factory=dict)

    def add(
        self,
        name: str,
        folders: Sequence[Path],
        package: tuple[str, ...] = (),
        group: bool = False,
        above: tuple[Path, ...] = (),
    ) -> None:
        """Read a configuration and what it builds upon; later values win.

        Raises:
            ConfigError: a file is no configuration, or builds upon itself by way of those in ``above``.
        """
        name = name.removesuffix(".yaml")
        if name in OWN:
            return
        file = next((found for folder in folders if (found := folder / f"{name}.yaml").is_file()), None)
        if file is None:
            where = ", ".join(map(str, folders)) or "the working directory and the folders around the script"
            text = f"{name}.yaml was not found in {where}"
            if group:
                self.assumed[f"defaults: {name}"] = f"{text}; taken for verl's own"
            else:
                self.missing[name] = f"{text}. Run from-verl in the checkout, or pass the file before the script"
            return
        if file.resolve().parts[-len(_OWN_FOLDER) - 1 : -1] == _OWN_FOLDER or _is_own_group(file):
            return
        if file in above:
            chain = " -> ".join(each.name for each in (*above[above.index(file) :], file))
            raise ConfigError(f"{file}: its defaults lead back to it: {chain}. Take one of them out")
        tree = load_yaml(file)
        if not isinstance(tree, dict):
            raise ConfigError(f"{file}: expected a mapping, found {type(tree).__name__}")
        head = read_text(file).partition("\n")[0]
        if head.startswith("# @package"):
            named = head.removeprefix("# @package").strip()
            package = () if named == "_global_" else tuple(named.split("."))
        search = [*folders, *self._searched(tree, file)]
        defaults = tree.get("defaults") or []
        if not isinstance(defaults, list):
            raise ConfigError(f"{file}: defaults: expected a list, found {type(defaults).__name__}")
        for entry in defaults if "_self_" in defaults else [*defaults, "_self_"]:
            if entry == "_self_":
                self.values |= dict(leaves({key: value for key, value in tree.items() if key != "defaults"}, package))
            elif isinstance(entry, str):
                self.add(entry.lstrip("/"), search, package, above=(*above, file))
            elif isinstance(entry, dict) and all(isinstance(key, str) for key in entry):
                self._add_group(entry, search, package, (*above, file))
            else:
                raise ConfigError(f"{file}: defaults: expected NAME or GROUP: NAME, found {entry!r:.80}")

    def _add_group(
        self, entry: dict[str, Any], folders: Sequence[Path], package: tuple[str, ...], above: tuple[Path, ...]
    ) -> None:
        for key, option in entry.items():
            group = key.removeprefix("optional ").removeprefix("override ").strip().lstrip("/")
            group, _, target = group.partition("@")
            inner = () if target == "_global_" else tuple((target or group.replace("/", ".")).split("."))
            for one in option if isinstance(option, list) else [option]:
                if one is not None and "${" not in str(one):
                    self.add(f"{group}/{one}", folders, (*package, *inner), True, above)

    def _searched(self, tree: dict[str, Any], file: Path) -> list[Path]:
        own = tree.get("hydra") or {}
        listed = (own.get("searchpath") if isinstance(own, dict) else own) or []
        if not isinstance(own, dict) or not isinstance(listed, list):
            raise ConfigError(f"{file}: hydra: expected a mapping with a list under searchpath, found {own!r:.80}")
        return [found for item in listed for found in find(str(item).removeprefix("file://"), self.roots, folder=True)]


def _is_own_group(file: Path) -> bool:
    parts = file.resolve().parts
    return any(parts[at : at + 3] == _OWN_FOLDER for at in range(len(parts)))


def flags(words: Sequence[str]) -> dict[str, str]:
    """The values of Hydra's own options, by path, name and dir."""
    found: dict[str, str] = {}
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in _FLAGS:
            found[_FLAGS[flag]] = value if equals else next(iter(words[at + 1 : at + 2]), "")
    return found


def find(path: str, roots: Sequence[Path], folder: bool = False) -> list[Path]:
    """Existing files of that path, or folders, under the roots."""
    candidates = [root / path for root in roots]
    return [found for found in candidates if (found.is_dir() if folder else found.is_file())]


def load_yaml(file: Path) -> Any:
    """A YAML file.

    Raises:
        ConfigError: it is not readable, or no YAML.
    """
    try:
        return parse_yaml(read_text(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from error


def read_text(file: Path) -> str:
    """A file of at most :data:`MAX_BYTES`.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read, is larger, or no UTF-8.
    """
    with file.open("rb") as opened:
        data = opened.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise OSError(f"it is larger than {MAX_BYTES} bytes")
    return data.decode("utf-8")


def parse_yaml(text: str) -> Any:
    """Plain values of a YAML text.

    Raises:
        ValueError: it is no YAML, or too large or deep, or it holds itself.
    """
    try:
        tree = yaml.safe_load(text)
    # PyYAML lets some errors of malformed numbers, dates and sets through.
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    seen, level = 0, [tree]
    for _ in range(_DEPTH):
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        seen += len(level)
        if any(isinstance(value, set) for value in level):
            raise ValueError("it holds a set; write a list")
        if not level:
            return tree
        if seen > _SIZE:
            raise ValueError(f"more than {_SIZE} values, those that its aliases repeat included")
    raise ValueError(f"nested more than {_DEPTH} deep")


def leaves(tree: dict[Any, Any], path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """The values of a tree by dotted key, without those that say nothing about a run."""
    for key, value in tree.items():
        here = (*path, str(key))
        if isinstance(value, dict) and value:
            yield from leaves(value, here)
        elif here[-1] != "_target_" and here[0] not in ("defaults", "hydra") and value not in (None, "???"):
            yield ".".join(here), value
