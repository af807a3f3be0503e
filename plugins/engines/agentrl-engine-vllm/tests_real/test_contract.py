"""The contract of all inference engines, kept by a real vLLM."""

import pytest

from agentrl_engine_vllm.plugin import PLUGIN
from agentrl_testing.contracts import EngineCase, EngineContract


class TestVLLM(EngineContract):
    @pytest.fixture
    def plugin(self) -> EngineCase:
        return EngineCase(PLUGIN)


class TestVLLMUntied(EngineContract):
    @pytest.fixture
    def plugin(self) -> EngineCase:
        return EngineCase(PLUGIN, tie_word_embeddings=False)
