"""The advantage estimator."""

from statistics import fmean

import torch

from agentrl_core.api import AdvantageEstimator, AdvantageInput, AdvantageOutput


class WeakestPart(AdvantageEstimator):
    """A = (smallest component of the trajectory) - (mean of that over the group): one good part can't hide a bad one.

    Trajectories without a component or without a sampled token get 0 and don't count in the mean. Rows: [B, R].
    """

    def __call__(self, batch: AdvantageInput) -> AdvantageOutput:
        weakest_B = torch.stack(list(batch.components.values())).nan_to_num(torch.inf).amin(0)
        counts_B = batch.response_mask.any(-1) & weakest_B.isfinite()
        groups: dict[object, dict[object, float]] = {}
        for row in counts_B.nonzero().flatten().tolist():
            groups.setdefault(batch.group_ids[row], {})[batch.trajectory_ids[row]] = weakest_B[row].item()
        means_B = torch.tensor([fmean(groups.get(group, {0: 0.0}).values()) for group in batch.group_ids])
        counts_BR = batch.response_mask & counts_B[:, None]
        advantages_BR = torch.where(counts_BR, (weakest_B - means_B)[:, None], 0.0)
        return AdvantageOutput(advantages_BR, torch.where(counts_BR, weakest_B[:, None], 0.0))
