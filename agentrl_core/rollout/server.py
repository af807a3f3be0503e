"""One engine behind one server: the same class runs in this process and as a Ray actor."""

import traceback
from collections.abc import Sequence
from typing import Any

from agentrl_core.api import (
    EngineContext,
    EngineError,
    InferenceEngine,
    PluginRef,
    SamplingParams,
    TokenOutput,
    WeightUpdate,
)
from agentrl_core.plugins import resolve_ref


class EngineServer:
    """Builds an engine from its reference and maps everything that it raises to :class:`EngineError`.

    Args:
        ref: the resolved plugin.
        config: of the plugin.
        context: the engine's place.
    """

    def __init__(self, ref: PluginRef, config: Any, context: EngineContext) -> None:
        self._name = f"engine {ref.name!r}, replica {context.replica}"
        self._engine: InferenceEngine = resolve_ref(ref).build(config, context)
        self.version = 0

    async def start(self) -> None:
        """Start the engine, and see that it is healthy."""
        await self._guard("start", self._engine.start())
        await self._guard("health", self._engine.health())

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str) -> TokenOutput:
        """See :meth:`InferenceEngine.generate`."""
        output: TokenOutput = await self._guard("generate", self._engine.generate(prompt_ids, params, request_id))
        return output

    async def open_session(self, session_id: str) -> None:
        """See :meth:`InferenceEngine.open_session`."""
        await self._guard("open_session", self._engine.open_session(session_id))

    async def close_session(self, session_id: str) -> None:
        """See :meth:`InferenceEngine.close_session`."""
        await self._guard("close_session", self._engine.close_session(session_id))

    async def update_weights(self, update: WeightUpdate, version: int) -> None:
        """See :meth:`InferenceEngine.update_weights`."""
        await self._guard("update_weights", self._engine.update_weights(update, version))
        self.version = version

    def metrics(self) -> dict[str, float]:
        """Counters of the engine since the last call."""
        return self._engine.metrics()

    async def close(self) -> None:
        """Close the engine."""
        await self._guard("close", self._engine.close())

    async def _guard(self, what: str, call: Any) -> Any:
        try:
            return await call
        except EngineError:
            raise
        except Exception as error:  # noqa: BLE001 - an engine may raise anything
            # As text: the class of a foreign exception may not exist in the caller's interpreter.
            trace = "".join(traceback.format_exception(error))
            raise EngineError(f"{self._name}: {what} failed: {type(error).__name__}: {error}\n{trace}") from None
