"""Images in another family, whose vision tower also speaks to deeper layers; the contract has Qwen2.5-VL."""

import pytest

from agentrl_engine_vllm.plugin import PLUGIN
from agentrl_testing.contracts import EngineCase
from agentrl_testing.contracts.engine_images import ImageCases


class TestQwen3VL(ImageCases):
    @pytest.fixture
    def plugin(self) -> EngineCase:
        return EngineCase(PLUGIN, vision="qwen3_vl")
