"""A real vLLM whose replica is spread over processes: stages of the model, and copies of it."""

from functools import partial
from typing import Any

from agentrl_engine_vllm.config import VLLMConfig
from agentrl_engine_vllm.engine import make_engine
from tests_real.engine_suite import Models, check_sampling_and_updates, started


def test_two_stages_of_two_copies(models: Models, run: Any) -> None:
    make = partial(make_engine, VLLMConfig())
    with started(run, make, models, pipeline_parallel=2, data_parallel=2) as case:
        check_sampling_and_updates(case, run)
