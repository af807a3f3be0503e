import pytest

from agentrl_core.fsdp2.plugin import FSDP2
from agentrl_testing.contracts import TrainingBackendCase, TrainingBackendContract


class TestFsdp2(TrainingBackendContract):
    @pytest.fixture(params=[True, False], ids=["tied", "not tied"])
    def plugin(self, request: pytest.FixtureRequest) -> TrainingBackendCase:
        return TrainingBackendCase(FSDP2, tie_word_embeddings=request.param, ranks=(2, 4) if request.param else (2,))
