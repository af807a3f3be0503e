"""Reward managers that add up like ``naive`` and change one thing."""

import asyncio
import inspect
import pkgutil
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from agentrl_core.api import (
    BoundRewardFunction,
    RewardError,
    RewardManagerContext,
    RewardResult,
    RewardTrajectory,
)
from agentrl_rewards_basic.config import BatchConfig, BySourceConfig, DapoConfig, RateLimitedConfig
from agentrl_rewards_basic.length import check_lengths, sampled_tokens, soft_overlong
from agentrl_rewards_basic.manager import NaiveRewardManager

OTHERS = "*"


class BySourceRewardManager(NaiveRewardManager):
    """Only the functions that ``sources`` names for a row's ``data_source`` are called and count.

    A gate applies where its function counts.

    Raises:
        ValueError: ``sources`` names a function that is not configured, or leaves one out everywhere.
        RewardError: there is neither an entry for a trajectory's ``data_source`` nor ``"*"``.
    """

    config: BySourceConfig

    def __init__(self, config: BySourceConfig, context: RewardManagerContext) -> None:
        super().__init__(config, context)
        for source, names in config.sources.items():
            self.check_names(f"sources.{source}", names)
        used = {name for names in config.sources.values() for name in names}
        unused = [function.name for function in context.functions if function.name not in used]
        if unused:
            raise ValueError(
                f"reward.manager.config.sources never uses the function {unused[0]!r}; add it to a source or remove it "
                "from reward.functions"
            )

    def functions_of(self, trajectory: RewardTrajectory) -> Sequence[BoundRewardFunction]:
        sources = self.config.sources
        names = sources.get(trajectory.data_source, sources.get(OTHERS))
        if names is None:
            raise RewardError(
                f"reward.manager.config.sources has no entry for data_source {trajectory.data_source!r}; it has "
                f"{', '.join(sources) or 'none'}; add one, or '*' for all others"
            )
        return [function for function in self.context.functions if function.name in names]


class DapoRewardManager(NaiveRewardManager):
    """The sum of ``naive`` + overlong_weight R_length, arXiv 2503.14476, equation 13; see ``length_penalty``.

    ``R_length`` is the component ``overlong``. It counts also where a gate is closed.
    """

    config: DapoConfig

    def __init__(self, config: DapoConfig, context: RewardManagerContext) -> None:
        super().__init__(config, context)
        check_lengths(config, "reward.manager.config")

    async def score(self, trajectory: RewardTrajectory) -> RewardResult:
        result = await super().score(trajectory)
        overlong = soft_overlong(sampled_tokens(trajectory, "reward manager 'dapo'"), self.config)
        score = result.score + self.config.overlong_weight * overlong
        return replace(result, score=score, components={**result.components, "overlong": overlong})


class RateLimitedRewardManager(NaiveRewardManager):
    """At most ``concurrency`` calls of functions at a time and ``rate`` per second, each reward worker for itself.

    The wait counts towards ``reward.timeout``, not towards the ``timeout`` of a function.
    """

    config: RateLimitedConfig

    def __init__(self, config: RateLimitedConfig, context: RewardManagerContext) -> None:
        super().__init__(config, context)
        self._free = asyncio.Semaphore(config.concurrency)
        self._tokens = float(config.burst)
        self._at = 0.0

    async def call(self, function: BoundRewardFunction, trajectory: RewardTrajectory) -> RewardResult:
        async with self._free:
            await self._take()
            return await function(trajectory)

    async def _take(self) -> None:
        """Take a token from the bucket. A negative number of tokens is a queue: each call waits for its own token."""
        rate = self.config.rate
        if rate is None:
            return
        now = time.monotonic()
        self._tokens = min(self.config.burst, self._tokens + (now - self._at) * rate) - 1
        self._at = now
        if self._tokens < 0:
            await asyncio.sleep(-self._tokens / rate)


class BatchRewardManager(NaiveRewardManager):
    """The sum of ``naive`` + weight f(samples)_i, where ``function`` f scores all samples of a prompt in one call.

    f takes a list of ``RewardTrajectory`` and returns, or is a coroutine function that returns, one number for each. A
    plain function runs in a thread. Its score is the component ``batch``. Samples that failed are not in the list.

    Raises:
        RewardError: f returned something else.
    """

    config: BatchConfig
    needs_a_source: ClassVar[bool] = False

    def __init__(self, config: BatchConfig, context: RewardManagerContext) -> None:
        super().__init__(config, context)
        named: Any = config.function
        self._function = pkgutil.resolve_name(named) if isinstance(named, str) else named

    async def score_group(
        self, trajectories: Sequence[RewardTrajectory], results: Sequence[RewardResult]
    ) -> Sequence[RewardResult]:
        scores = await asyncio.to_thread(self._function, list(trajectories))
        if inspect.isawaitable(scores):
            scores = await scores
        try:
            numbers = [float(score) for score in scores]
        except (TypeError, ValueError):
            numbers = []
        if len(numbers) != len(results):
            raise RewardError(
                f"the function of reward.manager.config.function returned {scores!r:.200} for {len(results)} samples; "
                "return a list with one number for each"
            )
        return [
            replace(
                result,
                score=result.score + self.config.weight * number,
                components={**result.components, "batch": number},
            )
            for result, number in zip(results, numbers, strict=True)
        ]
