"""LoRA adapters in an engine: whether an update fits, and which versions there are for which requests.

An engine may live in an interpreter without torch and PEFT: nothing here needs more than numpy.

versions = AdapterVersions(context.adapters)
entry = versions.enter(sampling_params)          # None: the model's own weights; raises ValueError for others
...
if versions.leave(entry):                        # nobody samples with it any more, and nobody may again
    free(entry.held)
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from agentrl_core.api.engine import AdapterSlots, SamplingParams
from agentrl_core.api.errors import EngineError
from agentrl_core.api.weights import Adapter, ArrayBucket, WeightUpdate
from agentrl_core.engine_kit.model_tensors import Shapes, problems_of

T = TypeVar("T")

PREFIX = "base_model.model."
"""With which the names of PEFT's tensors begin."""
UNSERVED = {
    "use_dora", "lora_bias", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "modules_to_save", "target_parameters",
    "trainable_token_indices", "layer_replication", "alora_invocation_tokens", "use_qalora", "use_bdlora",
    "arrow_config", "kasa_config", "monteclora_config", "velora_config",
}  # fmt: skip
"""Settings of PEFT that make an adapter something else than two matrices for each linear layer."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(eq=False)
class AdapterVersion(Generic[T]):
    """One version of an adapter that an engine holds.

    Args:
        name, version: of it.
        held: what the engine keeps for it.
        requests: that sample with it.
        kept: whether new requests may ask for it.
    """

    name: str
    version: int
    held: T
    requests: int = 0
    kept: bool = True


class AdapterVersions(Generic[T]):
    """The versions of adapters that requests can ask for, and those that requests still sample with.

    Args:
        slots: what the engine was started for; None: no adapters.
    """

    def __init__(self, slots: AdapterSlots | None) -> None:
        self._names = slots.names if slots is not None else ()
        self._count = slots.versions if slots is not None else 0
        self._kept: dict[str, list[AdapterVersion[T]]] = {name: [] for name in self._names}
        self._used: list[AdapterVersion[T]] = []

    def __iter__(self) -> Iterator[AdapterVersion[T]]:
        """All that the engine holds."""
        for entries in self._kept.values():
            yield from entries
        yield from self._used

    def add(self, name: str, version: int, held: T) -> list[AdapterVersion[T]]:
        """Take in a new version, the newest from now on. Returns those that must be freed now."""
        entries = [entry for entry in self._kept[name] if entry.version != version]
        entries.append(AdapterVersion(name, version, held))
        dropped = [entry for entry in self._kept[name] if entry not in entries[-self._count :]]
        self._kept[name] = entries[-self._count :]
        for entry in dropped:
            entry.kept = False
        self._used += [entry for entry in dropped if entry.requests]
        return [entry for entry in dropped if not entry.requests]

    def newest(self, name: str) -> AdapterVersion[T] | None:
        """Of an adapter; None before its first version."""
        return self._kept[name][-1] if self._kept[name] else None

    def enter(self, params: SamplingParams) -> AdapterVersion[T] | None:
        """A request begins; :meth:`leave` must follow.

        Returns:
            What it samples with; None: the model's own weights alone.

        Raises:
            ValueError: there is no such adapter or version.
        """
        name, version = params.adapter, params.version
        if not name:
            if version is not None:
                raise ValueError(f"version is {version} without an adapter; only adapters have versions: leave it out")
            return None
        if name not in self._names:
            raise ValueError(f"adapter is {name!r}; allowed: {_list(self._names, 'none, the engine has no adapters')}")
        entries = self._kept[name]
        if not entries:
            raise ValueError(f"adapter {name!r} has no version yet: its first one comes with update_weights()")
        found = entries[-1] if version is None else next((each for each in entries if each.version == version), None)
        if found is None:
            there = ", ".join(str(entry.version) for entry in entries)
            raise ValueError(f"adapter {name!r} has no version {version} (any more); there are: {there}")
        found.requests += 1
        return found

    def leave(self, entry: AdapterVersion[T] | None) -> bool:
        """A request has ended. True where what it sampled with must be freed now."""
        if entry is None:
            return False
        entry.requests -= 1
        if entry.kept or entry.requests:
            return False
        self._used.remove(entry)
        return True


def linear_modules(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Names of modules with a matrix, and its shape ``[out, in]``, from the tensors of a checkpoint."""
    return {name[:-7]: tuple(shape) for name, shape in shapes.items() if name.endswith(".weight") and len(shape) == 2}


