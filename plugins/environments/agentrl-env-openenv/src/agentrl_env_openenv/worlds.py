"""Where an OpenEnv environment runs: its class in the worker, or a server that speaks OpenEnv's WebSocket protocol.

Source of the protocol: openenv 0.10, openenv/core/env_server/http_server.py.
"""

import asyncio
import contextlib
import functools
import json
import typing
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from agentrl_core.api import ConfigError, HttpError, fetch_json
from agentrl_env_openenv.config import OpenEnvConfig

CONNECT_SECONDS = 10.0
"""For the schema of a server, which a run reads once, and for each connection."""

_TOO_BIG = 1009
"""WebSocket's code for a message that is longer than the receiver takes (RFC 6455, 7.4.1)."""
_APART = ("done", "reward", "metadata")


@dataclass(frozen=True)
class Observed:
    """An observation: its own fields, as JSON values or images, and what every observation has."""

    fields: Mapping[str, Any]
    reward: float | None
    done: bool


class World(Protocol):
    """One episode of an environment."""

    async def reset(self, given: Mapping[str, Any]) -> Observed:
        """The first observation."""

    async def step(self, fields: Mapping[str, Any]) -> Observed:
        """Act. Raises ValueError for fields that are no action."""

    def check(self) -> None:
        """Raises ConnectionError if the world was lost."""

    async def close(self) -> None:
        """Release it."""


class LocalWorlds:
    """Objects of a class, which has ``reset(seed, **kwargs)`` and ``step(action)``; both return observations.

    Actions and observations are pydantic models. ``reset_async`` and ``step_async`` are preferred where the class has
    its own.

    Attributes:
        action: JSON schema of its actions.
    """

    def __init__(self, where: str, config: OpenEnvConfig) -> None:
        path = config.environment or ""
        self._cls = _load(f"{where}: environment", path)
        self._arguments, self._images = config.arguments, config.images
        if missing := [name for name in ("reset", "step") if not callable(getattr(self._cls, name, None))]:
            raise ConfigError(
                f"{where}: {path} has no method {' and no '.join(missing)}. Name the environment class of the server, "
                "not its client"
            )
        self._action = self._found_action(where, config.action)
        self.action: dict[str, Any] = self._action.model_json_schema()

    def _found_action(self, where: str, path: str | None) -> Any:
        if path is not None:
            found = _load(f"{where}: action", path)
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

    async def open(self) -> World:
        world = _LocalWorld(self._act, self._images)
        await world.make(functools.partial(self._cls, **self._arguments))
        return world

    def _act(self, fields: Mapping[str, Any]) -> Any:
        if fields.get("type") == "list_tools" and "tool_name" in self._action.model_fields:
            return import_module(self._action.__module__).ListToolsAction()
        return self._action(**fields)


