"""The contract of all inference engines, kept by a real vLLM."""

from dataclasses import replace

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
        # Adapters leave the output layer alone: one engine for them is enough.
        plain = replace(PLUGIN, capabilities=PLUGIN.capabilities - {"adapters"})
        return EngineCase(plain, tie_word_embeddings=False)