def check_adapter(update: WeightUpdate, slots: AdapterSlots | None, modules: Mapping[str, tuple[int, ...]]) -> Adapter:
    """Whether an update is a new version of an adapter that this engine serves.

    Args:
        modules: shape ``[out, in]`` of each linear layer of the model, by name.

    Raises:
        EngineError: with all that is wrong; nothing has been changed.
    """
    adapter = update.adapter
    assert adapter is not None
    problems = list(_problems(adapter, slots, modules))
    if not problems and not update.shared:
        buckets = list(update)
        has_data = update.broadcast is None
        problems = problems_of(buckets, adapter_shapes(adapter.config, modules), has_data=has_data)
        if not problems and has_data:
            problems = [f"{name}: holds values that are not finite" for name in _not_finite(buckets)]
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise EngineError(f"adapter {adapter.name!r} refused, nothing was changed:\n{lines}")
    return adapter


def adapter_shapes(config: Mapping[str, Any], modules: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of an adapter with this ``adapter_config.json``."""
    shapes: dict[str, tuple[int, ...]] = {}
    for module in targeted(config, modules):
        out_features, in_features = modules[module]
        shapes[f"{PREFIX}{module}.lora_A.weight"] = (int(config["r"]), in_features)
        shapes[f"{PREFIX}{module}.lora_B.weight"] = (out_features, int(config["r"]))
    return shapes


def targeted(config: Mapping[str, Any], modules: Mapping[str, Any]) -> list[str]:
    """Those modules that the adapter changes, by PEFT's rules."""
    layers = config.get("layers_to_transform")
    allowed = {layers} if isinstance(layers, int) else None if layers is None else set(layers)
    return [
        name
        for name in modules
        if _matches(name, config.get("target_modules"))
        and not _matches(name, config.get("exclude_modules"))
        and (allowed is None or bool(allowed & {int(number) for number in re.findall(r"\.(\d+)\.", name)}))
    ]


def scaling(config: Mapping[str, Any]) -> float:
    """The factor of ``lora_B @ lora_A``."""
    rank = float(config["r"])
    return float(config.get("lora_alpha", 8)) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _matches(module: str, keys: Any) -> bool:
    if not keys:
        return False
    if isinstance(keys, str):
        return re.fullmatch(keys, module) is not None
    return any(module == key or module.endswith(f".{key}") for key in keys)


def _problems(adapter: Adapter, slots: AdapterSlots | None, modules: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    config = adapter.config
    if slots is None or adapter.name not in slots.names:
        names = () if slots is None else slots.names
        yield f"its name is not one of those that the engine serves: {_list(names, 'none, it was started without')}"
        return
    rank = config.get("r")
    if not isinstance(rank, int) or not 1 <= rank <= slots.rank:
        yield (
            f"r is {rank!r}; allowed: 1 to {slots.rank}, the rank that the engine was started with: start it with a "
            "higher one"
        )
    if config.get("peft_type", "LORA") != "LORA":
        yield f"peft_type is {config['peft_type']!r}; allowed: 'LORA'"
    if config.get("bias", "none") != "none":
        yield f"bias is {config['bias']!r}; allowed: 'none'"
    if str(config.get("init_lora_weights")).startswith(_CHANGES_BASE):
        yield f"init_lora_weights is {config['init_lora_weights']!r}, which changes the weights below; allowed: true"
    for key in sorted(UNSERVED & config.keys()):
        if config[key]:
            yield f"{key} is {config[key]!r}; engines serve plain LoRA: leave it out"
    found = {module.rpartition(".")[2] for module in targeted(config, modules)}
    if extra := sorted(found - set(slots.targets)):
        yield (
            f"target_modules name {', '.join(extra)}; allowed: {', '.join(slots.targets)}, the targets that the engine "
            "was started with"
        )
    if not found:
        yield f"target_modules are {config.get('target_modules')!r}, and the model has no such linear layer"


def _not_finite(buckets: list[ArrayBucket]) -> Iterator[str]:
    """One such value would reach the other requests of a batch: 0 x nan is nan."""
    for bucket in buckets:
        for name, _, dtype, data in bucket.tensors():
            if not _is_finite(np.ascontiguousarray(data).view(np.uint8), dtype):
                yield name


def _is_finite(data: "np.ndarray[Any, Any]", dtype: str) -> bool:
    if dtype == "bfloat16":
        exponents = data.copy().view(np.uint16) & 0x7F80
        return bool((exponents != 0x7F80).all())
    return bool(np.isfinite(data.copy().view(np.dtype(dtype))).all())


def _list(names: tuple[str, ...], otherwise: str) -> str:
    return ", ".join(names) or otherwise
