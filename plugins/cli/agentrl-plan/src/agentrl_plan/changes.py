"""The smallest changes of a configuration that make it fit, each tried."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from agentrl_core.config import ResolvedConfig
from agentrl_plan.devices import GIB
from agentrl_plan.prediction import KV_CACHE, RESERVED, Prediction

Try = Callable[[Sequence[str]], Prediction]
"""Predicts the configuration with overrides."""
WANTED = 3


@dataclass(frozen=True)
class Change:
    """Overrides with which a configuration fits, and the peak then, in bytes."""

    overrides: tuple[str, ...]
    peak: int

    def __str__(self) -> str:
        return f"{' '.join(self.overrides)}: {self.peak / GIB:.1f} GiB"


def candidates(config: ResolvedConfig) -> Iterator[str]:
    """Single overrides, those that change least first."""
    engine, actor = config.rollout.engine, config.actor
    on_ray = config.cluster.runtime == "ray"
    if on_ray and engine.placement == "colocated" and engine.sleep in (0, 1) and engine.has("sleep"):
        yield "rollout.engine.sleep=2"
    if not config.model.gradient_checkpointing:
        yield "model.gradient_checkpointing=true"
    if not actor.offload_optimizer:
        yield "actor.offload_optimizer=true"
    for divisor in (2, 4):
        yield f"actor.micro_batch_tokens={max(actor.micro_batch_tokens // divisor, 1)}"
    if config.needs_reference and not config.reference.offload_parameters:
        yield "reference.offload_parameters=true"
    if config.model.dtype == "float32":
        yield "model.dtype=bfloat16"
    if config.model.adapter is None:
        yield "model.adapter.rank=16"
    elif config.model.quantize is None and config.cluster.processes == 1:
        yield "model.quantize=4bit"
    if on_ray:
        yield f"cluster.processes_per_node={config.cluster.processes_per_node * 2}"
        yield f"cluster.nodes={config.cluster.nodes * 2}"
    yield f"rollout.max_response_length={max(config.rollout.max_response_length // 2, 1)}"


def changes(config: ResolvedConfig, attempt: Try) -> list[Change]:
    """Up to three changes of one key that fit; if there is none, one of several keys; empty if none fits either."""
    tried = list(candidates(config))
    last = {override.partition("=")[0]: override for override in tried}
    everything = attempt(list(last.values()))
    if not everything.fits:
        return []
    found: dict[str, Change] = {}
    for override in tried:
        key = override.partition("=")[0]
        if key not in found and len(found) < WANTED and (prediction := attempt([override])).fits:
            found[key] = Change((override,), prediction.peak)
    if found:
        return list(found.values())
    for count in range(2, len(last)):
        together = tuple(last.values())[:count]
        if (prediction := attempt(together)).fits:
            return [Change(together, prediction.peak)]
    return [Change(tuple(last.values()), everything.peak)]


def largest_model(prediction: Prediction) -> str:
    """Which model would fit, where memory grows with its parameters; an estimate."""
    phase = prediction.phases[prediction.worst]
    fixed = phase.memory.get(RESERVED, 0)
    if prediction.usable <= fixed:
        return f"{RESERVED} alone take {fixed / GIB:.1f} GiB"
    most, count = (prediction.usable - fixed) / max(phase.total - fixed, 1), prediction.parameters / 1e9
    return f"a model of about {most * count:.3g} billion parameters would (this one has {count:.3g})"


def spare(config: ResolvedConfig, prediction: Prediction, attempt: Try) -> str:
    """What is left, and the key that uses it."""
    engine, cache = prediction.engine, prediction.phases["rollout"].memory[KV_CACHE] if prediction.engine else 0
    # While engines sample, the KV cache takes what is left.
    peak = max(phase.total for name, phase in prediction.phases.items() if name != "rollout")
    left = f"{(prediction.usable - peak) / GIB:.1f} GiB are left while it trains"
    more = f"actor.micro_batch_tokens={2 * config.actor.micro_batch_tokens}"
    found = f"{left}: {more} fits too" if attempt([more]).fits else f"{left}, too little for {more}"
    if engine is not None and cache < engine.kv_cache:
        count = cache // engine.request
        found += f"; the KV cache holds {count} of the {engine.in_flight} requests in flight at full length"
    return found
