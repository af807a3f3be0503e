import numpy as np
import pytest
import torch

from agentrl_algorithms import plugin as plugins
from agentrl_algorithms.plugin import PPO
from agentrl_core.api import AdvantageInput, PluginSpec, PolicyLossInput
from agentrl_testing.contracts import (
    AdvantageEstimatorCase,
    AdvantageEstimatorContract,
    PolicyLossCase,
    PolicyLossContract,
    RolloutCorrectionCase,
    RolloutCorrectionContract,
)

PAIR = AdvantageInput(
    torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
    torch.ones(2, 2, dtype=torch.bool),
    np.array(["a", "a"], object),
    np.array(["t0", "t1"], object),
)
"""Two samples of one prompt with the scores 1 and 0."""
OF_PAIR = {
    "grpo": (0.5**0.5, -(0.5**0.5)),
    "rloo": (1.0, -1.0),
    "turn_rloo": (1.0, -1.0),
    "reinforce_plus_plus": (0.5**0.5, -(0.5**0.5)),
    "reinforce_plus_plus_baseline": (0.5**0.5, -(0.5**0.5)),
    "opo": (0.5, -0.5),
    "gpg": (0.5, -0.5),
    "grpo_passk": (1.0, 0.0),
    "maxrl": (1.0, -1.0),
}
ESTIMATORS = [
    spec for spec in vars(plugins).values() if isinstance(spec, PluginSpec) and spec.kind == "advantage_estimator"
]


class TestEstimators(AdvantageEstimatorContract):
    @pytest.fixture(params=ESTIMATORS, ids=lambda spec: spec.name)
    def plugin(self, request: pytest.FixtureRequest) -> AdvantageEstimatorCase:
        known = []
        if request.param.name in OF_PAIR:
            known.append((PAIR, torch.tensor(OF_PAIR[request.param.name])[:, None].expand(2, 2)))
        return AdvantageEstimatorCase(request.param, known=known)


class TestPPO(PolicyLossContract):
    @pytest.fixture
    def plugin(self) -> PolicyLossCase:
        zero, one = torch.zeros(1, 1), torch.ones(1, 1)
        on_policy = PolicyLossInput(zero, zero, 2 * one, torch.ones(1, 1, dtype=torch.bool))
        return PolicyLossCase(PPO, known=[(on_policy, -2 * one)])


LOSSES = [
    PolicyLossCase(plugins.GSPO),
    PolicyLossCase(plugins.CISPO),
    PolicyLossCase(plugins.GMPO),
    PolicyLossCase(plugins.SAPO),
    PolicyLossCase(plugins.DPPO),
    PolicyLossCase(plugins.DPPO, config=plugins.DPPOConfig(divergence="kl")),
    PolicyLossCase(plugins.CLIP_COV, config=plugins.ClipCovConfig(share=0.3, cov_low=0.0)),
    PolicyLossCase(plugins.KL_COV, config=plugins.KLCovConfig(share=0.3)),
    PolicyLossCase(plugins.GPG_LOSS),
    PolicyLossCase(plugins.TIS_REINFORCE),
    PolicyLossCase(plugins.DRO, config=plugins.DROConfig(tau=0.01)),
    PolicyLossCase(plugins.SFT, follows_advantages=False),
    PolicyLossCase(plugins.SFT, config=plugins.SFTConfig(tokens="positive")),
]
CORRECTIONS = [
    RolloutCorrectionCase(plugins.TOKEN_TIS),
    RolloutCorrectionCase(plugins.SEQUENCE_TIS, config=plugins.ImportanceConfig(normalize=True)),
    RolloutCorrectionCase(plugins.TOKEN_MIS, config=plugins.ImportanceConfig(normalize=True)),
    RolloutCorrectionCase(plugins.SEQUENCE_MIS),
    RolloutCorrectionCase(plugins.ICEPOP),
    RolloutCorrectionCase(plugins.GEOMETRIC_REJECTION),
    RolloutCorrectionCase(plugins.PERCENTILE_REJECTION, config=plugins.PercentileConfig(keep=0.7)),
]


class TestLosses(PolicyLossContract):
    @pytest.fixture(params=LOSSES, ids=lambda case: case.spec.name)
    def plugin(self, request: pytest.FixtureRequest) -> PolicyLossCase:
        return request.param


class TestCorrections(RolloutCorrectionContract):
    @pytest.fixture(params=CORRECTIONS, ids=lambda case: case.spec.name)
    def plugin(self, request: pytest.FixtureRequest) -> RolloutCorrectionCase:
        return request.param
