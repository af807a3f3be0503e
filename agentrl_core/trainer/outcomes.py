"""What rollout files and hooks get of a finished trajectory."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from agentrl_core.api import EndedTrajectory
from agentrl_core.api.dataset import Split
from agentrl_core.api.record_format import SCHEMA_VERSION, earned_of, nodes_of
from agentrl_core.api.tree import Call, Node, Tree, TreePath, spans_of
from agentrl_core.protocol import DataProto
from agentrl_core.protocol.ragged import values_in
from agentrl_core.rollout.loop_output import TreeRow
from agentrl_core.rollout.results import AGENT, TrajectoryResult
from agentrl_core.runs.records import reward_input
from agentrl_core.workers.micro_batching import response_rows


class Credit(NamedTuple):
    """What a batch says of the response tokens of its rows, one row after the other.

    Args:
        trajectories: the id of each row's trajectory.
        lengths: tokens of each row.
        advantages: float32 or float64.
        old_log_probs: None where they are those of the rollout.
    """

    trajectories: Sequence[str] = ()
    lengths: Sequence[int] = ()
    advantages: Any = None
    old_log_probs: Any = None

    @classmethod
    def of(cls, batch: DataProto) -> "Credit":
        """That of a batch with ``advantages`` and ``old_log_probs``."""
        if not len(batch):
            return cls()
        tensors = batch.batch
        rows = response_rows(tensors)

        def flat(name: str) -> Any:
            values = values_in(tensors[name], rows)
            return values if values.dtype == np.float64 else values.astype(np.float32, copy=False)

        old = flat("old_log_probs")
        if "rollout_log_probs" in tensors.keys() and np.array_equal(old, flat("rollout_log_probs")):
            old = None
        else:
            old = np.where(values_in(tensors["response_mask"], rows).astype(bool), old, 0.0)
        lengths, advantages = rows.lengths_B.tolist(), flat("advantages")
        return cls(batch.non_tensor_batch["trajectory_id"].tolist(), lengths, advantages, old)

    def rows(self) -> dict[str, list[dict[str, list[float]]]]:
        """By trajectory id, ``advantages`` of each of its rows, and ``old_log_probs`` where they were computed."""
        columns: dict[str, list[dict[str, Any]]] = {}
        end = 0
        for name, length in zip(self.trajectories, self.lengths, strict=True):
            start, end = end, end + length
            column = {"advantages": self.advantages[start:end].astype(np.float64)}
            if self.old_log_probs is not None:
                column["old_log_probs"] = self.old_log_probs[start:end].astype(np.float64).round(5)
            columns.setdefault(name, []).append(column)
        return columns


def make_records(
    step: int, split: Split, results: Iterable[TrajectoryResult], credits: Sequence[Credit] = ()
) -> Iterator[dict[str, Any]]:
    """Make the line of each trajectory, for ``to_json`` and ``rows_of``.

    Args:
        credits: of the batches that were trained, one of each policy.
    """
    columns = {name: rows for credit in credits for name, rows in credit.rows().items()}
    parts: list[TrajectoryResult] = []
    for result in results:
        if parts and not result.other_agent:
            yield _line(step, split, parts, columns)
            parts = []
        parts.append(result)
    if parts:
        yield _line(step, split, parts, columns)


def _line(
    step: int, split: Split, parts: Sequence[TrajectoryResult], columns: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    whole = parts[0]
    row, tree, credit = whole.row, whole.tree, dict[Node, dict[str, Any]]()
    for part in parts:
        trained = [output for output in part.outputs if output.trained]
        rows = columns.get(part.trajectory_id, ())
        # A hook may have replaced the batch by fewer rows.
        for output, column in zip(trained, rows, strict=True) if len(rows) == len(trained) else ():
            credit |= _by_node(output.tokens, column)
    line = {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        "split": split,
        "sample": row["sample_index"],
        "trajectory_id": whole.trajectory_id.partition(AGENT)[0],
        "data_source": row.get("data_source", ""),
        "ground_truth": (row.get("reward_model") or {}).get("ground_truth"),
        "tool_schemas": whole.tool_schemas,
        "timings": whole.timings,
        "waits": whole.waits,
        "agents": [_agent(part) for part in parts],
        "nodes": nodes_of(tree, credit),
    }
    return line | ({"early": earned_of(tree.early)} if tree.early.calls or tree.early.rewards else {})


def _agent(result: TrajectoryResult) -> dict[str, Any]:
    reward, seen = result.reward, result.reward_input
    return {
        "agent": result.agent or "",
        **({"policy": result.policy} if result.policy else {}),
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
    messages = leaf.conversation
    return content if messages == output.messages else content | {"messages": output.messages}


def _by_node(path: TreePath, column: Mapping[str, Any]) -> dict[Node, dict[str, Any]]:
    """What a row of the batch says of each turn."""
    found: dict[Node, dict[str, Any]] = {}
    end = 0
    for node in path.response:
        start, end = end, end + len(node.ids)
        if node.kind == "turn" and node.ids:
            advantages = column["advantages"][start:end]
            same = len(set(advantages.tolist())) < 2
            found[node] = {"advantage": advantages[0].item()} if same else {"advantages": rounded(advantages)}
            if "old_log_probs" in column:
                found[node]["old_log_probs"] = column["old_log_probs"][start:end].tolist()
    return found


def rounded(values: Any) -> list[float]:
    return [round(value, 5) for value in values.tolist()]


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
