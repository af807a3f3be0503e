"""Checks a tree against the schema and the options of the chosen plugins; collects every problem before it gives up."""

import difflib
import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, get_origin

from agentrl_core.api.config import OptionInfo
from agentrl_core.api.errors import PluginBrokenError, PluginError
from agentrl_core.api.plugin import PluginRef, PluginSpec
from agentrl_core.config.interpolation import UNRESOLVED
from agentrl_core.config.introspect import (
    NO_INFO,
    Member,
    allows_none,
    element_type,
    expected,
    found,
    is_section,
    is_slot,
    keys,
    members,
    union_arms,
    within,
)
from agentrl_core.config.merging import absolute, located
from agentrl_core.config.nodes import DEFAULT, KeyPath, Node, Origin, dotted, from_plain, problem
from agentrl_core.config.schema import Config
from agentrl_core.config.slots import Plugin, Slot
from agentrl_core.config.writing import leaves, plain

logger = logging.getLogger(__name__)
_UNPACKAGED = "file"
_NEAR_CHOICE = 0.7
"""So that 'gpu' does not suggest 'cpu'."""
_VERL = {
    "algorithm.adv_estimator": "algorithm.advantage",
    "algorithm.rollout_correction": "algorithm.correction",
    "critic.cliprange_value": "critic.value_clip",
    "critic.model": "critic.path",
    "critic.optim": "critic.optimizer",
    "custom_reward_function": "reward.functions",
    "data.filter_overlong_prompts": "data.overlong_prompts",
    "data.max_response_length": "rollout.max_response_length",
    "data.shuffle": "data.sampler",
    "data.train_batch_size": "data.batch_size",
    "data.truncation": "data.overlong_prompts",
    "data.val_files": "data.validation_files",
    "reward_model": "reward",
    "trainer.default_local_dir": "trainer.output_dir",
    "trainer.experiment_name": "trainer.name",
    "trainer.logger": "trainer.trackers",
    "trainer.n_gpus_per_node": "cluster.processes_per_node",
    "trainer.nnodes": "cluster.nodes",
    "trainer.resume_mode": "trainer.resume",
    "trainer.save_freq": "trainer.checkpoint.interval",
    "trainer.test_freq": "trainer.validation.interval",
    "trainer.total_epochs": "trainer.epochs",
    "trainer.total_training_steps": "trainer.steps",
    "trainer.val_before_train": "trainer.validation.before",
}
"""Frequent keys of verl, by their whole path; the package agentrl-compat-verl has the others."""
_FORMER = {"trainer.save_rollouts": "rollout.records"}
"""Keys of earlier versions, by their whole path."""
_VERL_SECTION = "actor_rollout_ref"


class Resolver(Protocol):
    """Finds the plugin that a slot names, without importing its implementation."""

    def __call__(self, kind: str, name: str, *, base_dir: Path | None = None, block: Sequence[str] = ()) -> Plugin: ...


class Invalid:
    """Stands for a value that cannot be built; its problems are already known."""


INVALID = Invalid()


