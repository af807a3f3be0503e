"""What becomes of verl's keys, collected while they are converted."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl_compat_verl.keys import UNSET, Key, NoCounterpartError
from agentrl_core.api import ConfigError

SECTIONS = (
    "model", "data", "rollout", "tools", "interactions", "reward", "algorithm", "actor", "critic", "reference",
    "trainer", "cluster",
)  # fmt: skip


@dataclass
class Conversion:
    """``values``: agentrl's, by dotted key. The others: by verl's key, what became of it; ``added``: by our key.

    ``incomplete``: without it the configuration is another task. ``roots``: where files that verl names are looked for.
    """

    given: Mapping[str, Any]
    roots: Sequence[Path] = ()
    values: dict[str, Any] = field(default_factory=dict)
    converted: dict[str, str] = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)
    default: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    decisions: dict[str, str] = field(default_factory=dict)
    incomplete: dict[str, str] = field(default_factory=dict)

    @property
    def tree(self) -> dict[str, Any]:
        """The configuration as a YAML file has it."""
        root: dict[str, Any] = {section: {} for section in SECTIONS}
        for path, value in self.values.items():
            *parents, last = path.split(".")
            node: Any = root
            for parent in parents:
                node = node[int(parent)] if isinstance(node, list) else node.setdefault(parent, {})
            node[last] = value
        return {section: node for section, node in root.items() if node}

    def get(self, key: str, default: Any = None) -> Any:
        """A value of verl."""
        return self.given.get(key, default)

    def number(self, key: str, default: Any = None) -> Any:
        """A number of verl.

        Raises:
            ConfigError: it is none.
        """
        value = self.given.get(key, default)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        raise ConfigError(f"{key}: expected a number, found {value!r}")

    def set(self, verl: str, here: str, value: Any, here_default: Any = UNSET) -> None:
        """Write a value that comes of verl's key, given or by default, unless agentrl has it anyway."""
        if value == here_default:
            if verl in self.given:
                self.default[verl] = f"{here}={shown(value)} is the default"
            return
        self.values[here] = value
        if verl in self.given:
            self.converted.setdefault(verl, f"{here}={shown(value)}")
        else:
            self.added[here] = f"{shown(value)}, verl's default"

    def take(self, table: Iterable[Key]) -> None:
        """Convert every key of a table."""
        for key in table:
            value = self.given.get(key.verl, key.verl_default)
            if value is UNSET:
                continue
            try:
                self.set(key.verl, key.here, key.convert(value), key.here_default)
            except NoCounterpartError as error:
                self.decisions[key.verl] = f"{key.here}: {error}"
            except TypeError:
                self.decisions[key.verl] = f"{key.here}: {value!r} is no value of verl's {key.verl}"

    def done(self, *verl: str) -> None:
        """These keys are part of what another one was converted to."""
        for key in verl:
            if key in self.given and not self.is_known(key):
                self.converted[key] = "part of the above"

    def is_known(self, verl: str) -> bool:
        return any(
            verl in said for said in (self.converted, self.default, self.missing, self.decisions, self.incomplete)
        )


def shown(value: Any) -> str:
    """A value as the report has it."""
    return json.dumps(value, ensure_ascii=False)
