"""What every training backend must do: alone, and on two and four ranks that share the rows."""

import pytest

from agentrl_backend_megatron.plugin import PLUGIN
from agentrl_testing.contracts import TrainingBackendCase, TrainingBackendContract


class TestMegatron(TrainingBackendContract):
    @pytest.fixture(params=[True, False], ids=["tied", "not tied"])
    def plugin(self, request: pytest.FixtureRequest) -> TrainingBackendCase:
        return TrainingBackendCase(PLUGIN, tie_word_embeddings=request.param, ranks=(2, 4) if request.param else (2,))
