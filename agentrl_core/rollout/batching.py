"""Finished trajectories as one batch, whose columns are padded where somebody asks for that, to the batch's own maxima.

Legend: B rows, P prompt tokens, R response tokens.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from agentrl_core.api import RewardResult
from agentrl_core.api.agent_loop import Status
from agentrl_core.api.tree import Node, TreePath, packed_ids
from agentrl_core.protocol import DataProto
from agentrl_core.protocol.ragged import Few, Filled, Order, RaggedColumn, Rows, Runs, Source, Values
from agentrl_core.rollout.loop_output import TreeRow
from agentrl_core.rollout.results import TrajectoryResult

Array = np.ndarray[Any, Any]
NOTHING = np.float32(0)


def to_data_proto(results: Sequence[TrajectoryResult], pad_token_id: int, meta_info: dict[str, Any]) -> DataProto:
    """The trained rows of ``results``, those that are replaced by others left out.

    Tensors: ``prompts [B, P]`` left-padded and ``responses [B, R]`` right-padded, both parts of ``input_ids [B, P+R]``,
    ``response_mask [B, R]`` bool, ``attention_mask`` and ``position_ids`` ``[B, P+R]``, the columns of
    :func:`reward_columns`,
    ``turn_ids`` and ``policy_versions`` ``[B, R]`` (-1 under mask 0; version 0 where a loop names none), and
    ``rollout_log_probs [B, R]`` and ``baselines [B]`` where every row has them. Ids, positions, turns and versions are
    int32, ``attention_mask`` is int8. Objects: ``uid`` (the prompt's group), ``trajectory_id``, ``data_source``,
    ``num_turns``, ``termination``, ``log_prob_settings``, ``reward_components`` (numbers by name), a column for each
    extra field of the rows, None in the rows without it, and if any row has images ``images``: the names of each row's
    in the order of its tokens, and where every row has them ``routed_experts``: [tokens, layers, k] of all tokens
    up to a row's last turn, but that turn's last one.
    """
    trained = [result for result in results if result.status is Status.TRAINED]
    pairs = [(result, row) for result in trained for row in result.outputs if row.trained]
    paths = [row.tokens for _, row in pairs]
    after = [node for path in paths for node in path.response]
    prompts_B, responses_B = (
        np.array([sum([len(node.ids) for node in part(path)]) for path in paths], dtype=np.int64)
        for part in (_prompt, _response)
    )
    width_P, width_R = int(prompts_B.max(initial=0)), int(responses_B.max(initial=0))
    # Writable, as tensors must be.
    flat = np.frombuffer(bytearray().join([packed_ids(path.nodes) for path in paths]), np.int32)
    whole = Rows(prompts_B + responses_B, width_P + width_R, width_P - prompts_B)
    response = Rows.of(responses_B, width_R)
    ids = RaggedColumn(Values(flat), whole, pad_token_id)
    columns = _by_token(paths, after)
    tensors: dict[str, torch.Tensor] = {
        "prompts": ids.part(0, width_P),
        "responses": ids.part(width_P, width_R),
        "input_ids": ids,
        "attention_mask": RaggedColumn(Filled(np.int8), whole),
        "position_ids": RaggedColumn(Order(), whole),
        **{name: RaggedColumn(source, response, fill) for name, (source, fill) in columns.items()},
    }
    mask, turns = (columns[name][0].values(response) for name in ("response_mask", "turn_ids"))
    token_rewards, of_rows = reward_columns(trained, mask, turns, response)
    tensors["rm_scores"] = RaggedColumn(token_rewards, response)
    tensors |= {name: torch.from_numpy(column) for name, column in of_rows.items()}
    baselines = [result.baseline for result, _ in pairs]
    if all(value is not None for value in baselines):
        tensors["baselines"] = torch.tensor(baselines, dtype=torch.float32)
    return DataProto.from_dict(tensors=tensors, non_tensors=_objects(pairs), meta_info=meta_info)


_prompt, _response = attrgetter("prompt"), attrgetter("response")


def _by_token(paths: Sequence[TreePath], nodes: Sequence[Node]) -> dict[str, tuple[Source, float]]:
    """Columns of the response tokens of all rows, one row after the other, and what stands behind the end of a row.

    Args:
        nodes: the responses of all paths.
    """
    numbers: dict[Node, int] = {}
    for tree in dict.fromkeys(path.tree for path in paths):
        numbers |= tree.numbers
    versions, counts = list[int](), list[int]()
    for node in nodes:
        known = [(each.version, each.end - each.start) for each in node.spans] if node.sampled else []
        for version, count in known or [(0 if node.sampled else -1, len(node.ids))]:
            versions.append(version)
            counts.append(count)
    lengths = [len(node.ids) for node in nodes]

    columns: dict[str, tuple[Source, float]] = {
        "response_mask": (Runs([node.sampled for node in nodes], lengths, np.bool_), 0),
        "turn_ids": (Runs([numbers.get(node, -1) for node in nodes], lengths, np.int32), -1),
        "policy_versions": (Runs(versions, counts, np.int32), -1),
    }
    if not any(node.sampled and node.log_probs is None for node in nodes):
        parts = [_singles(node.log_probs) or bytes(4 * len(node.ids)) for node in nodes]
        columns["rollout_log_probs"] = Values(np.frombuffer(bytearray().join(parts), np.float32)), 0.0
    return columns


def _singles(values: Sequence[float] | None) -> "array[float] | None":
    return values if isinstance(values, array) and values.typecode == "f" else array("f", values or ())


def reward_columns(
    trained: Sequence[TrajectoryResult], mask: Array, turns: Array, rows: Rows
) -> tuple[Few, dict[str, Array]]:
    """Rewards in float32: those of response tokens, each where it was earned; ``scores`` and ``outcomes`` [B], of
    the row's trajectory with and without its turns and tokens; ``turn_rewards`` [B, T], of each turn of the row's
    trajectory.

    What turns and tokens earned that are in no row of the batch, because the template rewrote history or their row is
    not trained, adds to the outcome.

    Args:
        mask, turns: of all response tokens.
        rows: where each row's tokens are among them.
    """
    owners = [result for result in trained for output in result.outputs if output.trained]
    rewards = [result.reward or RewardResult(0.0) for result in owners]
    places = rows.slices
    count = max([int(turns.max(initial=-1)) + 1, *(len(reward.turn_rewards) for reward in rewards)])
    by_turn_BT = np.zeros((len(owners), count), dtype=np.float64)
    for row, reward in enumerate(rewards):
        by_turn_BT[row, : len(reward.turn_rewards)] = reward.turn_rewards
    with_turns = np.flatnonzero(by_turn_BT.any(axis=1)).tolist()
    present: dict[str, set[int]] = defaultdict(set)
    for row in with_turns:
        present[owners[row].trajectory_id].update(np.unique(turns[places[row]]).tolist())
    for row in with_turns:
        absent = [turn for turn in range(count) if turn not in present[owners[row].trajectory_id]]
        by_turn_BT[row, absent] = 0.0
    scores_B = np.array([reward.score for reward in rewards], dtype=np.float64)
    by_token = [part for result in trained for part in _by_row(result)]
    of_tokens: dict[str, float] = defaultdict(float)
    for result, part in zip(owners, by_token, strict=True):
        of_tokens[result.trajectory_id] += sum(part)
    earned_B = np.array([of_tokens[result.trajectory_id] for result in owners], dtype=np.float64)
    outcomes_B = scores_B - by_turn_BT.sum(axis=1) - earned_B
    earned: dict[int, np.float32] = dict(zip(*outcome_scores(mask, rows, outcomes_B), strict=True))
    for row in np.flatnonzero(by_turn_BT.any(axis=1)).tolist():
        mask_R, turns_R = mask[places[row]], turns[places[row]]
        for turn in np.unique(turns_R[mask_R]).tolist():
            place = places[row].start + int(np.flatnonzero(turns_R == turn)[-1])
            earned[place] = np.float32(earned.get(place, NOTHING) + by_turn_BT[row, turn])
    for row, part in enumerate(by_token):
        sampled = np.flatnonzero(mask[places[row]]) + places[row].start if part else ()
        for place, value in zip(sampled, part, strict=True):
            earned[int(place)] = earned.get(int(place), NOTHING) + np.float32(value)
    few = Few(np.array(list(earned), dtype=np.int64), np.array(list(earned.values()), dtype=np.float32))
    columns = {"scores": scores_B, "outcomes": outcomes_B, "turn_rewards": by_turn_BT}
    return few, {name: column.astype(np.float32, copy=False) for name, column in columns.items()}


def _by_row(result: TrajectoryResult) -> Iterator[list[float]]:
    """The token rewards of each row that is trained."""
    rewards = iter(result.reward.token_rewards if result.reward else ())
    for output in result.outputs:
        part = list(islice(rewards, output.tokens.sampled_tokens))
        if output.trained:
            yield part


def outcome_scores(mask: Array, rows: Rows, scores_B: Array) -> tuple[list[int], Array]:
    """Where each row's last token with mask 1 is among all response tokens, and its score in float32. A row without
    such a token has none."""
    sampled = [(row, part.stop - 1 - int(mask[part][::-1].argmax())) for row, part in enumerate(rows.slices)
               if mask[part].any()]  # fmt: skip
    return [place for _, place in sampled], scores_B[[row for row, _ in sampled]].astype(np.float32)


def _experts(path: TreePath) -> Array | None:
    parts = [node.routed_experts for node in path.nodes if node.sampled and len(node.ids)]
    return np.concatenate(parts) if parts and not any(part is None for part in parts) else None


def _objects(pairs: Sequence[tuple[TrajectoryResult, TreeRow]]) -> dict[str, np.ndarray[Any, Any]]:
    def column(values: Sequence[Any]) -> np.ndarray[Any, Any]:
        return np.fromiter(iter(values), dtype=object, count=len(values))

    extra = [output.extra_fields for _, output in pairs]
    names = dict.fromkeys(name for fields in extra for name in fields)
    images = [output.tokens.images for _, output in pairs]
    shown = {"images": column(images)} if any(images) else {}
    experts = [_experts(output.tokens) for _, output in pairs]
    if experts and not any(each is None for each in experts):
        shown["routed_experts"] = column(experts)
    return (
        {name: column([fields.get(name) for fields in extra]) for name in names}
        | shown
        | {
            "reward_components": column(
                [dict(result.reward.components) if result.reward else {} for result, _ in pairs]
            ),
            "uid": column([result.row["uid"] for result, _ in pairs]),
            "trajectory_id": column([result.trajectory_id for result, _ in pairs]),
            "data_source": column([result.row.get("data_source", "") for result, _ in pairs]),
            "num_turns": column([output.num_turns for _, output in pairs]),
            "termination": column([result.termination.value for result, _ in pairs]),
            "log_prob_settings": column([output.log_prob_settings for _, output in pairs]),
        }
    )
