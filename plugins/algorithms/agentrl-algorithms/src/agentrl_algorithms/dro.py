"""Direct reward optimisation. Shapes: b rows of a micro-batch, R response tokens."""

from agentrl_algorithms.config import DROConfig
from agentrl_algorithms.ratio import log_ratio, row_mean
from agentrl_core.api import PolicyLoss, PolicyLossInput, PolicyLossOutput


class DRO(PolicyLoss):
    r"""DRO, arXiv 2405.19107: a regression of the reward on the log-ratio of the whole answer,

        loss = 1/2 * (r - V - tau * sum_t log(pi(a_t) / pi_ref(a_t)))^2          the same for every token of the row

    whose minimum is the optimal policy of the KL-regularised objective, whatever policy sampled the answer. The paper
    learns V(x) with a second network. Here r - V is the advantage: the estimator's baseline is V, such as the mean of
    the prompt's answers with ``grpo`` and ``norm_by_std: false``, or a critic with ``gae``. The V of the minimum is
    tau * log E_ref[exp(r / tau)], which a mean of rewards approaches as tau grows. A is the mean of the row's
    advantages. The paper averages over rows: ``algorithm.aggregation: seq-mean-token-mean``. The regression holds the
    KL term, so leave ``algorithm.kl_coef`` 0.

    Left out: the training of V.

    Metrics: ``residual``, what is squared; ``reference_log_ratio``, the sum.
    """

    config: DROConfig

    def __call__(self, batch: PolicyLossInput) -> PolicyLossOutput:
        if batch.ref_log_probs is None:
            raise ValueError("dro needs ref_log_probs, the log-probs of a reference model")
        mask_bR = batch.response_mask.bool()
        sums_b1 = log_ratio(batch.log_probs, batch.ref_log_probs, mask_bR).sum(-1, keepdim=True)
        residual_bR = (row_mean(batch.advantages, mask_bR) - self.config.tau * sums_b1).expand_as(batch.log_probs)
        metrics = {"residual": residual_bR.detach(), "reference_log_ratio": sums_b1.detach().expand_as(residual_bR)}
        return PolicyLossOutput(residual_bR.square() / 2, metrics)
