"""Finished trajectories as records for the disk and for the eye."""

from collections.abc import Mapping, Sequence
from dataclasses import fields

from agentrl_core.api import AgentLoopOutput, EndedTrajectory
from agentrl_core.api.dataset import Split
from agentrl_core.protocol import DataProto
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.runs.records import RolloutRecord, reward_input


def make_records(
    step: int, split: Split, results: Sequence[TrajectoryResult], advantages: Mapping[str, float]
) -> list[RolloutRecord]:
    """One record per row; a trajectory that failed before it had one still leaves a record with its error."""
    records: list[RolloutRecord] = []
    for result in results:
        row, reward = result.row, result.reward
        outputs = result.outputs or [AgentLoopOutput([], [], [], None, result.termination)]
        for output in outputs:
            seen = result.reward_input if output is outputs[-1] else None
            of_row = {item.name: getattr(output, item.name) for item in fields(AgentLoopOutput)} | {
                "trajectory_id": result.trajectory_id, "termination": result.termination, "error": result.error,
            }  # fmt: skip
            records.append(
                RolloutRecord(
                    **of_row,
                    step=step,
                    split=split,
                    uid=row["uid"],
                    sample=row["sample_index"],
                    data_source=row.get("data_source", ""),
                    tool_schemas=result.tool_schemas,
                    tool_calls=result.tool_calls,
                    reward=reward.score if reward else None,
                    reward_metrics=dict(reward.metrics) if reward else {},
                    ground_truth=(row.get("reward_model") or {}).get("ground_truth"),
                    timings=result.timings,
                    advantage=advantages.get(result.trajectory_id),
                    reward_input=reward_input(seen) if seen is not None else None,
                )
            )
    return records


def ended_trajectory(split: Split, result: TrajectoryResult) -> EndedTrajectory:
    """What hooks see of a trajectory."""
    last = result.outputs[-1] if result.outputs else None
    return EndedTrajectory(
        trajectory_id=result.trajectory_id,
        uid=result.row["uid"],
        split=split,
        data_source=result.row.get("data_source", ""),
        termination=result.termination.value,
        reward=result.reward.score if result.reward else None,
        reward_metrics=dict(result.reward.metrics) if result.reward else {},
        messages=last.messages if last else [],
        num_turns=last.num_turns if last else 0,
        sampled_tokens=result.sampled_tokens,
        attempts=result.attempts,
        timings=result.timings,
        error=result.error,
    )


def trajectory_advantages(batch: DataProto) -> dict[str, float]:
    """Mean advantage of each trajectory's sampled tokens, by trajectory id."""
    mask = batch.batch["response_mask"]
    means = (batch.batch["advantages"] * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    return dict(zip(batch.non_tensor_batch["trajectory_id"].tolist(), means.tolist(), strict=True))
