"""Other families of models: after an update the log-probs of a real vLLM are those of transformers."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentrl_engine_vllm.config import VLLMConfig
from agentrl_engine_vllm.engine import make_engine
from tests_real.engine_suite import check_sampling_and_updates, started
from tests_real.families import FAMILIES, UNTIED_EXPERTS, FamilyModels


@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", sorted({*FAMILIES} - {UNTIED_EXPERTS}))
def test_updates_reach_every_layer(tmp_path: Path, run: Any, family: str) -> None:
    with started(run, partial(make_engine, VLLMConfig()), FamilyModels(tmp_path, family)) as case:
        check_sampling_and_updates(case, run)
