"""What the core brings itself keeps the contracts that it asks of others."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl_core.algorithms.plugin import GAE, GRPO, PPO
from agentrl_core.api import AdvantageInput, PolicyLossInput
from agentrl_core.data.plugin import PROMPTS
from agentrl_core.testing.contracts import (
    AdvantageEstimatorCase,
    AdvantageEstimatorContract,
    DatasetCase,
    DatasetContract,
    PolicyLossCase,
    PolicyLossContract,
    TrackerCase,
    TrackerContract,
)
from agentrl_core.tracking.plugin import CONSOLE, CURVE, JSONL, TENSORBOARD


class TestGRPO(AdvantageEstimatorContract):
    @pytest.fixture
    def plugin(self) -> AdvantageEstimatorCase:
        ids = np.array(["a", "a"], object), np.array(["t0", "t1"], object)
        batch = AdvantageInput(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2, dtype=torch.bool), *ids)
        return AdvantageEstimatorCase(GRPO, known=[(batch, torch.tensor([[1.0, 1.0], [-1.0, -1.0]]) / 2**0.5)])


class TestGAE(AdvantageEstimatorContract):
    @pytest.fixture
    def plugin(self) -> AdvantageEstimatorCase:
        return AdvantageEstimatorCase(GAE)


class TestPPO(PolicyLossContract):
    @pytest.fixture
    def plugin(self) -> PolicyLossCase:
        zero, one = torch.zeros(1, 1), torch.ones(1, 1)
        on_policy = PolicyLossInput(zero, zero, 2 * one, torch.ones(1, 1, dtype=torch.bool))
        return PolicyLossCase(PPO, known=[(on_policy, -2 * one)])


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


def read_jsonl(run_dir: Path) -> dict[int, dict[str, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows}


def read_tensorboard(run_dir: Path) -> dict[int, dict[str, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[int, dict[str, float]] = {}
    for folder in {file.parent for file in run_dir.rglob("events.out.tfevents.*")}:
        events = EventAccumulator(str(folder)).Reload()
        for name in events.Tags()["scalars"]:
            for event in events.Scalars(name):
                found.setdefault(event.step, {})[name] = event.value
    return found


class TestJsonl(TrackerContract):
    @pytest.fixture
    def plugin(self) -> TrackerCase:
        return TrackerCase(JSONL, read=read_jsonl)


class TestTensorboard(TrackerContract):
    @pytest.fixture
    def plugin(self) -> TrackerCase:
        return TrackerCase(TENSORBOARD, read=read_tensorboard)


class TestConsole(TrackerContract):
    @pytest.fixture
    def plugin(self) -> TrackerCase:
        return TrackerCase(CONSOLE)


class TestCurve(TrackerContract):
    @pytest.fixture
    def plugin(self) -> TrackerCase:
        return TrackerCase(CURVE)
