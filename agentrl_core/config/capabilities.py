"""What each feature of the core requires of the plugins in a slot: one table, checked before anything starts.

A plugin declares its capabilities in its spec, so nothing here imports an implementation.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from operator import attrgetter
from typing import Any

from agentrl_core.api.engine import RESHAPING, truncation_is_chained
from agentrl_core.api.plugin import KINDS
from agentrl_core.config.schema import ResolvedConfig, ServedSlot
from agentrl_core.config.slots import Slot, slots_by_path

Feature = Callable[[ResolvedConfig], str | None]
"""The feature as ``key=value`` where a configuration uses it, else None."""

Alternatives = Callable[[str, str, Sequence[str]], list[str]]
"""Names of the usable plugins of a kind with a capability; the last argument are those that are blocked."""


@dataclass(frozen=True)
class Requirement:
    """A feature needs a capability.

    Args:
        slot: key path of a slot, or of a list of slots, one of which must have the capability.
        capability: a name of ``KINDS[kind].capabilities``.
        feature: that needs it.
        training: only training needs it, not ``agentrl eval``.
    """

    slot: str
    capability: str
    feature: Feature
    training: bool = False


def _listed(key: str, slots: Callable[[ResolvedConfig], Sequence[Slot]]) -> Feature:
    def feature(config: ResolvedConfig) -> str | None:
        names = ", ".join(slot.registered_name for slot in slots(config))
        return f"{key}=[{names}]" if names else None

    return feature


def _set(key: str, *unused: object) -> Feature:
    """A key below ``rollout`` that has another value than these."""

    def feature(config: ResolvedConfig) -> str | None:
        value: Any = reduce(getattr, key.split("."), config.rollout)
        return None if value in unused else f"rollout.{key}={'true' if value is True else value}"

    return feature


def _sampling(name: str, unused: object) -> Feature:
    """A sampling parameter of training or validation."""

    def feature(config: ResolvedConfig) -> str | None:
        sections = {"rollout": config.rollout.sampling, "trainer.validation": config.trainer.validation.sampling}
        values = {f"{path}.sampling.{name}": getattr(section, name) for path, section in sections.items()}
        return " and ".join(f"{key}={value}" for key, value in values.items() if value != unused) or None

    return feature


def _chained_truncation(config: ResolvedConfig) -> str | None:
    """Of training or validation."""
    sections = {"rollout": config.rollout.sampling, "trainer.validation": config.trainer.validation.sampling}
    chained = (
        f"{path}.sampling.top_p={own.top_p} with {' and '.join(others)}"
        for path, own in sections.items()
        if truncation_is_chained(own.top_p, own.top_k, own.min_p)
        and (others := [f"{key}={getattr(own, key)}" for key in ("top_k", "min_p") if getattr(own, key)])
    )
    return " and ".join(chained) or None


def _more_than_one(path: str, slot: ServedSlot, *keys: str) -> str | None:
    return " and ".join(f"{path}.{key}={getattr(slot, key)}" for key in keys if getattr(slot, key) > 1) or None


def _devices(path: str, slot_of: Callable[[ResolvedConfig], ServedSlot]) -> tuple[Requirement, ...]:
    """What the devices of a replica require of its engine."""
    axes = ("tensor_parallel", "pipeline_parallel", "data_parallel")
    return (
        Requirement(path, "parallel", lambda config: _more_than_one(path, slot_of(config), *axes)),
        Requirement(path, "multi_node", lambda config: _more_than_one(path, slot_of(config), "nodes")),
    )


def _devices_of_named(name: str) -> tuple[Requirement, ...]:
    return _devices(f"engines.{name}", lambda config: config.engines[name])


def _log_probs(config: ResolvedConfig) -> str | None:
    return " and ".join(filter(None, (_set("max_logprob_gap", None)(config), config.needs_rollout_log_probs))) or None


_finishes = _set("on_new_weights", "recompute", "continue", "restart")


def _asked_again(config: ResolvedConfig) -> str | None:
    """Requests that run while weights change are ended and asked again; with an adapter for the rest of them."""
    rollout = config.rollout
    again = config.serves_adapters and rollout.max_staleness and rollout.on_new_weights == "recompute"
    if rollout.on_new_weights == "restart" or again:
        return f"rollout.on_new_weights={rollout.on_new_weights}" + " with model.adapter" * bool(again)
    return None


def _remote(path: str) -> Feature:
    """The plugin of this slot has weights that stay at a server, or takes only such."""

    def feature(config: ResolvedConfig) -> str | None:
        slot = attrgetter(path)(config)
        return f"{path}.name={slot.name}" if slot.has("remote_weights") else None

    return feature


def _where(feature: str, used: Callable[[ResolvedConfig], object]) -> Feature:
    """A feature of training, where a configuration uses it."""
    return lambda config: feature if used(config) else None


def _some_role(*keys: str) -> Feature:
    """The first of these keys that the section of a training role sets."""

    def feature(config: ResolvedConfig) -> str | None:
        roles = {"actor": True, "critic": config.needs_critic, "reference": config.needs_reference}
        roles["teacher"] = config.teacher.path is not None
        used = [role for role, is_used in roles.items() if is_used]
        names = (f"{role}.{key}=true" for role in used for key in keys if getattr(getattr(config, role), key, False))
        return next(names, None)

    return feature


def _entropies(config: ResolvedConfig) -> str | None:
    """Where something is computed from them; as a metric they are left out."""
    for own in config.trained.values():
        algorithm = own.algorithm
        if algorithm.entropy_coef or algorithm.entropy_target is not None:
            return "algorithm.entropy_coef" if algorithm.entropy_coef else "algorithm.entropy_target"
        for key, slot in (("loss", algorithm.loss), ("advantage", algorithm.advantage)):
            if slot.has("entropies"):
                return f"algorithm.{key}={slot.registered_name}"
    return None


def _temperature(config: ResolvedConfig) -> str | None:
    value = config.rollout.sampling.temperature
    return None if value in (0, 1) else f"rollout.sampling.temperature={value}"


def _router_replay(config: ResolvedConfig) -> str | None:
    replays = any(own.actor.router_replay for own in config.trained.values())
    return "actor.router_replay=true" if replays else None


_BACKEND = "trainer.backend"

REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        _BACKEND,
        "all_weights",
        _where("model.adapter=null", lambda config: config.model.adapter is None and not config.policies),
        training=True,
    ),
    Requirement(_BACKEND, "adapters", _where("model.adapter", lambda config: config.model.adapter), training=True),
    Requirement(_BACKEND, "policies", _where("policies", lambda config: config.policies), training=True),
    Requirement(_BACKEND, "critic", _where("a critic", lambda config: config.needs_critic), training=True),
    Requirement(_BACKEND, "entropies", _entropies, training=True),
    Requirement(_BACKEND, "temperature", _temperature, training=True),
    Requirement(
        _BACKEND,
        "ranks",
        _where(
            "training in several processes (cluster.processes_per_node, cluster.nodes)",
            lambda config: config.cluster.processes > 1,
        ),
        training=True,
    ),
    Requirement(_BACKEND, "freeze", _where("model.freeze", lambda config: config.model.freeze), training=True),
    Requirement(_BACKEND, "quantize", _where("model.quantize", lambda config: config.model.quantize), training=True),
    Requirement(_BACKEND, "offload", _some_role("offload_parameters", "offload_optimizer"), training=True),
    Requirement(_BACKEND, "router_replay", _router_replay, training=True),
    Requirement("rollout.engine", "routed_experts", _router_replay, training=True),
    Requirement("rollout.engine", "weight_update", lambda config: "training", training=True),
    Requirement("rollout.engine", "deterministic", _set("deterministic", False)),
    Requirement("rollout.engine", "logprobs", _log_probs),
    Requirement("rollout.engine", "live_update", _set("max_staleness", 0), training=True),
    Requirement("rollout.engine", "old_cache", _set("on_new_weights", "recompute", "restart", "finish"), training=True),
    Requirement("rollout.engine", "pause", _asked_again, training=True),
    Requirement("rollout.engine", "adapters", _finishes, training=True),
    Requirement("rollout.engine", "sleep", _set("engine.sleep", 0, None), training=True),
    Requirement("rollout.engine", "broadcast", _set("engine.weight_transfer", "auto", "host_memory"), training=True),
    Requirement("rollout.engine", "remote_weights", _remote("trainer.backend"), training=True),
    Requirement("trainer.backend", "remote_weights", _remote("rollout.engine"), training=True),
    *(Requirement("rollout.engine", name, _sampling(name, unused)) for name, unused in RESHAPING.items()),
    Requirement("rollout.engine", "chained_truncation", _chained_truncation),
    *_devices("rollout.engine", lambda config: config.rollout.engine),
    Requirement("rollout.agent.loops", "tools", _listed("tools", lambda config: config.tools)),
    Requirement("rollout.agent.loops", "interactions", _listed("interactions", lambda config: config.interactions)),
)


def missing_capabilities(
    config: ResolvedConfig, *, training: bool, alternatives: Alternatives
) -> Iterator[tuple[str, str]]:
    """The requirements of one phase that no plugin of their slot meets, as ``(key path, message)``.

    Args:
        config: the configuration.
        training: those that only training needs, or those that loading needs already.
        alternatives: what to propose.
    """
    named = (_devices_of_named(name) for name in config.engines)
    for requirement in (*REQUIREMENTS, *chain.from_iterable(named)):
        feature = requirement.feature(config)
        if feature is None or requirement.training != training:
            continue
        slots = {
            path: slot
            for path, slot in slots_by_path(config)
            if path == requirement.slot or path.rpartition(".")[0] == requirement.slot
        }
        if slots and not any(slot.has(requirement.capability) for slot in slots.values()):
            key = f"{requirement.slot}.name" if requirement.slot in slots else requirement.slot
            yield key, _message(list(slots.values()), requirement.capability, feature, config, alternatives)


def _message(
    slots: Sequence[Slot], capability: str, feature: str, config: ResolvedConfig, alternatives: Alternatives
) -> str:
    kind = KINDS[slots[0].kind]
    names = ", ".join(repr(slot.plugin.spec.name) for slot in slots)
    subject = f"{kind.title} {names} lacks" if len(slots) == 1 else f"each {kind.title} ({names}) lacks"
    able = ", ".join(alternatives(kind.kind, capability, config.plugins.block))
    none = f"none installed has it (agentrl plugins list --kind {kind.kind})"
    remedy = f"installed with it: {able}" if able else none
    return f"{subject} the capability '{capability}', which {feature} needs; {remedy}"


def installed_with(kind: str, capability: str, block: Sequence[str]) -> list[str]:
    """Names of the installed plugins that could be used here, or by an engine in its own environment."""
    from agentrl_core.plugins.discovery import discover

    usable = [row for row in discover([kind], block) if row.status in ("ok", "external", "duplicate")]
    able = [row for row in usable if capability in row.capabilities]
    return sorted(f"{row.dist}:{row.name}" if row.status == "duplicate" else row.name for row in able)
