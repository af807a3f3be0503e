"""The client of a named engine, in each process that uses it: chat template, routing, text."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from agentrl_core.api import AgentRLError, DeadlineError, EngineContext, EngineError, SamplingParams
from agentrl_core.api.engine_client import EngineClient
from agentrl_core.config.schema import ModelConfig, NamedEngineSlot
from agentrl_core.controller.runtime import ActorHandle
from agentrl_core.data.renderer import HFChatRenderer
from agentrl_core.serving.router import AsyncLLMServerManager


class RoutedClient(EngineClient):
    """Chats with the replicas of one named engine. Travels to a worker before its first use.

    Args:
        name: key in ``engines``.
        slot: of that engine.
        context: of its replicas.
        servers: their handles.
        turn_timeout: seconds that one answer may take.
        seed: see :class:`AsyncLLMServerManager`.
    """

    def __init__(
        self,
        name: str,
        slot: NamedEngineSlot,
        context: EngineContext,
        servers: Sequence[ActorHandle],
        turn_timeout: float,
        seed: str | None = None,
    ) -> None:
        self._name = name
        self._slot = slot
        self._context = context
        self._servers = list(servers)
        self._turn_timeout = turn_timeout
        self._seed = seed

    @cached_property
    def router(self) -> AsyncLLMServerManager:
        """Chooses the replica of each request, in this process."""
        return AsyncLLMServerManager(
            self._servers,
            turn_timeout=self._turn_timeout,
            max_model_len=self._context.max_model_len,
            vocab_size=self._context.vocab_size,
            capabilities=self._slot.plugin.spec.capabilities,
            restarts=self._slot.restarts > 0,
            retry=self._slot.retry,
            seed=self._seed,
        )

    @cached_property
    def _renderer(self) -> HFChatRenderer:
        return HFChatRenderer.from_config(ModelConfig(self._slot.model))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        temperature: float = 0.0,
        max_tokens: int = 512,
        json_schema: str | None = None,
    ) -> str:
        renderer = self._renderer
        prompt = renderer.encode_prompt(renderer.render([dict(each) for each in messages], generation_prompt=True))
        params = SamplingParams(
            max_tokens, temperature, stop_token_ids=renderer.stop_token_ids, json_schema=json_schema
        )
        request = f"{self._name}-{uuid.uuid4().hex}"
        try:
            output = await self.router.generate(request, prompt, params)
        except DeadlineError as error:
            # Not the deadline of whoever asks: the engine failed.
            raise EngineError(f"engine {self._name!r}: {error}") from error
        finally:
            # The engine drops what it kept of this request. One that has died has dropped it already.
            with suppress(AgentRLError):
                await self.router.close_session(request)
        return renderer.decode(output.token_ids, skip_special_tokens=True)


class AbsentClient(EngineClient):
    """Stands for a named engine where plugins are only built, to check a configuration."""

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        temperature: float = 0.0,
        max_tokens: int = 512,
        json_schema: str | None = None,
    ) -> str:
        raise EngineError("named engines are started by a run only, and here plugins are only checked")


def absent_clients(engines: Iterable[str]) -> dict[str, EngineClient]:
    """Return a client of each of these engines, none of which has been started."""
    return {name: AbsentClient() for name in engines}
