"""Environments on a server: a stand-in that speaks the protocol and, where AGENTRL_OPENENV_PYTHON names a Python that
has openenv, a server of the package itself, which does not fit into the tested set of versions."""

import asyncio
import json
import os
import random
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.server import Request, Response, ServerConnection, serve
from websockets.datastructures import Headers

from agentrl_core.api import ConfigError, EnvironmentContext
from agentrl_env_openenv.config import OpenEnvConfig
from agentrl_env_openenv.environment import OpenEnv
from agentrl_env_openenv.plugin import ENVIRONMENT
from agentrl_testing.contracts import EnvironmentCase, EnvironmentContract
from agentrl_testing.contracts.case import run

TASK: dict[str, Any] = {"extra_info": {"split": "train", "index": 0}}
NUMBER = {
    "type": "object",
    "title": "Guess",
    "description": "Guesses the number.",
    "properties": {"metadata": {"type": "object"}, "number": {"type": "string"}},
    "required": ["number"],
}
CALL = {
    "type": "object",
    "title": "CallToolAction",
    "properties": {
        "metadata": {"type": "object"},
        "type": {"const": "call_tool", "default": "call_tool", "type": "string"},
        "tool_name": {"type": "string"},
        "arguments": {"type": "object"},
    },
    "required": ["tool_name"],
}
REAL = '''
import random, sys
import uvicorn
from fastmcp import FastMCP
from pydantic import Field
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

class Guess(Action):
    """Guesses the number."""
    number: str

class Hint(Observation):
    text: str

class Numbers(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, seed=None, episode_id=None, **kwargs):
        self.secret, self.left = random.Random(seed).randint(1, 9), 3
        return Hint(text="Guess a number from 1 to 9.")
    def step(self, action: Guess, timeout_s=None, **kwargs):
        self.left -= 1
        if action.number == str(self.secret):
            return Hint(text="Right.", done=True, reward=1.0)
        return Hint(text="No.", done=self.left == 0, reward=0.0)
    @property
    def state(self):
        return State()

class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        server = FastMCP("tools")
        @server.tool
        def add(a: int, b: int) -> int:
            """Adds."""
            return a + b
        @server.tool
        def fail() -> str:
            """Fails."""
            raise ValueError("out of order")
        @server.tool
        def say(text: str) -> str:
            """Says it."""
            return text
        super().__init__(server)
    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(done=False, reward=0.0, metadata={})
    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise ValueError("no such action")
    @property
    def state(self):
        return State()

kind, port, sessions = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
parts = (Numbers, Guess, Hint) if kind == "numbers" else (Tools, CallToolAction, CallToolObservation)
uvicorn.run(create_fastapi_app(*parts, max_concurrent_envs=sessions), host="127.0.0.1", port=port, log_level="warning")
'''


