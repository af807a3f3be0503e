"""Supervised learning on the sampled tokens. Shapes: b rows of a micro-batch, R response tokens."""

import torch

from agentrl_algorithms.config import SFTConfig
from agentrl_core.api import PolicyLoss, PolicyLossInput, PolicyLossOutput


class SFT(PolicyLoss):
    r"""Negative log-likelihood of what was sampled:

        loss = -weight * log pi(a_t)                 tokens: all
        loss = -weight * log pi(a_t) * [A_t > 0]     tokens: positive

    ``all`` is for answers of another policy, as in a warm start or distillation from an engine that serves a teacher:
    on the policy's own samples the expected gradient is 0. ``positive`` keeps what was better than the baseline, also
    of the policy's own samples: rejection-sampling fine-tuning (RAFT, arXiv 2304.06767). Denominators stay those of all
    tokens.

    Left out: the ranking of RAFT within a prompt, for which the sign of the advantage stands.

    Metrics: ``nll``, -log pi; ``trained``, 1 for the tokens that count.
    """

    config: SFTConfig

    def __call__(self, batch: PolicyLossInput) -> PolicyLossOutput:
        mask_bR = batch.response_mask.bool()
        nll_bR = -torch.where(mask_bR, batch.log_probs, 0.0)
        trained_bR = mask_bR if self.config.tokens == "all" else mask_bR & (batch.advantages > 0)
        losses_bR = self.config.weight * nll_bR * trained_bR
        return PolicyLossOutput(losses_bR, {"nll": nll_bR.detach(), "trained": trained_bR.float()})