class Walker:
    """Walks a tree along the dataclasses.

    ``problems`` holds complete messages, and by key path there are the ``origins`` of values and their ``references``
    to the environment.
    """

    def __init__(self, resolver: Resolver, block: Sequence[str]) -> None:
        self.problems: list[str] = []
        self.origins: dict[str, Origin] = {}
        self.references: dict[KeyPath, tuple[str, Any]] = {}
        self._resolver = resolver
        self._block = block

    def value(self, tp: Any, node: Node, path: KeyPath, info: OptionInfo = NO_INFO) -> Any:
        """The value of the declared type, or :data:`INVALID`."""
        self.origins[dotted(path)] = node.origin
        if node.value is UNRESOLVED:
            return INVALID
        # A path is seen from the file that names it, so its reference could not be read elsewhere; it is no password.
        if node.reference and not info.path:
            self.references[path] = (node.reference, node.plain())
        if tp is Any:
            self.origins |= {dotted((*path, *below)): leaf.origin for below, leaf in leaves(node)}
            return node.plain()
        if node.value is None:
            return None if allows_none(tp) else self._mismatch(tp, node, path, info)
        arms = union_arms(tp)
        if len(arms) > 1:
            return self._alternatives(tp, arms, node, path, info)
        (arm,) = arms
        origin = get_origin(arm) or arm
        if is_slot(arm) and isinstance(node.value, dict):
            return self._slot(arm, node, path)
        if is_section(arm) and isinstance(node.value, dict):
            return self.section(arm, node, path)
        if origin in (list, tuple) and isinstance(node.value, list):
            return self._sequence(tp, arm, node, path, info)
        if origin is dict and isinstance(node.value, dict):
            return self._mapping(arm, node, path, info)
        return self._scalar(tp, arm, node, path, info)

    def section(self, cls: type, node: Node, path: KeyPath, hints: Sequence[str] = ()) -> Any:
        """An instance of an option dataclass, or :data:`INVALID`. ``hints``: more keys to suggest for unknown ones."""
        values = self._members(cls, node, path, members(cls), hints)
        return values if isinstance(values, Invalid) else self._built(cls, values, node, path)

    def _members(
        self, cls: type, node: Node, path: KeyPath, known: dict[str, Member], hints: Sequence[str]
    ) -> dict[str, Any] | Invalid:
        sound = True
        for key, child in node.value.items():
            if note := getattr(cls, "obsolete", {}).get(key):
                logger.warning("%s: this option is gone and is ignored. %s", dotted((*path, key)), note)
            elif key not in known:
                sound = False
                self._add((*path, key), child.origin, _unknown(str(key), cls, list(known), path, hints))
        values: dict[str, Any] = {}
        for name, member in known.items():
            child = node.value.get(name) if name in node.value else _default(member, node.origin)
            if child is not None:
                values[name] = self.value(member.type, child, (*path, name), member.info)
                sound = sound and values[name] is not INVALID
            elif member.default is None:
                sound = False
                what = member.info.help or expected(member.type, member.info)
                self._add((*path, name), node.origin, f"required key is missing ({what})")
        return values if sound else INVALID

    def _built(self, cls: type, values: dict[str, Any], node: Node, path: KeyPath) -> Any:
        try:
            return cls(**values)
        except Exception as error:  # noqa: BLE001 - __post_init__ of a plugin's options may raise anything
            return self._add(path, node.origin, str(error) or type(error).__name__)

    def _slot(self, cls: type[Slot], node: Node, path: KeyPath) -> Any:
        known = {name: member for name, member in members(cls).items() if name != "config"}
        default = known["name"].default
        if "name" not in node.value and default is not None:
            name = Node(default(), replace(node.origin, label=DEFAULT))
            node = replace(node, value={"name": name, **node.value})
        rest = replace(node, value={key: child for key, child in node.value.items() if key != "config"})
        resolved = self._resolved(cls, node, path)
        options = resolved.spec.config if resolved is not None else None
        hints = [f"config.{field.name}" for field in fields(options)] if is_section(options) else []
        values = self._members(cls, rest, path, known, hints)
        config: Any = INVALID if resolved is None else self._options(resolved.spec, node, (*path, "config"))
        if resolved is None or isinstance(values, Invalid) or config is INVALID:
            return INVALID
        if resolved.ref.dist == _UNPACKAGED:
            file, _, attribute = values["name"].rpartition(":")
            values["name"] = f"{absolute(file, node.value['name'].origin)}:{attribute}"
        code = self._code(cls.kind, config, node, path)
        if isinstance(code, Invalid):
            return INVALID
        names, refs = code
        return cls(**values, config=replace(config, **names) if names else config, resolved=resolved, code=refs)

    def _code(
        self, kind: str, config: Any, node: Node, path: KeyPath
    ) -> tuple[dict[str, str], dict[str, PluginRef]] | Invalid:
        """Absolute names of the objects of files that options name, and references that carry the files' texts."""
        written = node.value["config"].value if "config" in node.value else {}
        names: dict[str, str] = {}
        refs: dict[str, PluginRef] = {}
        for option, member in members(type(config)).items() if is_dataclass(config) else ():
            name = getattr(config, option)
            file, _, attribute = str(name).rpartition(":")
            if member.info.code and file.endswith(".py"):
                origin = written[option].origin if option in written else node.origin
                try:
                    refs[option] = self._resolver(kind, name, base_dir=origin.base_dir).ref
                except PluginError as error:
                    return self._add((*path, "config", option), origin, str(error))
                names[option] = f"{absolute(file, origin)}:{attribute}"
        return names, refs

    def _resolved(self, cls: type[Slot], node: Node, path: KeyPath) -> Plugin | None:
        name = node.value.get("name")
        if name is None or not isinstance(name.value, str):
            return None
        try:
            return self._resolver(cls.kind, name.value, base_dir=name.origin.base_dir, block=self._block)
        except PluginError as error:
            self._add((*path, "name"), name.origin, str(error))
            return None

    def _options(self, spec: PluginSpec, node: Node, path: KeyPath) -> Any:
        config = node.value.get("config") or Node({}, node.origin)
        written = "config" in node.value
        self.origins[dotted(path)] = config.origin if written else replace(config.origin, label=DEFAULT)
        if config.value is UNRESOLVED:
            return INVALID
        if not isinstance(config.value, dict):
            message = f"expected a mapping with the options of {spec.kind} '{spec.name}', found {found(config.value)}"
            return self._add(path, config.origin, message)
        if spec.config is dict:
            return self.value(dict[str, Any], config, path)
        if not is_dataclass(spec.config):
            return self._add(path, config.origin, f"{spec.kind} '{spec.name}' declares no dataclass as its options")
        try:
            return self.section(spec.config, config, path)
        except PluginBrokenError as error:
            return self._add(path, config.origin, str(error))

    def _alternatives(self, tp: Any, arms: tuple[Any, ...], node: Node, path: KeyPath, info: OptionInfo) -> Any:
        for arm in arms:
            trial = Walker(self._resolver, self._block)
            value = trial.value(arm, node, path, info)
            if not trial.problems and value is not INVALID:
                self.origins |= trial.origins
                self.references |= trial.references
                return value
        return self._mismatch(tp, node, path, info)

    def _sequence(self, tp: Any, arm: Any, node: Node, path: KeyPath, info: OptionInfo) -> Any:
        types: Iterable[Any] = [element_type(arm)] * len(node.value)
        if get_origin(arm) is tuple and Ellipsis not in get_args(arm):
            types = get_args(arm)
            if len(get_args(arm)) != len(node.value):
                return self._mismatch(tp, node, path, info)
        pairs = enumerate(zip(types, node.value, strict=True))
        values = [self.value(element, child, (*path, index), info) for index, (element, child) in pairs]
        if any(value is INVALID for value in values):
            return INVALID
        return tuple(values) if arm is tuple or get_origin(arm) is tuple else values

    def _mapping(self, arm: Any, node: Node, path: KeyPath, info: OptionInfo) -> Any:
        key_type = get_args(arm)[0] if get_args(arm) else Any
        values = {}
        for key, child in node.value.items():
            if not _is_instance(key_type, key):
                message = f"expected {expected(key_type, NO_INFO)} as a key, found {found(key)}"
                values[key] = self._add((*path, key), child.origin, message)
                continue
            values[key] = self.value(element_type(arm), child, (*path, key), info)
        return INVALID if any(value is INVALID for value in values.values()) else values

    def _scalar(self, tp: Any, arm: Any, node: Node, path: KeyPath, info: OptionInfo) -> Any:
        value = node.value
        if not _is_instance(arm, value):
            return self._mismatch(tp, node, path, info)
        if info.choices and not any(_same(value, choice) for choice in info.choices):
            return self._mismatch(tp, node, path, info)
        if arm in (int, float) and not within(value, info):
            return self._mismatch(tp, node, path, info)
        if arm is float:
            return float(value)
        return located(value, node.origin, info) if arm is str and info.path else value

    def _mismatch(self, tp: Any, node: Node, path: KeyPath, info: OptionInfo) -> Invalid:
        text = f"expected {expected(tp, info)}, found {found(node.value)}"
        return self._add(path, node.origin, text + _advice(tp, node.value, info))

    def _add(self, path: KeyPath, origin: Origin, message: str) -> Invalid:
        self.problems.append(problem(path, origin, message))
        return INVALID


