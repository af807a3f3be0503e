"""Rewards: functions with their deadlines, and the worker that combines them with the reward manager."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl_core.api import (
    EngineClient,
    Engines,
    RewardError,
    RewardFunctionContext,
    RewardManager,
    RewardManagerContext,
    RewardResult,
    RewardTrajectory,
)
from agentrl_core.config.schema import RewardConfig, RewardFunctionSlot
from agentrl_core.engine_kit.media import parts_of
from agentrl_core.hosting.process_host import ProcessHost, ProcessPool, engines_of_child
from agentrl_core.hosting.tools import is_finite
from agentrl_core.plugins.boundary import boundary, within
from agentrl_core.runs.media import RunImages, ShownImages


def build_reward_function(slot: RewardFunctionSlot, engines: Engines, check_only: bool = False) -> Any:
    """Return the callable of a resolved slot."""
    return slot.build(RewardFunctionContext(slot.registered_name, engines, check_only))


class HostedRewardFunction:
    """One configured function with its name, weight and deadline; its results are checked.

    Unless the slot says otherwise, a function from a file runs in a separate process, because nothing is known about
    it, and a packaged one runs where its ``isolation`` says, by default inline.

    Args:
        slot: a resolved slot of the configuration.
        clients: of the named engines.
        check_only: as in :class:`RewardFunctionContext`; the function is never called.
    """

    def __init__(
        self, slot: RewardFunctionSlot, clients: Mapping[str, EngineClient] | None = None, check_only: bool = False
    ) -> None:
        self.name = slot.registered_name
        self.weight = slot.weight
        self._timeout = slot.timeout
        self._range = slot.range
        title = f"reward function {self.name!r}"
        engines = Engines(clients, user=title)
        function = build_reward_function(slot, engines, check_only or slot.isolation == "process")
        declared = getattr(function, "isolation", "process" if inspect.isfunction(function) else "inline")
        self.function = function
        self._pool: ProcessPool | None = None
        if (slot.isolation or declared) == "process":
            none = engines_of_child(title, engines.asked)
            self._pool = ProcessPool(
                lambda: ProcessHost(build_reward_function, (slot, none), title, slot.env), slot.processes
            )

    async def __call__(self, trajectory: RewardTrajectory) -> RewardResult:
        who = f"reward function {self.name!r}"
        with boundary(RewardError, f"{who} raised"):
            value = await self._call(trajectory, who)
        result = check_score(who, value)
        if self._range and not self._range[0] <= result.score <= self._range[1]:
            raise RewardError(f"{who} returned {result.score:g}, outside of its range {self._range}")
        return result

    async def _call(self, trajectory: RewardTrajectory, who: str) -> Any:
        if self._pool is not None:
            return await self._pool.call("", (trajectory,), {}, self._timeout)
        value = self.function(trajectory)
        if not inspect.isawaitable(value):
            return value
        return await within(self._timeout, value, f"{who}: no answer within {self._timeout:g} s")

    async def close(self) -> None:
        """Stop all child processes."""
        if self._pool is not None:
            await self._pool.close()


def check_score(who: str, value: Any) -> RewardResult:
    """Turn a score into a :class:`RewardResult` with a finite number.

    Raises:
        RewardError: ``value`` is something else; nothing is ever coerced to 0.
    """
    result = value if isinstance(value, RewardResult) else RewardResult(value)
    score: Any = result.score
    try:
        if isinstance(score, (str, bytes)):
            raise TypeError
        number = float(score)
    except (TypeError, ValueError, OverflowError):
        raise RewardError(f"{who} returned {score!r:.100}; allowed are a number, a bool or a RewardResult") from None
    if not isinstance(result.answer, str | None):
        raise RewardError(f"{who} returned the answer {result.answer!r:.100}; allowed are a string and None")
    try:
        numbers = {"score": number, **result.metrics, **{f"component {key}": v for key, v in result.components.items()}}
        for name in ("turn_rewards", "token_rewards"):
            numbers |= {f"{name}[{index}]": value for index, value in enumerate(getattr(result, name))}
    except (TypeError, AttributeError) as error:
        raise RewardError(
            f"{who} returned a RewardResult in which metrics or components are no dict, or turn_rewards or "
            f"token_rewards no list: {error}"
        ) from None
    for name, found in numbers.items():
        if not is_finite(found):
            raise RewardError(f"{who} returned {name}={found!r}, which is not a finite number")
    return result if type(score) is float else replace(result, score=number)


class EnvironmentScore:
    """What environments gave, as a configured function that managers combine with others; 0 without an environment."""

    name = "environment"
    weight = 1.0

    async def __call__(self, trajectory: RewardTrajectory) -> RewardResult:
        return trajectory.environment or RewardResult(0.0)


def build_manager(
    config: RewardConfig, functions: Sequence[HostedRewardFunction], loops_reward: bool, environments: bool
) -> RewardManager:
    """Return the manager over these functions; the other arguments are those of :class:`RewardWorker`."""
    scores = [EnvironmentScore()] if environments else []
    manager: RewardManager = config.manager.build(RewardManagerContext([*functions, *scores], loops_reward))
    return manager


class RewardWorker:
    """Scores trajectories one by one when they end. Built once, in this process or as an actor.

    Args:
        config: the section ``reward``, its slots resolved.
        loops_reward: as in :class:`RewardManagerContext`.
        clients: of the named engines.
        environments: the run has environments, which score.
        media: the images of the run; None: it shows none.
    """

    def __init__(
        self,
        config: RewardConfig,
        loops_reward: bool = False,
        clients: Mapping[str, EngineClient] | None = None,
        environments: bool = False,
        media: RunImages | None = None,
    ) -> None:
        self._media = media
        self._clients: Mapping[str, Any] = clients or {}
        self._functions = [HostedRewardFunction(slot, clients) for slot in config.functions]
        self._manager = build_manager(config, self._functions, loops_reward, environments)
        self._timeout = config.timeout
        self._name = config.manager.name

    async def score(self, trajectory: RewardTrajectory) -> RewardResult:
        """Return the reward of one trajectory.

        Raises:
            RewardError: a function or the manager failed, or ``reward.timeout`` passed.
        """
        result = await self._bounded(self._manager.score(self._shown(trajectory)))
        return check_score(f"reward manager {self._name!r}", result)

    async def score_group(
        self, trajectories: Sequence[RewardTrajectory], results: Sequence[RewardResult]
    ) -> list[RewardResult]:
        """Return the revised rewards of all samples of one prompt.

        Raises:
            RewardError: as :meth:`score`, or the manager returned another number of results.
        """
        revised = await self._bounded(self._manager.score_group([*map(self._shown, trajectories)], results))
        if not isinstance(revised, Sequence) or len(revised) != len(trajectories):
            found = f"{len(revised)} results" if isinstance(revised, Sequence) else type(revised).__name__
            raise RewardError(f"reward manager {self._name!r} returned {found} for {len(trajectories)} trajectories")
        return [check_score(f"reward manager {self._name!r}", result) for result in revised]

    def _shown(self, trajectory: RewardTrajectory) -> RewardTrajectory:
        """The trajectory with its images."""
        names = [] if self._media is None else [name for message in trajectory.messages for name in parts_of(message)]
        return replace(trajectory, images=ShownImages(self._media.read, names)) if self._media and names else trajectory

    async def _bounded(self, call: Any) -> Any:
        late = (
            f"reward manager {self._name!r}: no answer within {self._timeout:g} s (reward.timeout); if it "
            "waited for a free process, raise `processes` of the slow function"
        )
        with boundary(RewardError, f"reward manager {self._name!r} raised"):
            return await within(self._timeout, call, late)

    async def route(self, engine: str, method: str, *args: Any) -> Any:
        """Call a method of the router of a named engine."""
        return getattr(self._clients[engine].router, method)(*args)

    async def ping(self) -> None:
        """Answer, which shows that this process and its event loop respond."""

    async def close(self) -> None:
        """Stop all child processes."""
        for function in self._functions:
            await function.close()
