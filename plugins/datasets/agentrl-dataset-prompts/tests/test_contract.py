import json

import pytest

from agentrl_dataset_prompts.config import MixtureConfig
from agentrl_dataset_prompts.plugin import CURRICULUM, MIXTURE, PROMPTS, SEQUENTIAL, SHUFFLE
from agentrl_testing.contracts import DatasetCase, DatasetContract, SamplerCase, SamplerContract


class TestPrompts(DatasetContract):
    @pytest.fixture
    def plugin(self) -> DatasetCase:
        rows = [
            {
                "data_source": "tests",
                "prompt": [{"role": "user", "content": f"say {number}"}],
                "reward_model": {"ground_truth": str(number)},
                "extra_info": {"index": number},
            }
            for number in range(5)
        ]
        return DatasetCase(PROMPTS, files={"train.jsonl": "\n".join(map(json.dumps, rows))}, rows=5)


class TestShuffle(SamplerContract):
    @pytest.fixture
    def plugin(self) -> SamplerCase:
        return SamplerCase(SHUFFLE)


class TestSequential(SamplerContract):
    @pytest.fixture
    def plugin(self) -> SamplerCase:
        return SamplerCase(SEQUENTIAL)


class TestMixture(SamplerContract):
    @pytest.fixture
    def plugin(self) -> SamplerCase:
        return SamplerCase(MIXTURE, config=MixtureConfig({"a": 0.7, "b": 0.3}))


class TestCurriculum(SamplerContract):
    @pytest.fixture
    def plugin(self) -> SamplerCase:
        return SamplerCase(CURRICULUM)
