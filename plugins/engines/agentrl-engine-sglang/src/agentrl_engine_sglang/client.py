"""The endpoints of an SGLang server that the engine uses, one method each."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from agentrl_core.api.errors import EngineError
from agentrl_core.api.weights import ArrayBucket, Broadcast
from agentrl_core.engine_kit.adapter_folders import AdapterFolder
from agentrl_core.engine_kit.weight_group import GROUP_NAME

REASONS = ("error", "message", "error_message", "detail")
"""Keys under which SGLang says what is wrong."""


class SGLangClient:
    """Talks to one server.

    Every method raises EngineError where the server refuses, fails or is gone, with its own words.

    Args:
        url: without a slash at the end.
        control_timeout: seconds for a weight update, sleep or wake-up.
        explain: called where a connection is refused or lost; raises EngineError if it knows why.
        api_key: the server's ``--api-key``.
    """

    def __init__(
        self, url: str, control_timeout: float, explain: Callable[[], Awaitable[None]], api_key: str = ""
    ) -> None:
        self.url = url
        self._control_timeout = control_timeout
        self._explain = explain
        # The engine bounds what runs at a time, and its caller how long: neither is a matter of connections. None is
        # used twice: the server closes idle ones after a few seconds, and whoever uses one at that moment loses.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        )

    async def close(self) -> None:
        """Drop all connections."""
        await self._session.close()

    # Requests -----------------------------------------------------------------------------------------------------

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """One request, to its end."""
        reply: dict[str, Any] = await self._call("POST", "/generate", body, timeout=None)
        return reply

    async def abort(self, rid: str) -> None:
        """End a request, whose :meth:`generate` returns what it has. Unknown ones are ignored."""
        await self._call("POST", "/abort_request", {"rid": rid}, timeout=30)

    # State --------------------------------------------------------------------------------------------------------

    async def health(self) -> None:
        """Raises EngineError where the server starts, stops or does not answer."""
        await self._call("GET", "/health", timeout=30)

    async def loads(self) -> list[dict[str, Any]]:
        """What each scheduler has published last, with the time when it did; it does so while it computes."""
        reply = await self._call("GET", "/v1/loads?include=core", timeout=30)
        loads: list[dict[str, Any]] = reply["loads"]
        return loads

    async def model_path(self) -> str:
        """The folder that the server has loaded last."""
        reply = await self._call("GET", "/model_info", timeout=30)
        return str(reply["model_path"])

    async def pause(self) -> None:
        """Freeze what runs; its KV cache is given up, and computed again when it goes on."""
        await self._call("POST", "/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        await self._call("POST", "/continue_generation", {})

    async def flush_cache(self) -> None:
        """Forget every cached prefix. Raises EngineError while anything runs that is not paused."""
        await self._call("POST", "/flush_cache")

    async def release_memory(self, tags: list[str]) -> None:
        """Give up ``kv_cache``, ``weights`` or both. Nothing may run."""
        await self._call("POST", "/release_memory_occupation", {"tags": tags})

    async def resume_memory(self, tags: list[str]) -> None:
        """Take back what :meth:`release_memory` gave up."""
        await self._call("POST", "/resume_memory_occupation", {"tags": tags})

    # Weights ------------------------------------------------------------------------------------------------------

    async def update_weights_from_disk(self, folder: str, version: int) -> None:
        """Load the safetensors files of a folder, and forget every cached prefix."""
        body = {
            "model_path": folder, "load_format": "safetensors", "weight_version": str(version), "flush_cache": True,
        }  # fmt: skip
        _succeeded(await self._call("POST", "/update_weights_from_disk", body))

    async def begin_weight_update(self) -> None:
        """Tensors may come."""
        _succeeded(await self._call("POST", "/begin_weight_update", {}))

    async def init_weights_update_group(self, broadcast: Broadcast) -> None:
        """The model's processes join the group that the actor sends weights in."""
        address, _, port = broadcast.address.rpartition(":")
        body = {
            "master_address": address, "master_port": int(port), "rank_offset": broadcast.first_rank,
            "world_size": broadcast.size, "group_name": GROUP_NAME, "backend": broadcast.backend,
        }  # fmt: skip
        _succeeded(await self._call("POST", "/init_weights_update_group", body))

    async def destroy_weights_update_group(self) -> None:
        """The model's processes leave the group."""
        _succeeded(await self._call("POST", "/destroy_weights_update_group", {"group_name": GROUP_NAME}))

    async def update_weights_from_distributed(self, bucket: ArrayBucket) -> None:
        """The model's processes receive a bucket, as one flat tensor, from rank 0 of the group."""
        body = {
            "names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes, "group_name": GROUP_NAME,
            "load_format": "flattened_bucket", "flush_cache": False,
        }  # fmt: skip
        _succeeded(await self._call("POST", "/update_weights_from_distributed", body))

    async def end_weight_update(self) -> None:
        """All tensors have come."""
        _succeeded(await self._call("POST", "/end_weight_update", {}))

    async def update_weight_version(self, version: int) -> None:
        """The version of what is sampled from now on."""
        body = {"new_version": str(version), "abort_all_requests": False}
        _succeeded(await self._call("POST", "/update_weight_version", body))

    async def load_lora_adapter(self, folder: AdapterFolder) -> None:
        """Requests may name it."""
        body = {"lora_name": folder.name, "lora_path": str(folder.path)}
        _succeeded(await self._call("POST", "/load_lora_adapter", body))

    async def unload_lora_adapter(self, name: str) -> None:
        """Forget it when its last request has ended."""
        _succeeded(await self._call("POST", "/unload_lora_adapter", {"lora_name": name}))

    # ----------------------------------------------------------------------------------------------------------------

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float | None = -1.0
    ) -> Any:
        limit = self._control_timeout if timeout == -1.0 else timeout
        try:
            async with asyncio.timeout(limit), self._session.request(method, self.url + path, json=body) as reply:
                text = await reply.text()
                status = reply.status
        except TimeoutError as error:
            raise EngineError(f"SGLang server, {method} {path}: no answer within {limit:g} s") from error
        except aiohttp.ClientError as error:
            await self._explain()
            raise EngineError(f"SGLang server, {method} {path}: {type(error).__name__}: {error}") from error
        if status != 200:
            raise EngineError(f"SGLang server, {method} {path}: status {status}: {_reason(text)}")
        return _parsed(text)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text) if text else {}
    except ValueError:
        return text


def _reason(text: str) -> str:
    content = _parsed(text)
    while isinstance(content, dict):
        inner = next((content[key] for key in REASONS if content.get(key)), None)
        if inner is None:
            break
        content = inner
    return str(content).strip()[:2000] or "(no reason given)"


def _succeeded(reply: Any) -> None:
    if not isinstance(reply, dict) or not reply.get("success"):
        raise EngineError(f"SGLang server: {_reason(json.dumps(reply))}")
