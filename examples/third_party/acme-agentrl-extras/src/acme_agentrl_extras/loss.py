"""The policy loss."""

import torch

from acme_agentrl_extras.config import AgreementConfig
from agentrl_core.api import PolicyLoss, PolicyLossInput, PolicyLossOutput


class Agreement(PolicyLoss):
    """-w A log π with w = exp(-|log π_old - log μ| / scale): tokens on which engine and trainer disagree count less.

    π_old is the trainer's policy before the update and μ the engine's. Shapes [b, R].
    """

    config: AgreementConfig

    def __call__(self, batch: PolicyLossInput) -> PolicyLossOutput:
        if batch.rollout_log_probs is None:
            raise ValueError("acme_agreement needs rollout_log_probs")
        gap_bR = (batch.old_log_probs - batch.rollout_log_probs).abs()
        weights_bR = torch.exp(-gap_bR / self.config.scale)
        return PolicyLossOutput(-weights_bR * batch.advantages * batch.log_probs, {"agreement": weights_bR})