def _default(member: Member, parent: Origin) -> Node | None:
    """The default of a key that is left out, where it must be walked too: it may hold slots or required keys."""
    (arm, *_) = union_arms(member.type)
    holds_sections = is_section(arm) or is_section(element_type(arm))
    if member.default is None:
        return Node({}, parent) if is_section(arm) and not is_slot(arm) else None
    default = member.default()
    return from_plain(plain(default), replace(parent, label=DEFAULT)) if holds_sections else None


def _is_instance(tp: Any, value: Any) -> bool:
    if get_origin(tp) is Literal:
        return any(_same(value, choice) for choice in get_args(tp))
    if tp is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if tp is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return tp is Any or (isinstance(tp, type) and isinstance(value, tp))


def _same(value: Any, choice: Any) -> bool:
    return type(value) is type(choice) and bool(value == choice)


def _advice(tp: Any, value: Any, info: OptionInfo) -> str:
    """What to write instead, where the value shows what was meant."""
    arms = union_arms(tp)
    choices = info.choices or tuple(choice for arm in arms if get_origin(arm) is Literal for choice in get_args(arm))
    if isinstance(value, str) and choices:
        near = difflib.get_close_matches(value, [str(choice) for choice in choices], n=1, cutoff=_NEAR_CHOICE)
        return f"; did you mean {near[0]!r}?" if near else ""
    if isinstance(value, int | float) and str in arms:
        return "; put it in quotes"
    if isinstance(value, str) and (int in arms or float in arms) and _is_number(value):
        return "; leave out the quotes"
    if any((get_origin(arm) or arm) is list for arm in arms) and _is_instance(element_type(tp), value):
        return f"; write [{value}]"
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _unknown(key: str, cls: type, known: list[str], path: KeyPath, hints: Sequence[str]) -> str:
    allowed = [*known, "config"] if issubclass(cls, Slot) else known
    whole = dotted((*path, key))
    if whole == _VERL_SECTION:
        return "unknown key, verl's name; `agentrl from-verl` of agentrl-compat-verl converts configurations of verl"
    if whole in _VERL:
        return f"unknown key, verl's name; here: {_VERL[whole]}"
    if whole in _FORMER:
        return f"unknown key; in its place: {_FORMER[whole]}"
    suggestions = [dotted((*path, hint)) for hint in hints if hint.rpartition(".")[2] == key]
    suggestions = suggestions or difflib.get_close_matches(key, allowed, n=1) or places_of(key)
    meant = f" did you mean {' or '.join(repr(name) for name in suggestions)}?" if suggestions else ""
    return f"unknown key;{meant} allowed: {', '.join(allowed) or 'none'}"


def places_of(key: str, most: int = 3) -> list[str]:
    """Full paths at which the schema has a key of this name; none where there are more than ``most``."""
    places = [dotted(path) for path, _ in keys(Config) if path[-1] == key]
    return places if len(places) <= most else []
