"""Finished trajectories as records for the disk and for the eye."""

from collections.abc import Mapping, Sequence

from agentrl_core.api import EndedTrajectory
from agentrl_core.protocol import DataProto
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.runs.records import RolloutRecord, reward_input
from agentrl_core.runs.run_dir import Split


def make_records(
    step: int, split: Split, results: Sequence[TrajectoryResult], advantages: Mapping[str, float]
) -> list[RolloutRecord]:
    """One record per row; a trajectory that failed before it had one still leaves a record with its error."""
    records: list[RolloutRecord] = []
    for result in results:
        row = result.row
        common = {
            "step": step,
            "split": split,
            "uid": row["uid"],
            "trajectory_id": result.trajectory_id,
            "sample": row["sample_index"],
            "data_source": row.get("data_source", ""),
            "tool_schemas": result.tool_schemas,
            "tool_calls": result.tool_calls,
            "reward": result.reward.score if result.reward else None,
            "reward_metrics": dict(result.reward.metrics) if result.reward else {},
            "termination": result.termination.value,
            "ground_truth": (row.get("reward_model") or {}).get("ground_truth"),
            "timings": result.timings,
            "error": result.error,
            "advantage": advantages.get(result.trajectory_id),
        }
        if not result.outputs:
            records.append(RolloutRecord(**common, prompt_ids=[], response_ids=[], response_mask=[]))
        for output in result.outputs:
            is_last = output is result.outputs[-1]
            records.append(
                RolloutRecord(
                    **common,
                    reward_input=reward_input(result.reward_input) if result.reward_input and is_last else None,
                    prompt_ids=output.prompt_ids,
                    response_ids=output.response_ids,
                    response_mask=output.response_mask,
                    response_logprobs=output.response_logprobs,
                    policy_versions=output.policy_versions,
                    prompt_text=output.extra_fields.get("prompt_text", ""),
                    segments=output.extra_fields.get("segments", []),
                    messages=output.messages,
                    tool_rewards=output.tool_rewards,
                    turn_scores=output.turn_scores,
                    num_turns=output.num_turns,
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
