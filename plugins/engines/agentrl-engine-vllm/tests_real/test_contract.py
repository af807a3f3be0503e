"""The contract of all inference engines, kept by a real vLLM."""

import pytest

from agentrl_core.testing.contracts import EngineCase, EngineContract
from agentrl_engine_vllm.plugin import PLUGIN


class TestVLLM(EngineContract):
    @pytest.fixture
    def plugin(self) -> EngineCase:
        return EngineCase(PLUGIN)


class TestVLLMUntied(EngineContract):
    @pytest.fixture
    def plugin(self) -> EngineCase:
        return EngineCase(PLUGIN, tie_word_embeddings=False)
