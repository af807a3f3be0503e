"""Whether the tensors of a LoRA adapter fit the model: checked before a byte of them reaches the server."""

import difflib
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from agentrl_core.api.errors import EngineError
from agentrl_core.api.weights import LoraAdapter, WeightUpdate
from agentrl_core.engine_kit.model_tensors import ModelTensors, broken_buckets, differences, shapes_of

PREFIX = "base_model.model."
"""Before the name of each module in an adapter that PEFT has saved."""
SIDES = ("lora_A", "lora_B")
_WEIGHT = ".weight"


@dataclass(frozen=True)
class AdapterRules:
    """Which adapters an engine takes.

    Args:
        max_rank: the highest rank.
        modules: names of the modules that it can adapt, as in the model's files, without ``.weight``.
        limit: what sets ``max_rank``, for the message.
    """

    max_rank: int
    modules: Collection[str]
    limit: str = "the engine's limit"

    def check(self, update: WeightUpdate, model: ModelTensors) -> None:
        """Whether an update's adapter is one for this model.

        Args:
            update: with an adapter.
            model: the one to adapt.

        Raises:
            EngineError: with everything that is wrong: a rank that is too high, target modules that the model or the
                engine does not have, tensors of other modules or other shapes, missing ones, bytes that don't add up.
        """
        adapter = update.adapter
        if adapter is None:
            raise EngineError("this update has no adapter")
        buckets = list(update)
        problems = list(broken_buckets(buckets))
        if not problems:
            wanted = _expected(adapter, model)
            fit = f"target_modules and rank {adapter.rank} have"
            problems = [
                *self._rank(adapter), *self._targets(adapter, model), *differences(shapes_of(buckets), wanted, fit)
            ]  # fmt: skip
        if problems:
            raise EngineError(
                "LoRA adapter refused, nothing was sent:\n" + "\n".join(f"  - {problem}" for problem in problems)
            )

    def _rank(self, adapter: LoraAdapter) -> Iterator[str]:
        if adapter.rank < 1:
            yield f"rank {adapter.rank}: it must be at least 1"
        if adapter.rank > self.max_rank:
            yield f"rank {adapter.rank}: the highest allowed is {self.max_rank} ({self.limit})"

    def _targets(self, adapter: LoraAdapter, model: ModelTensors) -> Iterator[str]:
        modules = adaptable_modules(model)
        if not adapter.target_modules:
            yield "target_modules is empty; it must name at least one module"
        for target in adapter.target_modules:
            meant = [module for module in modules if _is_meant(module, target)]
            known = sorted({module.rpartition(".")[2] for module in self.modules})
            if not meant:
                near = difflib.get_close_matches(target, known, n=1)
                yield f"target module {target}: the model has none" + (f" (nearest: {near[0]})" if near else "")
            elif not set(meant) <= set(self.modules):
                yield f"target module {target}: the engine cannot adapt it; it can {', '.join(known)}"


def adaptable_modules(model: ModelTensors) -> list[str]:
    """Modules with a matrix, which LoRA can adapt; the engine may not be able to adapt all of them."""
    return [
        name.removesuffix(_WEIGHT) for name, shape in model.shapes.items() if len(shape) == 2 and name.endswith(_WEIGHT)
    ]


def tensor_names(module: str) -> tuple[str, str]:
    """Names of a module's lora_A and lora_B."""
    return f"{PREFIX}{module}.{SIDES[0]}{_WEIGHT}", f"{PREFIX}{module}.{SIDES[1]}{_WEIGHT}"


def _is_meant(module: str, target: str) -> bool:
    # PEFT's own rule.
    return module == target or module.endswith(f".{target}")


def _expected(adapter: LoraAdapter, model: ModelTensors) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for module in adaptable_modules(model):
        if any(_is_meant(module, target) for target in adapter.target_modules):
            size_out, size_in = model.shapes[module + _WEIGHT]
            a, b = tensor_names(module)
            shapes |= {a: (adapter.rank, size_in), b: (size_out, adapter.rank)}
    return shapes
