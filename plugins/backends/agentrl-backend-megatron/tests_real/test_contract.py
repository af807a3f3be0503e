"""What every training backend must do: alone, and on two and four ranks that share the rows."""

import pytest

from agentrl_backend_megatron.plugin import PLUGIN
from agentrl_testing.contracts import TrainingBackendCase, TrainingBackendContract

MODELS = {
    "dense, tied": TrainingBackendCase(PLUGIN, ranks=(2, 4)),
    "dense, not tied": TrainingBackendCase(PLUGIN, tie_word_embeddings=False),
    "experts": TrainingBackendCase(PLUGIN, tie_word_embeddings=False, experts=4, ranks=(2, 4)),
}


class TestMegatron(TrainingBackendContract):
    @pytest.fixture(params=MODELS.values(), ids=MODELS)
    def plugin(self, request: pytest.FixtureRequest) -> TrainingBackendCase:
        found: TrainingBackendCase = request.param
        return found
