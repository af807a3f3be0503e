"""What rollout files and hooks get of a finished trajectory."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from agentrl_core.api import AgentLoopOutput, EndedTrajectory
from agentrl_core.api.dataset import Split
from agentrl_core.protocol import DataProto
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.runs.records import RolloutRecord, reward_input


def _outcome(split: Split, result: TrajectoryResult) -> dict[str, Any]:
    """The fields that records and hooks share."""
    reward = result.reward
    return {
        "trajectory_id": result.trajectory_id,
        "uid": result.row["uid"],
        "split": split,
        "data_source": result.row.get("data_source", ""),
        "termination": result.termination,
        "reward": reward.score if reward else None,
        "reward_metrics": dict(reward.metrics) if reward else {},
        "timings": result.timings,
        "error": result.error,
    }


def make_records(
    step: int, split: Split, results: Sequence[TrajectoryResult], advantages: Mapping[str, float]
) -> list[RolloutRecord]:
    """Make a record of each row. A trajectory that failed before it had one leaves a record with its error."""
    records: list[RolloutRecord] = []
    for result in results:
        row, seen = result.row, result.reward_input
        outputs = result.outputs or [AgentLoopOutput([], [], [], None, result.termination)]
        outcome = _outcome(split, result) | {
            "step": step,
            "sample": row["sample_index"],
            "reward_components": dict(result.reward.components) if result.reward else {},
            "turn_rewards": list(result.reward.turn_rewards) if result.reward else [],
            "tool_schemas": result.tool_schemas,
            "tool_calls": result.tool_calls,
            "ground_truth": (row.get("reward_model") or {}).get("ground_truth"),
            "advantage": advantages.get(result.trajectory_id),
        }
        for output in outputs:
            row_fields = {item.name: getattr(output, item.name) for item in fields(AgentLoopOutput)}
            records.append(RolloutRecord(**row_fields | outcome))
        records[-1].reward_input = reward_input(seen) if seen is not None else None
    return records


def ended_trajectory(split: Split, result: TrajectoryResult) -> EndedTrajectory:
    """Make what hooks get of a trajectory."""
    last = result.outputs[-1] if result.outputs else None
    return EndedTrajectory(
        **_outcome(split, result) | {"termination": result.termination.value},
        messages=last.messages if last else [],
        num_turns=last.num_turns if last else 0,
        sampled_tokens=result.sampled_tokens,
        attempts=result.attempts,
        spans=result.spans,
        turn_tokens=result.turn_tokens,
        tool_calls=[
            {**call, "start": start, "seconds": seconds}
            for call, (start, seconds) in zip(result.tool_calls, result.tool_spans, strict=True)
        ],
    )


def trajectory_advantages(batch: DataProto) -> dict[str, float]:
    """Mean advantage of each trajectory's sampled tokens, by trajectory id."""
    mask = batch.batch["response_mask"]
    means = (batch.batch["advantages"] * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    return dict(zip(batch.non_tensor_batch["trajectory_id"].tolist(), means.tolist(), strict=True))