class StandIn:
    """What the server of openenv 0.10 answers, for the same two environments."""

    def __init__(self, kind: str, sessions: int) -> None:
        self.kind, self.sessions, self.open = kind, sessions, 0

    def schema(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path != "/schema":
            return None
        body = json.dumps({"action": NUMBER if self.kind == "numbers" else CALL, "observation": {}, "state": {}})
        return Response(HTTPStatus.OK, "OK", Headers({"Content-Type": "application/json"}), body.encode())

    async def session(self, connection: ServerConnection) -> None:
        if self.open == self.sessions:
            failure = {"message": f"Server at capacity: {self.open}/{self.sessions}", "code": "CAPACITY_REACHED"}
            await connection.send(json.dumps({"type": "error", "data": failure}))
            return
        self.open += 1
        try:
            world: dict[str, Any] = {}
            async for text in connection:
                message = json.loads(text)
                if message["type"] == "close":
                    return
                await connection.send(json.dumps(self.answer(message, world)))
        finally:
            self.open -= 1

    def answer(self, message: dict[str, Any], world: dict[str, Any]) -> dict[str, Any]:
        data = message["data"]
        if self.kind == "tools":
            return self.tools(message["type"], data)
        if message["type"] == "reset":
            world.update(secret=str(random.Random(data["seed"]).randint(1, 9)), left=3)
            return observation({"text": "Guess a number from 1 to 9."}, None, False)
        if set(data) != {"number"}:
            errors = [{"loc": ["number"], "msg": "Field required", "type": "missing"}]
            failure = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}
            return {"type": "error", "data": failure}
        world["left"] -= 1
        if data["number"] == world["secret"]:
            return observation({"text": "Right."}, 1.0, True)
        return observation({"text": "No."}, 0.0, world["left"] == 0)

    def tools(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        if kind == "reset":
            return observation({}, 0.0, False)
        if data["type"] == "list_tools":
            integer = {"type": "integer"}
            schema = {"type": "object", "properties": {"a": integer, "b": integer}, "required": ["a", "b"]}
            listed = [
                {"name": "add", "description": "Adds.", "input_schema": schema},
                {"name": "fail", "description": "Fails.", "input_schema": {"type": "object", "properties": {}}},
                {"name": "say", "description": "Says it.", "input_schema": {"type": "object", "properties": {}}},
            ]
            return observation({"tools": listed}, None, False)
        if data["tool_name"] == "fail":
            error = {"error_type": "execution_error", "message": "Error calling tool 'fail': out of order"}
            return observation({"tool_name": "fail", "result": None, "error": error}, None, False)
        if data["tool_name"] == "say":
            result = {"content": [{"type": "text", "text": data["arguments"]["text"]}]}
            return observation({"tool_name": "say", "result": result, "error": None}, None, False)
        total = str(data["arguments"]["a"] + data["arguments"]["b"])
        result = {"content": [{"type": "text", "text": total}], "structured_content": {"result": int(total)}}
        return observation({"tool_name": "add", "result": result, "error": None}, None, False)


def observation(fields: dict[str, Any], reward: float | None, done: bool) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {**fields, "metadata": {}}, "reward": reward, "done": done}}


