import pytest

from agentrl_core.fsdp2.plugin import FSDP2
from agentrl_testing.contracts import TrainingBackendCase, TrainingBackendContract

MODELS = {
    "tied": TrainingBackendCase(FSDP2, ranks=(2, 4)),
    "not tied": TrainingBackendCase(FSDP2, tie_word_embeddings=False),
    "experts": TrainingBackendCase(FSDP2, experts=4),
}


class TestFsdp2(TrainingBackendContract):
    @pytest.fixture(params=MODELS.values(), ids=MODELS)
    def plugin(self, request: pytest.FixtureRequest) -> TrainingBackendCase:
        found: TrainingBackendCase = request.param
        return found
