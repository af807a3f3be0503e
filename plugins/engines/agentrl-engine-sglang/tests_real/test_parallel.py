"""A real SGLang server with copies of the model; shards and hosts: see ``SHAPES``."""

from functools import partial
from typing import Any

from agentrl_engine_sglang.config import SGLangConfig
from agentrl_engine_sglang.engine import SGLangEngine
from tests_real.engine_suite import Models, check_sampling_and_updates, started


def test_two_copies(tmp_path: Any, run: Any) -> None:
    make = partial(SGLangEngine, SGLangConfig(env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}))
    with started(run, make, Models(tmp_path, tied=True), data_parallel=2) as case:
        check_sampling_and_updates(case, run)
