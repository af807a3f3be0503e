"""Finished trajectories as one padded batch: padded once, vectorised, to the batch's own maxima.

Legend: B rows, P prompt tokens, R response tokens.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from agentrl_core.api import AgentLoopOutput, RewardResult
from agentrl_core.api.agent_loop import Status
from agentrl_core.protocol import DataProto
from agentrl_core.rollout.results import TrajectoryResult


def to_data_proto(results: Sequence[TrajectoryResult], pad_token_id: int, meta_info: dict[str, Any]) -> DataProto:
    """The trained rows of ``results``, those that are replaced by others left out.

    Tensors: ``prompts [B, P]`` left-padded, ``responses [B, R]`` right-padded, ``response_mask [B, R]`` bool,
    ``input_ids``, ``attention_mask``, ``position_ids`` ``[B, P+R]``, the columns of :func:`reward_columns`,
    ``turn_ids`` and ``policy_versions`` ``[B, R]`` (-1 under mask 0; version 0 where a loop names none), and
    ``rollout_log_probs [B, R]`` and ``baselines [B]`` where every row has them. Objects: ``uid`` (the
    prompt's group), ``trajectory_id``, ``data_source``, ``num_turns``, ``termination``, ``log_prob_settings``,
    ``reward_components`` (numbers by name), and a column for each extra field of the rows, None in the rows without it.
    """
    trained = [result for result in results if result.status is Status.TRAINED]
    pairs = [(result, output) for result in trained for output in result.outputs if output.trained]
    outputs = [output for _, output in pairs]
    prompts, prompt_mask = pad([output.prompt_ids for output in outputs], pad_token_id, left=True)
    responses, filled = pad([output.response_ids for output in outputs], pad_token_id, left=False)
    mask, _ = pad([output.response_mask for output in outputs], 0, left=False)
    attention = np.concatenate([prompt_mask, filled], axis=1).astype(np.int64)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": mask.astype(bool),
        "input_ids": np.concatenate([prompts, responses], axis=1),
        "attention_mask": attention,
        "position_ids": np.maximum(attention.cumsum(axis=1) - 1, 0),
        "turn_ids": pad([output.turn_ids for output in outputs], -1, left=False)[0],
        "policy_versions": pad([output.policy_versions for output in outputs], -1, left=False)[0],
    }
    tensors |= reward_columns(trained, mask.astype(bool), tensors["turn_ids"])
    baselines = [result.baseline for result, _ in pairs]
    if all(value is not None for value in baselines):
        tensors["baselines"] = np.array(baselines, dtype=np.float32)
    log_probs = [output.response_logprobs for output in outputs]
    if all(values is not None for values in log_probs):
        tensors["rollout_log_probs"] = pad([v for v in log_probs if v is not None], 0.0, left=False)[0]
    return DataProto.from_dict(
        tensors={key: torch.from_numpy(value) for key, value in tensors.items()},
        non_tensors=_objects(pairs),
        meta_info=meta_info,
    )


def pad(
    rows: Sequence[Sequence[Any]], value: float, *, left: bool
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Rows of different lengths as one array ``[B, longest]`` (int64, or float32 for a float ``value``), and where
    it is filled (bool)."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    width = int(lengths.max(initial=0))
    columns = np.arange(width)
    filled = columns >= width - lengths[:, None] if left else columns < lengths[:, None]
    dtype = np.float32 if isinstance(value, float) else np.int64
    padded = np.full((len(rows), width), value, dtype=dtype)
    padded[filled] = np.fromiter((item for row in rows for item in row), dtype=dtype, count=int(lengths.sum()))
    return padded, filled


def reward_columns(
    trained: Sequence[TrajectoryResult],
    mask_BR: np.ndarray[Any, Any],
    turns_BR: np.ndarray[Any, Any],
) -> dict[str, np.ndarray[Any, Any]]:
    """Rewards in float32: ``rm_scores`` [B, R], each where it was earned; ``scores`` and ``outcomes`` [B], of the row's
    trajectory with and without its turns and tokens; ``turn_rewards`` [B, T], of each turn of the row's trajectory.

    What turns and tokens earned that are in no row of the batch, because the template rewrote history or their row is
    not trained, adds to the outcome.
    """
    owners = [result for result in trained for output in result.outputs if output.trained]
    rewards = [result.reward or RewardResult(0.0) for result in owners]
    turns = max([int(turns_BR.max(initial=-1)) + 1, *(len(reward.turn_rewards) for reward in rewards)])
    by_turn_BT = np.zeros((len(owners), turns), dtype=np.float64)
    for row, reward in enumerate(rewards):
        by_turn_BT[row, : len(reward.turn_rewards)] = reward.turn_rewards
    present: dict[str, set[int]] = defaultdict(set)
    for result, turns_R in zip(owners, turns_BR, strict=True):
        present[result.trajectory_id].update(turns_R[turns_R >= 0].tolist())
    for row in np.flatnonzero(by_turn_BT.any(axis=1)).tolist():
        absent = [turn for turn in range(turns) if turn not in present[owners[row].trajectory_id]]
        by_turn_BT[row, absent] = 0.0
    scores_B = np.array([reward.score for reward in rewards], dtype=np.float64)
    by_token = [part for result in trained for part in _by_row(result)]
    of_tokens: dict[str, float] = defaultdict(float)
    for result, part in zip(owners, by_token, strict=True):
        of_tokens[result.trajectory_id] += sum(part)
    earned_B = np.array([of_tokens[result.trajectory_id] for result in owners], dtype=np.float64)
    outcomes_B = scores_B - by_turn_BT.sum(axis=1) - earned_B
    rewards_BR = outcome_scores(mask_BR, outcomes_B.tolist())
    for row in np.flatnonzero(by_turn_BT.any(axis=1)).tolist():
        for turn in np.unique(turns_BR[row][mask_BR[row]]).tolist():
            rewards_BR[row, np.flatnonzero(turns_BR[row] == turn)[-1]] += by_turn_BT[row, turn]
    for row, part in enumerate(by_token):
        if part:
            rewards_BR[row, np.flatnonzero(mask_BR[row])] += np.asarray(part, dtype=np.float32)
    columns = {"scores": scores_B, "outcomes": outcomes_B, "turn_rewards": by_turn_BT, "rm_scores": rewards_BR}
    return {name: column.astype(np.float32) for name, column in columns.items()}


def _by_row(result: TrajectoryResult) -> Iterator[list[float]]:
    """The token rewards of each row that is trained."""
    rewards = iter(result.reward.token_rewards if result.reward else ())
    for output in result.outputs:
        part = list(islice(rewards, sum(output.response_mask)))
        if output.trained:
            yield part


def outcome_scores(mask_BR: np.ndarray[Any, Any], scores: Sequence[float | None]) -> np.ndarray[Any, Any]:
    """Each row's score on its last token with mask 1, float32; a row without such a token gets none."""
    scores_BR = np.zeros(mask_BR.shape, dtype=np.float32)
    has = mask_BR.any(axis=1) & np.array([score is not None for score in scores], dtype=bool)
    rows = np.flatnonzero(has)
    last = mask_BR.shape[1] - 1 - mask_BR[rows, ::-1].argmax(axis=1) if len(rows) else rows
    scores_BR[rows, last] = [scores[row] or 0.0 for row in rows.tolist()]
    return scores_BR


def _objects(pairs: Sequence[tuple[TrajectoryResult, AgentLoopOutput]]) -> dict[str, np.ndarray[Any, Any]]:
    def column(values: Sequence[Any]) -> np.ndarray[Any, Any]:
        return np.fromiter(iter(values), dtype=object, count=len(values))

    extra = [output.extra_fields for _, output in pairs]
    names = dict.fromkeys(name for fields in extra for name in fields)
    return {name: column([fields.get(name) for fields in extra]) for name in names} | {
        "reward_components": column([dict(result.reward.components) if result.reward else {} for result, _ in pairs]),
        "uid": column([result.row["uid"] for result, _ in pairs]),
        "trajectory_id": column([result.trajectory_id for result, _ in pairs]),
        "data_source": column([result.row.get("data_source", "") for result, _ in pairs]),
        "num_turns": column([output.num_turns for _, output in pairs]),
        "termination": column([result.termination.value for result, _ in pairs]),
        "log_prob_settings": column([output.log_prob_settings for _, output in pairs]),
    }
