"""Engines over the stand-in of ``stand_in/sglang``, on one event loop per test."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import AdapterSlots, EngineContext
from agentrl_engine_sglang.config import SGLangConfig
from agentrl_engine_sglang.engine import SGLangEngine
from agentrl_testing.tiny_model import save_tiny_model

STAND_IN = Path(__file__).parent / "stand_in"
VOCAB = 200
MAX_MODEL_LEN = 100


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_engine(monkeypatch: pytest.MonkeyPatch, model_path: str) -> Callable[..., SGLangEngine]:
    """An engine that is not started yet; ``mode`` makes its server misbehave."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")]))

    def make(
        mode: str = "", model: str = model_path, adapters: AdapterSlots | None = None, **config: Any
    ) -> SGLangEngine:
        context = EngineContext(
            model, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB, seed=3, replica=1, tensor_parallel=2,
            adapters=adapters,
        )  # fmt: skip
        return SGLangEngine(SGLangConfig(env={"STAND_IN": mode}, **config), context)

    return make


@pytest.fixture
def serve(make_engine: Callable[..., SGLangEngine]) -> Callable[..., Any]:
    @contextlib.asynccontextmanager
    async def serve(mode: str = "", **config: Any) -> AsyncIterator[SGLangEngine]:
        engine = make_engine(mode, **config)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()

    return serve


@pytest.fixture
def run() -> Callable[[Any], Any]:
    return asyncio.run
