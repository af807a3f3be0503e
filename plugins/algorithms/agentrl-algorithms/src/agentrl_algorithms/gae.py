"""Generalised advantage estimation over the tokens that the policy sampled.

Shapes: B rows, R response tokens.
"""

import torch
from torch import Tensor

from agentrl_algorithms.config import GAEConfig
from agentrl_algorithms.groups import whiten
from agentrl_core.api import AdvantageEstimator, AdvantageInput, AdvantageOutput


class GAE(AdvantageEstimator):
    r"""GAE, arXiv 1506.02438, equations 11, 12 and 16.

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}
        return_t = A_t + V_t                             (the critic's target)

    ``t + 1`` is the next *sampled* token: tokens under mask 0 (tool results, templates, padding) are no actions, so the
    recursion is carried across them and neither their values nor their rewards are read. Behind the last sampled token
    V and A are 0: every row is an episode that ends. ``gamma`` and ``lam`` discount per sampled token.

    ``whiten`` gives the advantages mean 0 and variance 1 over the batch's sampled tokens (returns are left alone), as
    PPO implementations do and the paper does not; a batch with fewer than two sampled tokens is not whitened.

    Left out: bootstrapping at a length limit. A response that is cut off ends with the reward that it got, because
    the limit is part of the task and the critic knows no state behind it.

    Raises ValueError where the batch has no values.
    """

    config: GAEConfig

    def __call__(self, batch: AdvantageInput) -> AdvantageOutput:
        if batch.values is None:
            raise ValueError("gae needs a critic's values, and the batch has none: use another estimator, e.g. grpo")
        mask_BR = batch.response_mask.bool()
        rewards_BR = torch.where(mask_BR, batch.token_rewards.float(), 0.0)
        values_BR = torch.where(mask_BR, batch.values.float(), 0.0)
        advantages_BR = self._recursion(rewards_BR, values_BR, mask_BR, *self.discounts(batch))
        returns_BR = advantages_BR + values_BR
        if self.config.whiten:
            advantages_BR = whiten(advantages_BR, mask_BR)
        return AdvantageOutput(advantages_BR, returns_BR)

    def discounts(self, batch: AdvantageInput) -> tuple[Tensor, Tensor]:
        """Gamma and lambda [B, R] of the step from each sampled token to the next one of its row."""
        ones_BR = torch.ones_like(batch.token_rewards, dtype=torch.float32)
        return self.config.gamma * ones_BR, self.config.lam * ones_BR

    def _recursion(
        self, rewards_BR: Tensor, values_BR: Tensor, mask_BR: Tensor, gamma_BR: Tensor, lam_BR: Tensor
    ) -> Tensor:
        advantages_BR = torch.zeros_like(values_BR)
        next_advantage_B = values_BR.new_zeros(len(values_BR))
        next_value_B = values_BR.new_zeros(len(values_BR))
        for t in reversed(range(values_BR.shape[1])):
            sampled_B = mask_BR[:, t]
            delta_B = rewards_BR[:, t] + gamma_BR[:, t] * next_value_B - values_BR[:, t]
            advantage_B = delta_B + gamma_BR[:, t] * lam_BR[:, t] * next_advantage_B
            advantages_BR[:, t] = torch.where(sampled_B, advantage_B, 0.0)
            next_advantage_B = torch.where(sampled_B, advantage_B, next_advantage_B)
            next_value_B = torch.where(sampled_B, values_BR[:, t], next_value_B)
        return advantages_BR
