"""What rollout files and hooks get of a finished trajectory."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from agentrl_core.api import EndedTrajectory
from agentrl_core.api.dataset import Split
from agentrl_core.api.record_format import SCHEMA_VERSION, earned_of, nodes_of
from agentrl_core.api.tree import Call, Node, Tree, TreePath, spans_of
from agentrl_core.protocol import DataProto
from agentrl_core.rollout.loop_output import TreeRow
from agentrl_core.rollout.results import AGENT, TrajectoryResult
from agentrl_core.runs.records import reward_input


def make_records(
    step: int, split: Split, results: Sequence[TrajectoryResult], batch: DataProto | None = None
) -> list[dict[str, Any]]:
    """Make the line of each trajectory, for ``to_json`` and ``rows_of``, with the advantages of the turns that are in
    ``batch``.
    """
    columns = _token_columns(batch) if batch is not None and len(batch) else {}
    lines: list[dict[str, Any]] = []
    for result in results:
        row = result.row
        if not result.other_agent:
            credit: dict[Node, dict[str, Any]] = {}
            lines.append({
                "schema_version": SCHEMA_VERSION,
                "step": step,
                "split": split,
                "sample": row["sample_index"],
                "trajectory_id": result.trajectory_id.partition(AGENT)[0],
                "data_source": row.get("data_source", ""),
                "ground_truth": (row.get("reward_model") or {}).get("ground_truth"),
                "tool_schemas": result.tool_schemas,
                "timings": result.timings,
                "waits": result.waits,
                "tree": (result.tree, credit),
                "agents": [],
            })  # fmt: skip
        trained = [output for output in result.outputs if output.trained]
        rows = columns.get(result.trajectory_id, [])
        # A hook may have replaced the batch by fewer rows.
        for output, column in zip(trained, rows, strict=True) if len(rows) == len(trained) else ():
            credit |= _by_node(output.tokens, column)
        lines[-1]["agents"].append(_agent(result))
    for line in lines:
        tree, credit = line.pop("tree")
        line["nodes"] = nodes_of(tree, credit)
        if tree.early.calls or tree.early.rewards:
            line["early"] = earned_of(tree.early)
    return lines


def _agent(result: TrajectoryResult) -> dict[str, Any]:
    reward, seen = result.reward, result.reward_input
    return {
        "agent": result.agent or "",
        "trajectory_id": result.trajectory_id,
        "uid": result.row["uid"],
        "status": result.status,
        "reason": result.reason,
        "termination": result.termination,
        "error": result.error,
        "reward": reward.score if reward else None,
        "reward_components": dict(reward.components) if reward else {},
        "reward_metrics": dict(reward.metrics) if reward else {},
        "turn_rewards": list(reward.turn_rewards) if reward else [],
        "reward_input": None if seen is None else reward_input(seen),
        "rows": [_row(output, result.tree) for output in result.outputs],
    }


def _row(output: TreeRow, tree: Tree) -> dict[str, Any]:
    leaf = output.tokens.leaf
    content = {"leaf": tree.nodes.index(leaf), "shared": output.tokens.shared, "trained": output.trained}
    content["num_turns"] = output.num_turns
    # What a loop set itself.
    names = ("metrics", "extra_fields", "tool_rewards", "tool_reward_names", "turn_scores")
    content |= {name: value for name in names if (value := getattr(output, name))}
    messages = [message for node in leaf.line for message in node.messages]
    return content if messages == output.messages else content | {"messages": output.messages}


def _by_node(path: TreePath, column: dict[str, Any]) -> dict[Node, dict[str, Any]]:
    """What a row of the batch says of each turn."""
    found: dict[Node, dict[str, Any]] = {}
    end = 0
    for node in path.response:
        start, end = end, end + len(node.ids)
        if node.kind == "turn" and node.ids:
            advantages = column["advantages"][start:end]
            same = len(set(advantages)) < 2
            rounded = [round(value, 5) for value in advantages]
            found[node] = {"advantage": advantages[0]} if same else {"advantages": rounded}
            if "old_log_probs" in column:
                found[node]["old_log_probs"] = column["old_log_probs"][start:end]
    return found


def ended_trajectory(split: Split, result: TrajectoryResult) -> EndedTrajectory:
    """Make what hooks get of a trajectory."""
    last = result.outputs[-1] if result.outputs else None
    spans, lengths = [] if result.other_agent else spans_of(result.tree, result.waits), result.tree.lengths
    return EndedTrajectory(
        trajectory_id=result.trajectory_id,
        uid=result.row["uid"],
        split=split,
        data_source=result.row.get("data_source", ""),
        termination=result.termination.value,
        reward=result.reward.score if result.reward else None,
        reward_metrics=dict(result.reward.metrics) if result.reward else {},
        error=result.error,
        timings={} if result.other_agent else result.timings,
        messages=last.messages if last else [],
        num_turns=last.num_turns if last else 0,
        sampled_tokens=result.sampled_tokens,
        attempts=result.attempts,
        spans=[span for span, _ in spans],
        turn_tokens=[
            (lengths[node] - len(node.ids), len(node.ids)) if node else (0, 0)
            for span, node in spans
            if span.kind == "generate"
        ],
        tool_calls=[_call(call) for call in result.calls],
    )


def _call(call: Call) -> dict[str, Any]:
    names = ("name", "arguments", "response", "failed", "start", "seconds")
    return {name: getattr(call, name) for name in names}


def _token_columns(batch: DataProto) -> dict[str, list[dict[str, Any]]]:
    """By trajectory id, ``advantages`` of each of its rows, and ``old_log_probs`` where they were computed."""
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
        column = {"advantages": advantages_BR[row][: lengths[row]].tolist()}
        if not reused:
            column["old_log_probs"] = old_BR[row, : lengths[row]].tolist()
        columns.setdefault(name, []).append(column)
    return columns
