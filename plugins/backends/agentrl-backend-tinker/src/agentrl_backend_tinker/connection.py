"""A session at a server of the Tinker API, whose requests are tried again until they have an answer.

What a request does is done once, however often it is sent: the server knows it by its number (``seq_id``). So a lost
connection, 408, 429 or 5xx means that the same bytes are sent again. A server that was restarted, or has ended the
session, knows neither model nor request any more: :class:`LostError`. What then has to be done again differs, so the
callers decide.
"""

import asyncio
import difflib
import json
import logging
import math
import os
from collections.abc import Mapping
from typing import Any

import httpx

from agentrl_backend_tinker.config import ServerConfig
from agentrl_core.api.errors import ConfigError, WorkerError

logger = logging.getLogger(__name__)

SDK_VERSION = "0.38.0"
"""The version of the SDK ``tinker`` whose API this is."""
PREFIX = "/api/v1/"
PROTOBUF = "application/x-protobuf"
HEARTBEAT = 10.0
FIRST_PATIENCE = 60.0
"""Seconds for the first answer of all: later the address is known to be right."""
LONGEST_WAIT = 10.0
"""Seconds between two tries, at most."""
REPORTED = 30.0
"""Seconds without an answer, after which a line says so: one for all requests that wait, as often as this again."""
_AGAIN = (408, 409, 425, 429)
_NEVER = (501, 505)
_BAD_ANSWERS = 3
"""Tries of a result that is refused with 400, as proxies do."""


class LostError(WorkerError):
    """The server does not know the session, model, sampler or request (any more)."""


class RefusedError(WorkerError):
    """The server will not do this, however often it is asked."""


class UnreachableError(WorkerError):
    """The server gave no usable answer in ``patience`` seconds."""


def server_of(options: ServerConfig, where: str) -> tuple[str, str]:
    """Address and API key.

    Raises:
        ConfigError: one of them is missing.
    """
    url = (options.url or os.environ.get("TINKER_BASE_URL", "")).rstrip("/").removesuffix(PREFIX.rstrip("/"))
    key = os.environ.get(options.key_variable, "")
    if not url.startswith(("http://", "https://")):
        found = f"found {url!r}" if url else "found none"
        raise ConfigError(
            f"{where}.url: {found}, but the address of a server of the Tinker API is needed, such as "
            "http://127.0.0.1:8000. Set it, or the environment variable TINKER_BASE_URL; `agentrl tinker serve` "
            "starts a server"
        )
    if not key:
        raise ConfigError(
            f"{where}.key_variable: the environment variable {options.key_variable} is not set; it has the API key "
            f"for {url}. A server without --keys takes any: export {options.key_variable}=tml-anything"
        )
    return url, key


