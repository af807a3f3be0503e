"""OpenEnv environment classes as episodes of a worker."""

import asyncio
import functools
import json
import typing
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

from agentrl_core.api import (
    ConfigError,
    Environment,
    EnvironmentContext,
    Episode,
    InteractionTurn,
    RewardResult,
    RewardTrajectory,
    ToolResponse,
    ToolResult,
)
from agentrl_core.api.dataset import Split
from agentrl_env_openenv.config import OpenEnvConfig

TOOL = "act"


class OpenEnv(Environment):
    """One object of the class for each trajectory.

    The class has ``reset(seed, **kwargs)`` and ``step(action)``, which return observations with ``done`` and
    ``reward``; actions and observations are pydantic models. ``reset_async`` and ``step_async`` are preferred where
    the class has its own.

    Raises:
        ConfigError: a class that is missing or has another interface.
    """

    config: OpenEnvConfig

    def __init__(self, config: OpenEnvConfig, context: EnvironmentContext) -> None:
        super().__init__(config, context)
        where = f"environment {context.name!r}"
        self._cls = _load(f"{where}: environment", config.environment)
        if missing := [name for name in ("reset", "step") if not callable(getattr(self._cls, name, None))]:
            raise ConfigError(
                f"{where}: {config.environment} has no method {' and no '.join(missing)}. Name the environment class "
                "of the server, not its client"
            )
        self.action = self._action(where)
        fields = self.action.model_fields
        if config.text_field is not None and config.text_field not in fields:
            raise ConfigError(
                f"{where}: text_field is {config.text_field!r}, but {self.action.__name__} has the fields "
                f"{', '.join(name for name in fields if name != 'metadata')}"
            )

    def _action(self, where: str) -> Any:
        if self.config.action is not None:
            found = _load(f"{where}: action", self.config.action)
        else:
            try:
                found = typing.get_type_hints(self._cls.step).get("action")
            except NameError:
                found = None
        if not hasattr(found, "model_json_schema"):
            raise ConfigError(
                f"{where}: the class of the actions is {found!r}, which is no pydantic model. Set action to one, such "
                "as my_env.models:MyAction"
            )
        return found

    def tasks(self, split: Split) -> Sequence[Mapping[str, Any]]:
        count = self.config.tasks if split == "train" else self.config.validation_tasks
        return [{"extra_info": {"split": split, "index": index}} for index in range(count)]

    async def open(self, task: Mapping[str, Any], seed: int) -> Episode:
        given = {"seed": seed % 2**32, **self.config.reset}
        if self.config.send_index:
            place = task["extra_info"]
            given |= {"split": "train" if place["split"] == "train" else "test", "index": place["index"]}
        world = _World()
        try:
            await world.make(self._cls, self.config.arguments)
            first = await world.call("reset", **given)
            return _Acting(self, world, first)
        except BaseException:
            await world.close()
            raise

    def text(self, observation: Any) -> str:
        """What the policy reads of an observation."""
        shown = observation.model_dump(mode="json", exclude={"done", "reward", "metadata"})
        if (names := self.config.observation) is not None:
            if unknown := [name for name in names if name not in shown]:
                raise ValueError(
                    f"the observation has no field {', '.join(unknown)}; in the option observation, choose from "
                    f"{', '.join(shown)}"
                )
            shown = {name: shown[name] for name in names}
        if len(shown) == 1 and isinstance(only := next(iter(shown.values())), str):
            return only
        return json.dumps(shown, ensure_ascii=False)


class _World:
    """The environment object in a thread of its own, because some use libraries that stay in one thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "openenv")
        self._object: Any = None

    async def make(self, cls: Any, arguments: Mapping[str, Any]) -> None:
        self._object = await self._run(functools.partial(cls, **arguments))

    async def call(self, name: str, *values: Any, **given: Any) -> Any:
        """Await the class's own coroutine method, or run the plain one in the thread."""
        owners = [cls for cls in type(self._object).__mro__ if f"{name}_async" in vars(cls)]
        # The default of OpenEnv's base class calls the plain method, which would block the event loop.
        if owners and not owners[0].__module__.startswith("openenv.core."):
            return await getattr(self._object, f"{name}_async")(*values, **given)
        return await self._run(functools.partial(getattr(self._object, name), *values, **given))

    async def close(self) -> None:
        try:
            if callable(close := getattr(self._object, "close", None)):
                await self._run(close)
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class _Acting(Episode):
    def __init__(self, environment: OpenEnv, world: _World, first: Any) -> None:
        self._environment = environment
        self._world = world
        self._steps = 0
        self._done = bool(first.done)
        config = environment.config
        said = [part for part in (config.prompt, environment.text(first)) if part]
        self.messages = [{"role": "user", "content": "\n\n".join(said)}]
        if config.text_field is None:
            parameters = environment.action.model_json_schema()
            parameters.get("properties", {}).pop("metadata", None)
            about = parameters.pop("description", None) or "Acts in the environment."
            function = {"name": TOOL, "description": about, "parameters": parameters}
            self.tools = [{"type": "function", "function": function}]

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        text, reward, done = await self._step(arguments)
        return ToolResult(ToolResponse(text), reward, done=done)

    async def reply(self, messages: Sequence[dict[str, Any]]) -> InteractionTurn:
        field = self._environment.config.text_field
        if field is None:
            return InteractionTurn(terminate=True, text="")
        text, reward, done = await self._step({field: messages[-1]["content"]})
        return InteractionTurn(done, "" if done else text, reward)

    async def _step(self, fields: Mapping[str, Any]) -> tuple[str, float | None, bool]:
        action = self._environment.action(**fields)
        if self._done:
            raise RuntimeError("the episode is over")
        observation = await self._world.call("step", action)
        self._steps += 1
        self._done = bool(observation.done)
        reward = None if observation.reward is None else float(observation.reward)
        return self._environment.text(observation), reward, self._done

    async def score(self, trajectory: RewardTrajectory) -> RewardResult:
        """Nothing in addition to the rewards of the steps."""
        return RewardResult(0.0, components={"steps": float(self._steps), "finished": float(self._done)})

    async def close(self) -> None:
        await self._world.close()


def _load(where: str, path: str) -> Any:
    module, _, name = path.partition(":")
    if not module or not name:
        raise ConfigError(f"{where} is {path!r}; write it as package.module:Class")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{where}: {path} cannot be imported: {error}. Install the environment's package next to agentrl; the "
            "library itself is in agentrl-env-openenv[openenv]"
        ) from error
