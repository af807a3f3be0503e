"""ReMax: each sample is compared with a greedy answer to its prompt.

Shapes: M trajectories.
"""

from agentrl_algorithms.groups import Trajectories
from agentrl_core.api import AdvantageEstimator, AdvantageInput, AdvantageOutput


class ReMax(AdvantageEstimator):
    r"""ReMax, arXiv 2310.10505.

        A_i = s_i - s(greedy answer to the prompt of i)

    ``s_i`` is the score of trajectory i. The greedy answer is one more trajectory per prompt, which is not trained on.
    One sample per prompt is enough.

    Left out: the KL term that the paper's reward contains, which here is part of the loss.

    ``returns`` are the scores. Raises ValueError where the batch has no baselines.
    """

    def __call__(self, batch: AdvantageInput) -> AdvantageOutput:
        if batch.baselines is None:
            raise ValueError("remax needs the scores of greedy answers, and the batch has none: use e.g. rloo")
        trajectories = Trajectories(batch)
        advantages_M = trajectories.scores_M - trajectories.of_rows(batch.baselines)
        return AdvantageOutput(trajectories.spread(advantages_M), trajectories.spread(trajectories.scores_M))
