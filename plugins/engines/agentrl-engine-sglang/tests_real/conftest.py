"""A real SGLang server on the CPU, and tiny random models.

Run by ``make test-engine-sglang`` in the environment of ``make engines-cpu-sglang``.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from agentrl_engine_sglang.config import SGLangConfig
from agentrl_engine_sglang.engine import SGLangEngine
from tests_real.engine_suite import Case, Models, started


@pytest.fixture(scope="session")
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs coroutines on one loop, which an engine stays on for its life."""
    with asyncio.Runner() as runner:
        yield runner.run


CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
"""Of the processes of a replica that share a host: SGLang asks how many NUMA nodes there are otherwise."""
SHAPES: dict[str, dict[str, int]] = {
    "files": {},
    "broadcast": {"tensor_parallel": 2, "nodes": 2},
}
"""Of the replica that takes weights by a transport."""


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory, run: Any) -> Iterator[Callable[[str], Case]]:
    """An engine by its transport, started when it is first asked for: a start takes most of a minute."""
    cases: dict[str, Case] = {}
    with ExitStack() as stack:

        def start(transport: str) -> Case:
            if transport not in cases:
                models = Models(tmp_path_factory.mktemp("models"), tied=transport == "files")
                config = SGLangConfig(
                    start_timeout=240.0, max_running_requests=64, env=CORES if SHAPES[transport] else {}
                )
                replica = started(run, partial(SGLangEngine, config), models, **SHAPES[transport])
                cases[transport] = stack.enter_context(replica)
            return cases[transport]

        yield start
