"""Ends a run after a number of tokens, or at a cost.

A run that is resumed goes on counting: what was spent is in ``tinker-spent.json`` of the run's directory.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from agentrl_backend_tinker.config import LimitsConfig
from agentrl_core.api.errors import ConfigError
from agentrl_core.api.hooks import HookContext, hookimpl

logger = logging.getLogger(__name__)

FILE = "tinker-spent.json"
MILLION = 1_000_000


@dataclass(frozen=True)
class Spent:
    """Tokens so far, by kind."""

    prompt: float = 0.0
    sampled: float = 0.0
    trained: float = 0.0

    @property
    def tokens(self) -> float:
        return self.prompt + self.sampled + self.trained

    def cost(self, config: LimitsConfig) -> float:
        parts = (self.prompt, config.price_prompt), (self.sampled, config.price_sampled), (
            self.trained, config.price_trained,
        )  # fmt: skip
        return sum(tokens * price for tokens, price in parts) / MILLION


class Limits:
    """The hook. It looks after each step, so a run ends with the step in which it reached a limit."""

    def __init__(self, config: LimitsConfig, context: HookContext) -> None:
        self._config = config
        self._stop = context.stop
        self._file = context.run_dir / FILE
        self._spent = _read(self._file)
        self._seen: dict[str, float] = {}
        if reason := self._reached():
            # Each try to resume would cost a step.
            raise ConfigError(f"{reason} already before this run is resumed. Raise the limit to continue")

    @hookimpl
    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        spent = self._spent
        self._spent = spent = replace(
            spent,
            # Of validations too, whose tokens belong to no step.
            prompt=spent.prompt + self._new(metrics, "rollout/engine/total_prompt_tokens")
            + _sum(metrics, "actor/forward_tokens"),
            sampled=spent.sampled + self._new(metrics, "rollout/engine/total_sampled_tokens"),
            trained=spent.trained + _sum(metrics, "actor/trained_tokens"),
        )  # fmt: skip
        # A run that is killed while it writes keeps the old file.
        aside = self._file.with_suffix(".writing")
        aside.write_text(json.dumps(asdict(spent)) + "\n", encoding="utf-8")
        aside.replace(self._file)
        logger.info("step %d: %.0f tokens so far, cost %.4g", step, spent.tokens, spent.cost(self._config))
        if reason := self._reached():
            self._stop(reason)

    def _reached(self) -> str | None:
        config, spent = self._config, self._spent
        cost = spent.cost(config)
        if config.max_tokens is not None and spent.tokens >= config.max_tokens:
            return f"{spent.tokens:.0f} tokens reach max_tokens={config.max_tokens} of the hook tinker_limits"
        if config.max_cost is not None and cost >= config.max_cost:
            return f"a cost of {cost:.4g} reaches max_cost={config.max_cost:g} of the hook tinker_limits"
        return None

    def _new(self, metrics: Mapping[str, float], name: str) -> float:
        """What a total has grown by. Engines that were restarted begin again at 0."""
        total, before = metrics.get(name, 0.0), self._seen.get(name, 0.0)
        self._seen[name] = total
        return total - before if total >= before else total


def _sum(metrics: Mapping[str, float], name: str) -> float:
    """Of all policies."""
    return sum(value for key, value in metrics.items() if key == name or key.endswith(f"/{name}"))


def _read(file: Path) -> Spent:
    return Spent(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else Spent()
