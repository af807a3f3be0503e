"""Finished trajectories as one padded batch: padded once, vectorised, to the batch's own maxima.

Legend: B rows, P prompt tokens, R response tokens.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from agentrl_core.api import AgentLoopOutput
from agentrl_core.protocol import DataProto
from agentrl_core.rollout.results import TrajectoryResult

COLUMNS = frozenset({
    "prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids", "rm_scores",
    "rollout_log_probs", "uid", "trajectory_id", "data_source", "num_turns", "termination",
})  # fmt: skip
"""What :func:`to_data_proto` names itself; the extra fields of a row have other names."""


def to_data_proto(results: Sequence[TrajectoryResult], pad_token_id: int, meta_info: dict[str, Any]) -> DataProto:
    """The trained rows of ``results``.

    Tensors: ``prompts [B, P]`` left-padded, ``responses [B, R]`` right-padded, ``response_mask [B, R]`` bool,
    ``input_ids``, ``attention_mask``, ``position_ids`` ``[B, P+R]``, ``rm_scores [B, R]`` (the reward on the last
    token with mask 1), and ``rollout_log_probs [B, R]`` where every row has them. Objects: ``uid`` (the prompt's
    group), ``trajectory_id``, ``data_source``, ``num_turns``, ``termination``, and a column for each extra field of the
    rows, None in the rows without it.
    """
    pairs = [(result, output) for result in results if result.termination.trained for output in result.outputs]
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
        "rm_scores": outcome_scores(
            mask.astype(bool), [result.reward.score if result.reward else None for result, _ in pairs]
        ),
    }
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
        "uid": column([result.row["uid"] for result, _ in pairs]),
        "trajectory_id": column([result.trajectory_id for result, _ in pairs]),
        "data_source": column([result.row.get("data_source", "") for result, _ in pairs]),
        "num_turns": column([output.num_turns for _, output in pairs]),
        "termination": column([result.termination.value for result, _ in pairs]),
    }
