"""A real vLLM with stages of the model; shards and hosts: see the fixture ``case``."""

from functools import partial
from typing import Any

from agentrl_engine_vllm.config import VLLMConfig
from agentrl_engine_vllm.engine import make_engine
from tests_real.engine_suite import Models, check_sampling_and_updates, started


def test_two_stages(models: Models, run: Any) -> None:
    make = partial(make_engine, VLLMConfig())
    with started(run, make, models, pipeline_parallel=2) as case:
        check_sampling_and_updates(case, run)
