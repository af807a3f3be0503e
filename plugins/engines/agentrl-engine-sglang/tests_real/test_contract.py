"""The contract of all inference engines, kept by a real SGLang server."""

import pytest

from agentrl_core.testing.contracts import EngineCase, EngineContract
from agentrl_engine_sglang.plugin import PLUGIN


class TestSGLang(EngineContract):
    @pytest.fixture
    def plugin(self) -> EngineCase:
        return EngineCase(PLUGIN)


class TestSGLangUntied(EngineContract):
    @pytest.fixture
    def plugin(self) -> EngineCase:
        return EngineCase(PLUGIN, tie_word_embeddings=False)
