"""A slot: the place of a plugin in a configuration. `schema` has those of each kind.

`all_slots` walks over the slots of a configuration.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, Protocol

from agentrl_core.api.config import option
from agentrl_core.api.errors import ConfigError
from agentrl_core.api.plugin import PluginRef, PluginSpec


class Plugin(Protocol):
    """What a resolver finds for a slot: see :class:`agentrl_core.plugins.resolution.ResolvedPlugin`."""

    @property
    def spec(self) -> PluginSpec: ...

    @property
    def ref(self) -> PluginRef: ...

    def load(self) -> Any: ...

    def build(self, config: Any, context: Any) -> Any: ...


@dataclass
class Slot:
    """A plugin, chosen by name. Its plugin is known once the configuration is a :class:`ResolvedConfig`."""

    kind: ClassVar[str]
    name: str = option(help="a registered name, 'package:name', or './file.py:object' relative to the config file")
    config: Any = option(default_factory=dict, help="the plugin's own options: `agentrl plugins show NAME`")

    resolved: Plugin | PluginRef | None = field(default=None, repr=False, compare=False, metadata={"internal": True})
    """Not a key of the file: loading sets the plugin, and a copy in another process has its reference at first."""

    code: dict[str, PluginRef] = field(default_factory=dict, repr=False, compare=False, metadata={"internal": True})
    """Not a key of the file: by option that names an object of a file, the reference with the file's text."""

    @property
    def plugin(self) -> Plugin:
        """The plugin of a resolved slot.

        Raises:
            ConfigError: this slot is not resolved.
            PluginError: the plugin differs in this process, see ``agentrl_core.plugins.resolution.resolve_ref``.
        """
        if self.resolved is None:
            raise ConfigError(
                f"the {self.kind} slot {self.name!r} is not resolved. This configuration is unchecked: "
                "make it with load_config(path), or pass it through bind()"
            )
        if isinstance(self.resolved, PluginRef):
            from agentrl_core.plugins.resolution import resolve_ref

            self.resolved = resolve_ref(self.resolved)
        return self.resolved

    @property
    def ref(self) -> PluginRef:
        """Names the plugin of a resolved slot in any process."""
        return self.resolved if isinstance(self.resolved, PluginRef) else self.plugin.ref

    def has(self, capability: str) -> bool:
        """Whether the plugin declares this capability."""
        return capability in self.plugin.spec.capabilities

    def build(self, context: Any) -> Any:
        """The object that the plugin's factory makes of this slot's options and the context of its kind."""
        config = self.config
        if self.code:
            from agentrl_core.plugins.resolution import resolve_ref

            config = replace(config, **{name: resolve_ref(ref).load() for name, ref in self.code.items()})
        return self.plugin.build(config, context)

    def __reduce__(self) -> tuple[Any, ...]:
        # The reference comes first: unpickled, it makes the module of a file importable, which may define `config`.
        reference = None if self.resolved is None else _Importable(self.ref)
        return _unpickled, (type(self), reference, {**vars(self), "resolved": None})

    @property
    def registered_name(self) -> str:
        """The name by which rows and other keys choose this plugin: without package or file."""
        return self.name.rpartition(":")[2]


@dataclass(frozen=True)
class _Importable:
    """A reference that becomes a :class:`PluginRef` when it is unpickled, after the module of a file has been run."""

    ref: PluginRef

    def __reduce__(self) -> tuple[Any, ...]:
        return _imported, (self.ref,)


def _imported(ref: PluginRef) -> PluginRef:
    from agentrl_core.plugins.file_plugin import FILE_DIST, load_file_object

    if ref.dist == FILE_DIST:
        load_file_object(ref)
    return ref


def _unpickled(cls: type[Slot], ref: PluginRef | None, state: dict[str, Any]) -> Slot:
    return cls(**{**state, "resolved": ref})


def all_slots(section: Any) -> Iterator[Slot]:
    """Every slot in a section of a configuration, in the order of the schema."""
    return (slot for _, slot in slots_by_path(section))


def slots_by_path(section: Any, path: str = "") -> Iterator[tuple[str, Slot]]:
    """The same, each after its key path (``rollout.agent.loops.0``)."""
    if isinstance(section, Slot):
        yield path, section
    elif isinstance(section, list | dict):
        for key, item in enumerate(section) if isinstance(section, list) else section.items():
            yield from slots_by_path(item, f"{path}.{key}")
    elif is_dataclass(section):
        for each in fields(section):
            yield from slots_by_path(getattr(section, each.name), f"{path}.{each.name}".lstrip("."))
