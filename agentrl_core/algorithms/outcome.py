"""From a batch of trajectories to what an advantage estimator sees."""

from dataclasses import replace
from typing import Any, cast

import torch

from agentrl_core.api.algorithm import AdvantageInput
from agentrl_core.protocol import DataProto


def advantage_input(batch: DataProto) -> AdvantageInput:
    """The estimator's view of a batch with ``rm_scores`` and ``response_mask`` [B, R], ``uid``, ``trajectory_id``,
    and ``values`` [B, R] where there is a critic."""
    return AdvantageInput(
        token_rewards=batch.batch["rm_scores"],
        response_mask=batch.batch["response_mask"],
        group_ids=batch.non_tensor_batch["uid"],
        trajectory_ids=batch.non_tensor_batch["trajectory_id"],
        values=batch.batch["values"] if "values" in batch.batch.keys() else None,
    )


def outcomes_only(batch: AdvantageInput) -> AdvantageInput:
    """The batch as version 1 of the contract had it: each row's last token has the score of its trajectory."""
    mask_BR = batch.response_mask.bool()
    positions_R = torch.arange(1, mask_BR.shape[1] + 1)
    last_B = (mask_BR * positions_R).amax(-1, keepdim=True) if mask_BR.shape[1] else mask_BR.sum(-1, keepdim=True)
    rewards_BR = torch.where(mask_BR & (positions_R == last_B), batch.scores[:, None], 0.0)
    return replace(batch, token_rewards=rewards_BR, scores=cast(Any, None))
