"""The contract of all inference engines, kept by a real SGLang server."""

from dataclasses import replace

import pytest

from agentrl_engine_sglang.config import SGLangConfig
from agentrl_engine_sglang.plugin import PLUGIN
from agentrl_testing.contracts import EngineCase, EngineContract

# Less than a test may take, so that a server that does not start shows its log.
CONFIG = SGLangConfig(start_timeout=240.0)


class TestSGLang(EngineContract):
    @pytest.fixture
    def plugin(self) -> EngineCase:
        return EngineCase(PLUGIN, config=CONFIG)


class TestSGLangUntied(EngineContract):
    @pytest.fixture
    def plugin(self) -> EngineCase:
        # Adapters leave the output layer alone: one engine for them is enough.
        plain = replace(PLUGIN, capabilities=PLUGIN.capabilities - {"adapters"})
        return EngineCase(plain, config=CONFIG, tie_word_embeddings=False)
