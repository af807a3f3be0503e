"""From a batch of trajectories to what an advantage estimator sees."""

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
