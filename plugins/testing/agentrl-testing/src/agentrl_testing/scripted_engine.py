"""An engine that answers by script: no model, no torch, exact and fast. For tests, and for trying a run's plumbing."""

import asyncio
import importlib
from collections import defaultdict
from collections.abc import Callable, Sequence

from agentrl_core.api import (
    EngineContext,
    EngineError,
    InferenceEngine,
    MultiModal,
    PolicySpan,
    SamplingParams,
    TokenOutput,
    WeightUpdate,
)
from agentrl_core.api.engine import FinishReason
from agentrl_testing.scripted_config import ScriptedConfig

Script = Callable[[str, int, Sequence[int]], Sequence[int]]
"""``(request_id, turn, prompt_ids) -> token ids``; turns count from 0 within a request id."""


class ScriptedEngine(InferenceEngine):
    """Answers by script.

    Args:
        config: what to answer.
        context: its tokenizer is loaded only if ``turns`` must be encoded.
        script: overrides ``config.script``.
    """

    def __init__(self, config: ScriptedConfig, context: EngineContext, script: Script | None = None) -> None:
        self._config = config
        self._context = context
        self._script = script
        self._answers: list[list[int]] = []
        self._turns: dict[str, int] = defaultdict(int)
        self._requests = 0
        self.version = 0

    async def start(self) -> None:
        if self._script is not None:
            return
        if self._config.script is not None:
            module, _, function = self._config.script.partition(":")
            self._script = getattr(importlib.import_module(module), function)
            return
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self._context.model_path)
        self._answers = [
            tokenizer.encode(text + self._config.stop, add_special_tokens=False) for text in self._config.turns
        ]

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        request_id: str,
        multi_modal: MultiModal | None = None,
    ) -> TokenOutput:
        self._requests += 1
        if self._config.fail_every and self._requests % self._config.fail_every == 0:
            raise EngineError(f"request {self._requests} fails, as scripted")
        turn = self._turns[request_id]
        self._turns[request_id] += 1
        if self._config.delay:
            await asyncio.sleep(self._config.delay)
        if self._script is not None:
            answer = list(self._script(request_id, turn, prompt_ids))
        else:
            answer = self._answers[min(turn, len(self._answers) - 1)]
        ids = answer[: sampling_params.max_tokens]
        reason: FinishReason = "stop" if ids and ids[-1] in sampling_params.stop_token_ids else "length"
        spans = [PolicySpan(self.version, 0, len(ids))]
        return TokenOutput(ids, [self._config.log_prob] * len(ids), reason, spans)

    async def open_session(self, session_id: str) -> None:
        return None

    async def close_session(self, session_id: str) -> None:
        self._turns.pop(session_id, None)

    async def update_weights(self, update: WeightUpdate, version: int) -> None:
        self.version = version
