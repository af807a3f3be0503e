"""On-policy distillation: the student samples, and a teacher says of each token how likely it finds it.

Shapes: B rows, R response tokens.
"""

import torch

from agentrl_algorithms.config import OnPolicyDistillationConfig
from agentrl_algorithms.groups import Trajectories, standardised
from agentrl_core.api import AdvantageEstimator, AdvantageInput, AdvantageOutput, AlgorithmContext, ConfigError


class OnPolicyDistillation(AdvantageEstimator):
    r"""On-policy distillation with the reverse KL divergence (GKD, arXiv 2306.13649; MiniLLM, arXiv 2306.08543).

        A_it = -(log pi_old(a_it) - log pi_teacher(a_it)) + reward_coef * (s_i - mean(s)) / (std(s) + 1e-6)

    The first part is the estimate from one sample of -KL(pi_old || pi_teacher) at the token. The second one is the
    advantage of ``grpo``, over the scores s of the group of trajectory i; it is 0 for groups of one usable trajectory
    and groups with equal scores. ``reward_coef`` is in nats per standard deviation.

    Left out: the effect of a token on the KL divergence of later ones, which MiniLLM has as a return (a discount of 0
    has less variance); the sum over the vocabulary and the other divergences of GKD, which need more than the sampled
    tokens' log-probs.

    ``returns`` are the scores. Metrics: ``teacher_kl``, mean of the estimate over sampled tokens, in nats. Raises
    ValueError where the batch has no old or teacher log-probs, ConfigError for a ``reward_coef`` without groups.
    """

    config: OnPolicyDistillationConfig

    def __init__(self, config: OnPolicyDistillationConfig, context: AlgorithmContext) -> None:
        if config.reward_coef > 0 and context.group_size < 2:
            raise ConfigError(
                f"algorithm.advantage.config.reward_coef: {config.reward_coef} compares the samples of one prompt, and "
                f"rollout.n is {context.group_size}; set rollout.n >= 2 or reward_coef=0"
            )
        super().__init__(config, context)

    def __call__(self, batch: AdvantageInput) -> AdvantageOutput:
        if batch.old_log_probs is None or batch.teacher_log_probs is None:
            raise ValueError("on_policy_distillation needs old and teacher log-probs, and the batch lacks one of them")
        trajectories = Trajectories(batch)
        mask_BR = trajectories.mask_BR
        kl_BR = torch.where(mask_BR, batch.old_log_probs - batch.teacher_log_probs, 0.0).float()
        relative_M = self.config.reward_coef * standardised(trajectories.scores_M, trajectories.group_M)
        kl = float(kl_BR.double().sum()) / max(int(mask_BR.sum()), 1)
        return AdvantageOutput(
            trajectories.spread(relative_M) - kl_BR, trajectories.spread(trajectories.scores_M), {"teacher_kl": kl}
        )