class Connection:
    """One session. Everything runs in one event loop.

    Args:
        options: where the server is.
        where: config key of the options, for messages.

    Raises:
        ConfigError: the address or the key is missing.
    """

    def __init__(self, options: ServerConfig, where: str) -> None:
        self.url, key = server_of(options, where)
        self._where = where
        self._patience = options.patience
        self._answered = False
        self._reported = -math.inf
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"X-API-Key": key},
            timeout=httpx.Timeout(60.0, connect=30.0, pool=None),
            limits=httpx.Limits(max_connections=1000, max_keepalive_connections=1000),
        )
        self._heartbeats: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self.session_id = ""
        self.epoch = 0
        """Number of the session: what the server has belongs to one."""
        self._numbers = 0
        self.requests = 0
        """Sent so far, those that were sent again among them."""

    # Sessions -----------------------------------------------------------------------------------------------------

    async def open(self, lost: int = 0) -> None:
        """Begin a session, unless another caller has already replaced the one with the number ``lost``."""
        async with self._opening:
            if self.epoch != lost:
                return
            await self._finish()
            body: dict[str, Any] = {
                "tags": [],
                "user_metadata": None,
                "sdk_version": SDK_VERSION,
                "type": "create_session",
            }
            try:
                self.session_id = str((await self.post("create_session", body))["session_id"])
            except (LostError, RefusedError, UnreachableError, KeyError, TypeError) as error:
                if self.epoch:
                    raise
                raise ConfigError(
                    f"{self._where}.url: {self.url} opens no session of the Tinker API ({error}). Set the address of a "
                    f"server that runs, and an API key that it knows"
                ) from error
            self.epoch += 1
            self._numbers = 0
            if self._heartbeats is None:
                self._heartbeats = asyncio.get_running_loop().create_task(self._beat())

    async def base_model(self, wanted: str | None, path: str, where: str) -> str:
        """The name of the base model at the server.

        Args:
            wanted: by the options; None: ``path``, or the only one of the server.

        Raises:
            ConfigError: the server has others.
        """
        try:
            supported = (await self.get("get_server_capabilities"))["supported_models"]
            names = [str(each["model_name"]) for each in supported]
        except (LostError, RefusedError, KeyError, TypeError) as error:
            logger.debug("%s does not name its models: %r", self.url, error)
            return wanted or path
        if (wanted or path) in names or not names:
            return wanted or path
        if wanted is None and len(names) == 1:
            return names[0]
        near = difflib.get_close_matches(wanted or path, names, 3, 0.3) or names[:3]
        raise ConfigError(
            f"{where}.base_model: {self.url} has no model {wanted or path!r}, but {len(names)} others, such as "
            f"{', '.join(near)}"
        )

    def next_number(self) -> int:
        """Of a model or sampler in this session."""
        self._numbers += 1
        return self._numbers

    async def _beat(self) -> None:
        """Servers release what belongs to a session that sends nothing, and rollouts may take longer than they wait."""
        while True:
            await asyncio.sleep(HEARTBEAT)
            try:
                await self._http.post(
                    f"{PREFIX}session_heartbeat",
                    json={"session_id": self.session_id, "type": "session_heartbeat"},
                )
            except httpx.HTTPError as error:
                # The next request tries for longer, and says so.
                logger.debug("a heartbeat failed: %r", error)

    async def close(self) -> None:
        """End the session, if the server answers soon."""
        if self._heartbeats is not None:
            self._heartbeats.cancel()
            self._heartbeats = None
        if not self._http.is_closed:
            await self._finish()
            await self._http.aclose()

    async def _finish(self) -> None:
        """Let the server release what belongs to the session, if it knows it and answers soon."""
        if self.session_id:
            try:
                await self._http.post(f"{PREFIX}sessions/{self.session_id}/finish", json={}, timeout=5.0)
            except httpx.HTTPError as error:
                logger.debug("the session was not ended: %r", error)

    # Requests -----------------------------------------------------------------------------------------------------

    async def get(self, path: str) -> Any:
        return _json(await self._exchange("GET", path))

    async def delete(self, path: str) -> None:
        _json(await self._exchange("DELETE", path))

    async def post(self, path: str, body: Mapping[str, Any] | bytes) -> Any:
        """Send JSON, or a protobuf message.

        Raises:
            LostError, RefusedError, UnreachableError
        """
        kind = PROTOBUF if isinstance(body, bytes) else "application/json"
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return _json(await self._exchange("POST", path, content, {"Content-Type": kind}))

    async def result(self, promise: Mapping[str, Any]) -> Any:
        """The result of a request: bytes for protobuf, else JSON. Waits as long as the server says that it works on it.

        Raises:
            LostError, RefusedError, UnreachableError
        """
        content = json.dumps({"request_id": promise["request_id"]}).encode()
        headers = {"Accept": PROTOBUF, "Content-Type": "application/json"}
        wait, bad = 0.02, 0
        while True:
            response = await self._exchange("POST", "retrieve_future", content, headers, pending=True)
            if response.status_code == 400 and (bad := bad + 1) < _BAD_ANSWERS:
                await asyncio.sleep(1.0)
                continue
            if response.is_success and PROTOBUF in response.headers.get("content-type", ""):
                return response.content
            if response.status_code != 408:
                found = _json(response)
                if found.get("type") != "try_again":
                    if "error" in found:
                        raise RefusedError(f"the server: {found['error']}")
                    return found
            # Servers may wait before they say so, or not.
            await asyncio.sleep(wait)
            wait = min(2 * wait, 1.0)

    async def download(self, url: str) -> bytes:
        """A file from an address that the server has named. The key goes to the server itself alone."""
        if not url.startswith(("http://", "https://")):
            return (await self._exchange("GET", url)).content
        try:
            async with httpx.AsyncClient(timeout=60.0, follow_redirects=True) as client:
                response = await client.get(url)
                response.raise_for_status()
                return response.content
        except httpx.HTTPError as error:
            raise WorkerError(f"a file of the adapter cannot be downloaded from {self.url}: {error!r}") from error

    async def _exchange(
        self, method: str, path: str, content: bytes | None = None, headers: Mapping[str, str] | None = None,
        pending: bool = False,
    ) -> httpx.Response:  # fmt: skip
        """An answer other than "try again".

        Args:
            pending: 408 is an answer: the result is not there yet.
        """
        loop = asyncio.get_running_loop()
        began, wait = loop.time(), 0.1
        where = path if path.startswith("/") else PREFIX + path
        while True:
            self.requests += 1
            try:
                response = await self._http.request(method, where, content=content, headers=headers)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                status = response.status_code
                again = status in _AGAIN or (status >= 500 and status not in _NEVER)
                if not again or (pending and status == 408):
                    self._answered = True
                    return response
                problem = f"status {status}: {_text(response)}"
                wait = max(wait, _retry_after(response))
            waited = loop.time() - began
            patience = self._patience if self._answered else min(self._patience, FIRST_PATIENCE)
            if waited > patience:
                raise UnreachableError(
                    f"{self.url} gave no usable answer to {path} for {waited:.0f} s ({problem}). Check the server and "
                    f"the network{f', or raise {self._where}.patience' if self._answered else ''}"
                )
            if waited > REPORTED and loop.time() - self._reported > REPORTED:
                self._reported = loop.time()
                logger.warning(
                    "%s has not answered %s for %.0f s (%s); trying for %g s in all",
                    self.url, path, waited, problem, patience,
                )  # fmt: skip
            await asyncio.sleep(min(wait, LONGEST_WAIT))
            wait *= 2


def _json(response: httpx.Response) -> Any:
    """The body of an answer.

    Raises:
        LostError, RefusedError
    """
    status = response.status_code
    if response.is_success:
        try:
            return response.json()
        except ValueError as error:
            raise RefusedError(f"{response.url} answered with no JSON: {response.text[:200]!r}") from error
    text = f"{response.url.path}: status {status}: {_text(response)}"
    if status in (404, 410):
        raise LostError(text)
    hint = "; check the API key" if status in (401, 403) else "; the account needs credit" if status == 402 else ""
    raise RefusedError(f"{text}{hint}")


def _text(response: httpx.Response) -> str:
    try:
        return str(response.json().get("detail", response.text))[:2000]
    except (ValueError, AttributeError):
        return response.text[:200]


def _retry_after(response: httpx.Response) -> float:
    try:
        return float(response.headers.get("retry-after", 0.0))
    except ValueError:
        return 0.0
