"""A real vLLM on the CPU, and tiny random models.

Run by ``make test-engine-vllm`` in the environment of ``make engines-cpu-vllm``.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import pytest

from agentrl_engine_vllm.config import VLLMConfig
from agentrl_engine_vllm.engine import make_engine
from tests_real.engine_suite import Case, Models, started


@pytest.fixture(scope="session")
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs coroutines on one loop, which an engine stays on for its life."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"), tied=True)


@pytest.fixture(scope="session", params=["tied", "untied, two hosts"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, run: Any) -> Iterator[Case]:
    """One engine for all tests of a kind of model: a start takes a quarter of a minute."""
    tied = request.param == "tied"
    models = Models(tmp_path_factory.mktemp("models"), tied)
    # Prompts that arrive together are computed in parts, as long ones are.
    make = partial(make_engine, VLLMConfig(engine_args={"max_num_batched_tokens": 256}))
    with started(run, make, models, **({} if tied else {"tensor_parallel": 2, "nodes": 2})) as case:
        yield case