class _LocalWorld:
    """The object in a thread of its own, because some use libraries that stay in one thread.

    Args:
        act: makes an action of fields.
        images: fields of the observation that are passed on as they are.
    """

    def __init__(self, act: Any, images: Sequence[str]) -> None:
        self._thread = ThreadPoolExecutor(1, "openenv")
        self._act = act
        self._images = images
        self._object: Any = None

    async def make(self, make: Any) -> None:
        try:
            self._object = await self._run(make)
        except BaseException:
            await self.close()
            raise

    async def reset(self, given: Mapping[str, Any]) -> Observed:
        return _observed(await self._call("reset", **given), self._images)

    async def step(self, fields: Mapping[str, Any]) -> Observed:
        return _observed(await self._call("step", self._act(fields)), self._images)

    def check(self) -> None:
        pass

    async def close(self) -> None:
        try:
            if callable(close := getattr(self._object, "close", None)):
                await self._run(close)
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _call(self, name: str, *values: Any, **given: Any) -> Any:
        """Await the class's own coroutine method, or run the plain one in the thread."""
        owners = [cls for cls in type(self._object).__mro__ if f"{name}_async" in vars(cls)]
        # The default of OpenEnv's base class calls the plain method, which would block the event loop.
        if owners and not owners[0].__module__.startswith("openenv.core."):
            return await getattr(self._object, f"{name}_async")(*values, **given)
        return await self._run(functools.partial(getattr(self._object, name), *values, **given))

    async def _run(self, work: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class RemoteWorlds:
    """Sessions of a server: each connection has its own environment object.

    Attributes:
        action: JSON schema of its actions.
    """

    def __init__(self, where: str, config: OpenEnvConfig) -> None:
        self._url = (config.url or "").rstrip("/")
        if not self._url.startswith(("http://", "https://")):
            raise ConfigError(
                f"{where}: url is {config.url!r}; write the server's address, such as http://localhost:8000"
            )
        if unused := [name for name in ("action", "arguments") if getattr(config, name)]:
            raise ConfigError(
                f"{where}: {' and '.join(unused)} are for a class in the worker; the server at url has its own"
            )
        self._limit = config.max_body_bytes
        request = functools.partial(fetch_json, f"{self._url}/schema", timeout=CONNECT_SECONDS, limit=self._limit)
        try:
            # An event loop may run in this thread.
            with ThreadPoolExecutor(1) as other:
                self.action: dict[str, Any] = dict(other.submit(lambda: asyncio.run(request())).result()["action"])
        except (HttpError, ValueError, KeyError, TypeError) as error:
            what = (
                str(error) if isinstance(error, HttpError) else f"{self._url}/schema: {type(error).__name__}: {error}"
            )
            raise ConfigError(f"{where}: no schema of an OpenEnv server at {what}") from error

    async def open(self) -> World:
        address = f"ws{self._url.removeprefix('http')}/ws"
        connection = await connect(address, open_timeout=CONNECT_SECONDS, max_size=self._limit)
        return _RemoteWorld(connection, self._url)


class _RemoteWorld:
    def __init__(self, connection: ClientConnection, url: str) -> None:
        self._connection = connection
        self._url = url
        self._lost = ""

    async def reset(self, given: Mapping[str, Any]) -> Observed:
        return await self._ask("reset", given)

    async def step(self, fields: Mapping[str, Any]) -> Observed:
        return await self._ask("step", fields)

    def check(self) -> None:
        if self._lost:
            raise ConnectionError(self._lost)

    async def close(self) -> None:
        with contextlib.suppress(ConnectionClosed):
            await self._connection.send(json.dumps({"type": "close"}))
        await self._connection.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Observed:
        try:
            # A server that closed the connection has said why before.
            with contextlib.suppress(ConnectionClosed):
                await self._connection.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(await self._connection.recv())
        except BaseException as error:
            # After a deadline too: the answer that comes later belongs to no question.
            self._lost = f"the session at {self._url} ended: {type(error).__name__}: {error}"
            if isinstance(error, ConnectionClosed) and error.sent is not None and error.sent.code == _TOO_BIG:
                self._lost += ". Raise max_body_bytes of the environment if the server is right"
            if isinstance(error, ConnectionClosed):
                raise ConnectionError(self._lost) from error
            raise
        given = answer["data"]
        if answer["type"] == "error":
            raise self._failure(given)
        fields = {name: value for name, value in given["observation"].items() if name not in _APART}
        return Observed(fields, _number(given.get("reward")), bool(given.get("done")))

    def _failure(self, given: Mapping[str, Any]) -> Exception:
        code, message = given.get("code"), given.get("message")
        if code == "VALIDATION_ERROR":
            problems = [f"{'.'.join(map(str, e.get('loc', ())))}: {e.get('msg')}" for e in given.get("errors", ())]
            return ValueError("; ".join(problems) or message)
        if code in ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR"):
            self._lost = f"{self._url}: {message}"
        if code == "CAPACITY_REACHED":
            self._lost += (
                ". The trajectories in flight, rollout.agent.max_concurrent for each worker, need as many sessions; "
                "raise max_concurrent_envs of the server or lower that"
            )
        return ConnectionError(self._lost) if self._lost else RuntimeError(message)


def _observed(observation: Any, images: Sequence[str]) -> Observed:
    shown = observation.model_dump(mode="json", exclude={*_APART, *images})
    shown |= {name: getattr(observation, name) for name in images if hasattr(observation, name)}
    return Observed(shown, _number(observation.reward), bool(observation.done))


def _number(reward: Any) -> float | None:
    return None if reward is None else float(reward)


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
