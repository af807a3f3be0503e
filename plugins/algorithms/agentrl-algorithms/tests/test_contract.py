import numpy as np
import pytest
import torch

from agentrl_algorithms.plugin import GAE, GRPO, PPO
from agentrl_core.api import AdvantageInput, PolicyLossInput
from agentrl_core.testing.contracts import (
    AdvantageEstimatorCase,
    AdvantageEstimatorContract,
    PolicyLossCase,
    PolicyLossContract,
)


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
