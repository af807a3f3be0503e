"""Engines over the stand-in of ``stand_in/vllm``, which plays the part of vLLM's own package."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import AdapterSlots, EngineContext
from agentrl_engine_vllm.config import VLLMConfig
from agentrl_engine_vllm.engine import VLLMEngine
from agentrl_testing.tiny_model import save_tiny_model

STAND_IN = Path(__file__).parent / "stand_in"
VOCAB = 200
MAX_MODEL_LEN = 100


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``vllm`` is the stand-in; what engines put into the environment goes again."""
    before = dict(os.environ)
    _forget()
    monkeypatch.syspath_prepend(str(STAND_IN))
    import vllm

    yield vllm
    _forget()
    os.environ.clear()
    os.environ.update(before)


def _forget() -> None:
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        del sys.modules[name]


@pytest.fixture
def make_engine(stand_in: Any, model_path: str) -> Callable[..., VLLMEngine]:
    """An engine that is not started yet."""

    def make(model: str = model_path, adapters: AdapterSlots | None = None, **config: Any) -> VLLMEngine:
        context = EngineContext(
            model, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB, seed=3, replica=1, tensor_parallel=2,
            adapters=adapters,
        )  # fmt: skip
        return VLLMEngine(VLLMConfig(**config), context)

    return make


@pytest.fixture
def serve(make_engine: Callable[..., VLLMEngine]) -> Callable[..., Any]:
    @contextlib.asynccontextmanager
    async def serve(**config: Any) -> AsyncIterator[VLLMEngine]:
        engine = make_engine(**config)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()

    return serve


@pytest.fixture
def run() -> Callable[[Any], Any]:
    return asyncio.run
