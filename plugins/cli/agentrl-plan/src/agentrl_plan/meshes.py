"""Meshes of training processes, each tried: see :mod:`agentrl_core.fsdp2.mesh`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from agentrl_core.api.errors import ConfigError
from agentrl_core.config import ResolvedConfig
from agentrl_core.fsdp2.backend import Fsdp2
from agentrl_core.fsdp2.config import Fsdp2Config
from agentrl_core.fsdp2.mesh import KEY
from agentrl_core.fsdp2.models import empty_causal_lm, experts_of
from agentrl_plan.devices import GIB
from agentrl_plan.prediction import Prediction

Attempt = Callable[[Fsdp2Config], Prediction]
"""Predicts a configuration with these options of the backend."""
MOST_SPLIT = 8
"""Parts of a layer or of a row: more than the processes of a node would wait for the network."""
_WHY = {
    "computing": "computes",
    "sending": "waits for weights and gradients of other processes",
    "waiting": "waits for parts of layers or rows on other processes",
    "optimizer": "steps",
}
"""By :attr:`agentrl_plan.prediction.PhaseFigures.seconds_of`."""


@dataclass(frozen=True)
class Tried:
    """Options of the backend, and what a step takes with them."""

    options: Fsdp2Config
    prediction: Prediction

    @property
    def seconds(self) -> float:
        """Of training, in a step: engines do not depend on the mesh."""
        return sum(phase.seconds for name, phase in self.prediction.phases.items() if name != "rollout")

    @property
    def peak(self) -> int:
        """Bytes while it trains."""
        return max(phase.total for name, phase in self.prediction.phases.items() if name != "rollout")

    @property
    def cost(self) -> tuple[bool, bool, float]:
        """What the best one has the least of. Estimates do not depend on a mesh: they come last."""
        cost = round(self.seconds, 2) if self.prediction.fits else float(self.peak)
        return bool(self.prediction.estimated), not self.prediction.fits, cost

    def seconds_of(self, what: str) -> float:
        """Of a step: see :attr:`agentrl_plan.prediction.PhaseFigures.seconds_of`."""
        return sum(phase.seconds_of.get(what, 0.0) for phase in self.prediction.phases.values())

    def __str__(self) -> str:
        if self.prediction.estimated:
            return f"{shown(self.options)}: not compared, because it cannot be simulated: {self.prediction.estimated}"
        verdict = "" if self.prediction.fits else ", does not fit"
        return f"{shown(self.options)}: {self.peak / GIB:.1f} GiB, {in_seconds(self.seconds)}{verdict}"


def in_seconds(value: float) -> str:
    """With two digits, or to a tenth of a second."""
    return f"{value:.1f} s" if value >= 10 else f"{value:.2g} s"


def shown(options: Fsdp2Config) -> str:
    """Options as overrides of a configuration."""
    split = [f"{KEY}.{name}={value}" for name, value in vars(options).items() if value != 1]
    return " ".join(split) or "FSDP2 over all processes"


def with_options(config: ResolvedConfig, options: Fsdp2Config) -> ResolvedConfig:
    """The configuration with these options of its backend."""
    backend = replace(config.trainer.backend, config=options)
    return replace(config, trainer=replace(config.trainer, backend=backend))


def best_mesh(config: ResolvedConfig, attempt: Attempt) -> tuple[list[Tried], str]:
    """Meshes that were tried, the best one first, and why that is the best.

    First each option alone, raised as long as that is better, then those that are better than none together. The best
    one fits and takes the least time for training, or the least memory if none fits. Of equal ones it is the one with
    the fewest options.

    Raises:
        ConfigError: figures of this run are estimates, which do not depend on a mesh.
    """
    tried: dict[str, Tried] = {}

    def result(options: Fsdp2Config) -> Tried:
        if shown(options) not in tried:
            tried[shown(options)] = Tried(options, attempt(options))
        return tried[shown(options)]

    plain, alone = result(Fsdp2Config()), dict[str, int]()
    if plain.prediction.estimated:
        raise ConfigError(
            f"--mesh: meshes cannot be compared, because figures are estimates: {plain.prediction.estimated}"
        )
    model = empty_causal_lm(config.model.path, config.model)
    for name, values in _values(config, model).items():
        cost = plain.cost
        for value in values:
            options = Fsdp2Config(**{name: value})
            if is_possible(config, model, options):
                if result(options).cost >= cost:
                    break
                alone[name], cost = value, result(options).cost
    for options in _together(alone):
        if is_possible(config, model, options):
            result(options)
    ranked = sorted(tried.values(), key=lambda each: (*each.cost, sum(vars(each.options).values())))
    return ranked, _reason(ranked[0], plain)


def _values(config: ResolvedConfig, model: Any) -> dict[str, list[int]]:
    """Numbers to try of each option: what divides processes, nodes or experts."""
    cluster = config.cluster
    text = model.config.get_text_config(decoder=True)
    near = [value for value in _divisors(cluster.processes_per_node) if value <= MOST_SPLIT]
    experts = [value for value in _divisors(experts_of(text) or 1) if cluster.processes % value == 0]
    replicas = _divisors(cluster.nodes)
    return {"tensor_parallel": near, "sequence_parallel": near, "expert_parallel": experts, "replicas": replicas}


def _divisors(number: int) -> list[int]:
    """But 1, ascending."""
    return [value for value in range(2, number + 1) if number % value == 0]


def _together(alone: dict[str, int]) -> Iterator[Fsdp2Config]:
    """The best values of two or more options."""
    names = list(alone)
    for number in range(2 ** len(names)):
        chosen = {name: alone[name] for place, name in enumerate(names) if number >> place & 1}
        if len(chosen) > 1:
            yield Fsdp2Config(**chosen)


def is_possible(config: ResolvedConfig, model: Any, options: Fsdp2Config) -> bool:
    """The options divide the processes and the model."""
    try:
        Fsdp2.check(options, model, config.model.adapter is not None, config.cluster.processes, "model.path")
    except ConfigError:
        return False
    return True


def _reason(best: Tried, plain: Tried) -> str:
    """Why this mesh and no other."""
    if not best.prediction.fits:
        return f"no mesh fits: the smallest is {best}"
    if best is plain:
        return f"cheapest: {best}. No other one that fits saves a hundredth of a second"
    if not plain.prediction.fits:
        return f"cheapest that fits: {best}. FSDP2 over all processes alone takes {plain.peak / GIB:.1f} GiB"
    saved = {what: plain.seconds_of(what) - best.seconds_of(what) for what in _WHY}
    what = max(saved, key=lambda each: saved[each])
    return (
        f"cheapest that fits: {best}. FSDP2 over all processes alone takes {in_seconds(plain.seconds)}: it "
        f"{_WHY[what]} for {in_seconds(plain.seconds_of(what))}, this one for {in_seconds(best.seconds_of(what))}"
    )