class Server:
    """A server of one of the two environments, until it is stopped."""

    def __init__(self, kind: str, sessions: int, path: Path | None = None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        if path is None:
            self.stand_in = StandIn(kind, sessions)
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
            self._thread.start()
            self._server = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(30)
            return
        path.write_text(REAL, encoding="utf-8")
        python = os.environ["AGENTRL_OPENENV_PYTHON"]
        self._process = subprocess.Popen([python, str(path), kind, str(self.port), str(sessions)])
        until = time.monotonic() + 120
        while True:
            try:
                httpx.get(f"{self.url}/schema").raise_for_status()
                return
            except httpx.HTTPError:
                assert time.monotonic() < until and self._process.poll() is None, "the server did not start"
                time.sleep(0.2)

    async def _serve(self) -> Any:
        stand_in = self.stand_in
        return await serve(stand_in.session, "127.0.0.1", self.port, process_request=stand_in.schema)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        elif self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(30)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(30)

    async def _end(self) -> None:
        self._server.close()
        await self._server.wait_closed()


Start = Callable[..., Server]


@pytest.fixture(params=["stand-in", "openenv"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """Starts a server."""
    real = request.param == "openenv"
    if real and "AGENTRL_OPENENV_PYTHON" not in os.environ:
        pytest.skip("AGENTRL_OPENENV_PYTHON names no Python that has openenv")
    started: list[Server] = []

    def start(kind: str, sessions: int = 64) -> Server:
        started.append(Server(kind, sessions, tmp_path / "server.py" if real else None))
        return started[-1]

    yield start
    for server in started:
        server.stop()


def made(url: str, **options: Any) -> OpenEnv:
    return OpenEnv(OpenEnvConfig(url=url, **options), EnvironmentContext("openenv"))


def secret(seed: int) -> str:
    return str(random.Random(seed % 2**32).randint(1, 9))


class TestByText(EnvironmentContract):
    @pytest.fixture
    def plugin(self, start: Start) -> EnvironmentCase:
        config = OpenEnvConfig(url=start("numbers").url, text_field="number")
        return EnvironmentCase(ENVIRONMENT, config=config, oracle=lambda task, seed, messages: [secret(seed)])


class TestByTool(EnvironmentContract):
    @pytest.fixture
    def plugin(self, start: Start) -> EnvironmentCase:
        config = OpenEnvConfig(url=start("numbers").url)
        return EnvironmentCase(
            ENVIRONMENT, config=config, oracle=lambda task, seed, messages: [("act", {"number": secret(seed)})]
        )


def test_mcp_tools_are_offered_and_called(start: Start) -> None:
    async def main() -> None:
        episode = await made(start("tools").url, prompt="Use the tools.").open(TASK, 1)
        functions = {tool["function"]["name"]: tool["function"] for tool in episode.tools}
        assert set(functions) == {"add", "fail", "say"} and functions["add"]["description"] == "Adds."
        assert functions["add"]["parameters"]["required"] == ["a", "b"]
        assert (await episode.call("add", {"a": 2, "b": 3})).response.text == "5"
        assert (await episode.call("say", {"text": ""})).response.text == ""
        with pytest.raises(RuntimeError, match="out of order"):
            await episode.call("fail", {})
        await episode.close()

    run(main())


def test_a_wrong_action_names_the_field_and_the_session_goes_on(start: Start) -> None:
    async def main() -> None:
        episode = await made(start("numbers").url).open(TASK, 1)
        with pytest.raises(ValueError, match="number: Field required"):
            await episode.call("act", {"nmber": "1"})
        assert (await episode.call("act", {"number": secret(1)})).reward == 1.0
        await episode.close()

    run(main())


def test_messages_and_schemas_have_a_limit(start: Start) -> None:
    async def main() -> None:
        environment = made(start("tools").url, max_body_bytes=2000)
        episode = await environment.open(TASK, 1)
        with pytest.raises(ConnectionError, match="too big.* Raise max_body_bytes of the environment"):
            await episode.call("say", {"text": "x" * 2001})
        await episode.close()

    run(main())
    with pytest.raises(ConfigError, match="/schema: the body is longer than max_body_bytes=20"):
        made(start("numbers").url, max_body_bytes=20)


def test_a_server_without_a_free_session_says_what_to_set(start: Start) -> None:
    async def main() -> None:
        environment = made(start("numbers", sessions=1).url)
        first = await environment.open(TASK, 1)
        with pytest.raises(ConnectionError, match="capacity.*max_concurrent"):
            await environment.open(TASK, 2)
        await first.close()

    run(main())


def test_a_server_that_dies_costs_the_score_so_the_trajectory_starts_again(start: Start) -> None:
    async def main() -> None:
        server = start("numbers")
        episode = await made(server.url).open(TASK, 1)
        await asyncio.to_thread(server.stop)
        with pytest.raises(ConnectionError, match="the session at http://127.0.0.1:.* ended"):
            await episode.call("act", {"number": "1"})
        with pytest.raises(ConnectionError, match="ended"):
            await episode.score(None)  # type: ignore[arg-type]
        await episode.close()

    run(main())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "localhost:8000"}, "url is 'localhost:8000'; write the server's address"),
        ({"url": "http://127.0.0.1:9"}, "no schema of an OpenEnv server at http://127.0.0.1:9/schema: ConnectError"),
        ({"url": "http://127.0.0.1:9", "arguments": {"a": 1}}, "arguments are for a class in the worker"),
        ({"url": "http://127.0.0.1:9", "environment": "a:B"}, "set either environment, a class, or url"),
        ({}, "set either environment, a class, or url"),
    ],
)
def test_addresses_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OpenEnv(OpenEnvConfig(**options), EnvironmentContext("openenv"))
