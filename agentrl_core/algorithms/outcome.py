"""From a batch of trajectories to what an advantage estimator sees."""

import math
from dataclasses import replace
from typing import Any, cast

import torch

from agentrl_core.api.algorithm import AdvantageInput
from agentrl_core.protocol import DataProto
from agentrl_core.protocol.ragged import converted


def advantage_input(batch: DataProto) -> AdvantageInput:
    """The estimator's view of a batch of trajectories; columns that the batch does not have become None."""
    present, objects = set(batch.batch.keys()), batch.non_tensor_batch
    parts = objects["reward_components"]
    names = dict.fromkeys(name for each in parts for name in each)

    def column(name: str) -> Any:
        return batch.batch[name] if name in present else None

    return AdvantageInput(
        token_rewards=batch.batch["rm_scores"],
        response_mask=batch.batch["response_mask"],
        group_ids=objects["uid"],
        trajectory_ids=objects["trajectory_id"],
        data_sources=objects.get("data_source"),
        values=column("values"),
        outcomes=batch.batch["outcomes"],
        scores=batch.batch["scores"],
        turn_ids=converted(batch.batch["turn_ids"], torch.int64),
        turn_rewards=batch.batch["turn_rewards"],
        components={name: torch.tensor([each.get(name, math.nan) for each in parts]) for name in names},
        old_log_probs=column("old_log_probs"),
        rollout_log_probs=column("rollout_log_probs"),
        ref_log_probs=column("ref_log_prob"),
        entropies=column("entropys"),
        teacher_log_probs=column("teacher_log_probs"),
        correction_weights=column("correction_weights"),
        baselines=column("baselines"),
    )


def outcomes_only(batch: AdvantageInput) -> AdvantageInput:
    """The batch as version 1 of the contract had it: each row's last token has the score of its trajectory."""
    mask_BR = batch.response_mask.bool()
    positions_R = torch.arange(1, mask_BR.shape[1] + 1)
    last_B = (mask_BR * positions_R).amax(-1, keepdim=True) if mask_BR.shape[1] else mask_BR.sum(-1, keepdim=True)
    rewards_BR = torch.where(mask_BR & (positions_R == last_B), batch.scores[:, None], 0.0)
    return replace(batch, token_rewards=rewards_BR, scores=cast(Any, None))
