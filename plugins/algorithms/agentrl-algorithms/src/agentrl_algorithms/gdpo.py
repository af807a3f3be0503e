"""GDPO: normalises each part of a score within its group before they are added up.

Shapes: M trajectories.
"""

import logging

import torch

from agentrl_algorithms.config import GDPOConfig
from agentrl_algorithms.groups import Trajectories, scaled, standardised
from agentrl_core.api import AdvantageEstimator, AdvantageInput, AdvantageOutput, AlgorithmContext

logger = logging.getLogger(__name__)


class GDPO(AdvantageEstimator):
    r"""Group reward-decoupled normalisation, arXiv 2601.05242.

        a_ik = (c_ik - mean(c_1k … c_nk)) / (std(c_1k … c_nk) + 1e-6)      within the group of trajectory i
        a_i  = sum over k of w_k a_ik
        A_i  = a_i / (std(a) + 1e-6)                                       over all trajectories of the batch

    ``c_ik`` is component k of the score of trajectory i, as the reward manager names it, and ``w_k`` its weight in
    ``weights``, 1 if it is not named there. The sum of components would let one with a large range hide the others,
    and makes different combinations look alike; normalised one by one they all count.

    A trajectory that lacks a component (NaN) neither votes in its statistics nor gets anything from it. The mean of a
    over the batch, which the paper subtracts, is 0: each group's is. The standard deviations have the divisors n - 1
    and M - 1. Groups of one usable trajectory, and groups whose components are all equal, get exactly 0.

    Left out: rewards that count only if another one is earned, which are a reward function's business.

    ``returns`` and metrics are those of ``grpo``.
    """

    config: GDPOConfig

    def __init__(self, config: GDPOConfig, context: AlgorithmContext) -> None:
        super().__init__(config, context)
        self._seen: set[str] = set()
        self._reported: set[str] = set()

    def __call__(self, batch: AdvantageInput) -> AdvantageOutput:
        self._report_unknown_weights(batch)
        trajectories = Trajectories(batch)
        total_M = torch.zeros_like(trajectories.scores_M)
        for name, component_B in batch.components.items():
            values_M = trajectories.of_rows(component_B)
            has_M = ~values_M.isnan()
            normalised = standardised(values_M[has_M], trajectories.group_M[has_M])
            total_M[has_M] += self.config.weights.get(name, 1.0) * normalised
        return trajectories.output(scaled(total_M))

    def _report_unknown_weights(self, batch: AdvantageInput) -> None:
        """Warn once about each weight whose component no batch has had; a later batch may have it."""
        self._seen.update(batch.components)
        for name in sorted(self.config.weights.keys() - self._seen - self._reported):
            self._reported.add(name)
            logger.warning(
                "gdpo: no component '%s' of algorithm.advantage.config.weights so far; this batch has %s",
                name, ", ".join(sorted(batch.components)) or "none",
            )  # fmt: skip
