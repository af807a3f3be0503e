"""What rollout files and hooks get of a finished trajectory."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch

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
    step: int, split: Split, results: Sequence[TrajectoryResult], batch: DataProto | None = None
) -> list[RolloutRecord]:
    """Make a record of each row, with its advantages if it was trained, as a row of ``batch``.

    A trajectory that failed before it had a row leaves a record with its error.
    """
    records: list[RolloutRecord] = []
    columns = _token_columns(batch) if batch is not None and len(batch) else {}
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
            "spans": result.spans,
            "served": result.served,
        }
        trained = columns.get(result.trajectory_id, [])
        # A hook may have replaced the batch by fewer rows.
        rows = iter(trained if len(trained) == sum(output.trained for output in outputs) else ())
        for output in outputs:
            column = next(rows, {}) if output.trained else {}
            row_fields = {item.name: getattr(output, item.name) for item in fields(AgentLoopOutput)}
            records.append(RolloutRecord(**row_fields | outcome | column))
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


def _token_columns(batch: DataProto) -> dict[str, list[dict[str, Any]]]:
    """By trajectory id, what records keep of each of its rows: ``advantage``, ``advantages``, ``old_log_probs``."""
    tensors = batch.batch
    mask_BR = tensors["response_mask"].numpy().astype(bool)
    lengths = tensors["attention_mask"][:, -mask_BR.shape[1] :].sum(-1).tolist()
    advantages_BR = tensors["advantages"].double().numpy()
    old_BR = np.where(mask_BR, tensors["old_log_probs"].double().numpy().round(5), 0.0)
    reused = "rollout_log_probs" in tensors.keys() and torch.equal(
        tensors["old_log_probs"], tensors["rollout_log_probs"]
    )
    columns: dict[str, list[dict[str, Any]]] = {}
    for row, name in enumerate(batch.non_tensor_batch["trajectory_id"].tolist()):
        sampled = advantages_BR[row][mask_BR[row]]
        column: dict[str, Any] = {"advantage": float(sampled.mean()) if len(sampled) else 0.0}
        if len(sampled) and np.ptp(sampled):
            column["advantages"] = np.where(mask_BR[row], advantages_BR[row].round(5), 0.0)[: lengths[row]].tolist()
        if not reused:
            column["old_log_probs"] = old_BR[row, : lengths[row]].tolist()
        columns.setdefault(name, []).append(column)
    return columns
