"""The plain policy gradient. Shapes: b rows of a micro-batch, R response tokens."""

import torch

from agentrl_core.api import PolicyLoss, PolicyLossInput, PolicyLossOutput


class GPGLoss(PolicyLoss):
    r"""GPG, arXiv 2504.02546: REINFORCE (Williams 1992) as a loss to be minimised:

        loss = -A * log pi(a_t)

    No ratio and no clip: right for one optimizer step per batch (``actor.epochs: 1``, ``actor.mini_batches: 1``);
    after the first step the tokens are no longer the policy's own.

    Left out: the paper's scale of the advantages, which is an estimator's task.
    """

    def __call__(self, batch: PolicyLossInput) -> PolicyLossOutput:
        mask_bR = batch.response_mask.bool()
        advantages_bR = torch.where(mask_bR, batch.advantages, 0.0)
        return PolicyLossOutput(-advantages_bR * torch.where(mask_bR, batch.log_probs, 0.0))
