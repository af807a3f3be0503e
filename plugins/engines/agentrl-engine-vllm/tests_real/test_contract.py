"""The contract of all inference engines, kept by a real vLLM."""

from dataclasses import replace

import pytest

from agentrl_core.testing.contracts import EngineCase, EngineContract
from agentrl_engine_vllm.config import VLLMConfig
from agentrl_engine_vllm.plugin import PLUGIN


class TestVLLM(EngineContract):
    @pytest.fixture
    def plugin(self) -> EngineCase:
        # As it starts by default.
        return EngineCase(replace(PLUGIN, capabilities=PLUGIN.capabilities - {"lora"}))


class TestVLLMUntiedWithAdapters(EngineContract):
    @pytest.fixture
    def plugin(self) -> EngineCase:
        return EngineCase(PLUGIN, config=VLLMConfig(max_lora_rank=8), tie_word_embeddings=False)
