"""A real SGLang server on the CPU, and tiny random models.

Run by ``make test-engine-sglang`` in the environment of ``make engines-cpu-sglang``.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from agentrl_engine_sglang.config import SGLangConfig
from agentrl_engine_sglang.engine import SGLangEngine
from tests_real.engine_suite import Case, Models


@pytest.fixture(scope="session")
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs coroutines on one loop, which an engine stays on for its life."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory, run: Any) -> Iterator[Callable[[str], Case]]:
    """An engine by its road, started when it is first asked for: a start takes most of a minute."""
    cases: dict[str, Case] = {}

    def start(road: str) -> Case:
        if road not in cases:
            models = Models(tmp_path_factory.mktemp("models"), tied=road == "files")
            engine = SGLangEngine(SGLangConfig(max_running_requests=64, weight_road=road), models.context())
            run(engine.start())
            cases[road] = Case(engine, models)
        return cases[road]

    yield start
    for case in cases.values():
        run(case.engine.close())
