"""The contract of all inference engines, kept by a real vLLM."""

from dataclasses import replace

import pytest

from agentrl_engine_vllm.plugin import PLUGIN
from agentrl_testing.contracts import EngineCase, EngineContract

# On a CPU vLLM does not say to which experts it sent tokens.
ON_CPU = PLUGIN.capabilities - {"routed_experts"}


class TestVLLM(EngineContract):
    @pytest.fixture
    def plugin(self) -> EngineCase:
        return EngineCase(replace(PLUGIN, capabilities=ON_CPU))


class TestVLLMUntied(EngineContract):
    @pytest.fixture
    def plugin(self) -> EngineCase:
        # Adapters leave the output layer alone: one engine for them is enough.
        plain = replace(PLUGIN, capabilities=ON_CPU - {"adapters"})
        return EngineCase(plain, tie_word_embeddings=False)
