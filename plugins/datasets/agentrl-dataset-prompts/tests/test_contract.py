import json

import pytest

from agentrl_core.testing.contracts import DatasetCase, DatasetContract
from agentrl_dataset_prompts.plugin import PROMPTS


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
