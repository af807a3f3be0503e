"""A real vLLM on the CPU, and tiny random models.

Run by ``make test-engine-vllm`` in the environment of ``make engines-cpu-vllm``.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from agentrl_engine_vllm.config import VLLMConfig
from agentrl_engine_vllm.engine import VLLMEngine
from tests_real.engine_suite import Case, Models


@pytest.fixture(scope="session")
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs coroutines on one loop, which an engine stays on for its life."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"), tied=True)


@pytest.fixture(scope="session", params=[True, False], ids=["tied", "untied"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, run: Any) -> Iterator[Case]:
    """One engine for all tests of a kind of model: a start takes a quarter of a minute."""
    models = Models(tmp_path_factory.mktemp("models"), request.param)
    # Prompts that arrive together are computed in parts, as long ones are.
    engine = VLLMEngine(VLLMConfig(engine_args={"max_num_batched_tokens": 256}), models.context())
    run(engine.start())
    yield Case(engine, models)
    run(engine.close())
