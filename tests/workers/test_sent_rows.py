"""What arrives of a batch on the ranks, and in how many bytes."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl_core.protocol import DataProto
from agentrl_core.protocol.ragged import padded, together
from agentrl_core.workers.micro_batching import narrowed
from agentrl_core.workers.sent_rows import unpadded

PAD = 7
NAMES = ("advantages", "turn_ids")


def batch(rows: list[tuple[int, int]], seed: int = 0) -> DataProto:
    """Rows of prompts and responses of these lengths, as ``to_data_proto`` lays them out."""
    chance = np.random.default_rng(seed)
    prompts_B, responses_B = (np.array(each, dtype=np.int64) for each in zip(*rows, strict=True))

    def column(lengths: Any, value: float, dtype: Any, left: bool = False) -> torch.Tensor:
        flat = chance.integers(0, 100, int(lengths.sum())).astype(dtype)
        return torch.from_numpy(padded(flat, lengths, value, None, lengths.max() - lengths if left else 0))

    prompts, responses = column(prompts_B, PAD, np.int64, left=True), column(responses_B, PAD, np.int64)
    ones = torch.from_numpy(
        padded(np.ones(prompts_B.sum(), dtype=np.int64), prompts_B, 0, None, prompts_B.max() - prompts_B)
    )
    attention = torch.cat(
        [ones, torch.from_numpy(padded(np.ones(responses_B.sum(), dtype=np.int64), responses_B, 0))], 1
    )
    tensors = {
        "prompts": prompts, "responses": responses, "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": attention, "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        "response_mask": column(responses_B, 0, np.int64) > 50, "advantages": column(responses_B, 0.0, np.float32),
        "turn_ids": column(responses_B, -1, np.int64), "unused": column(responses_B, 0.0, np.float32),
    }  # fmt: skip
    objects = {"uid": [f"u{row // 2}" for row in range(len(rows))], "unused objects": [object()] * len(rows)}
    return DataProto.from_dict(tensors=tensors, non_tensors=objects, meta_info={"seed": 3})


def check(found: DataProto, expected: DataProto) -> None:
    assert type(found) is DataProto
    assert set(found.batch.keys()) == set(expected.batch.keys())
    inside = expected.batch["attention_mask"].bool()[:, -expected.batch["responses"].shape[1] :]
    for name, column in expected.batch.items():
        assert found.batch[name].dtype == column.dtype, name
        if name in NAMES:
            column = torch.where(inside, column, 0)
        assert torch.equal(found.batch[name], column), name
    assert found.non_tensor_batch["uid"].tolist() == expected.non_tensor_batch["uid"].tolist()
    assert found.non_tensor_batch.keys() == {"uid"} and found.meta_info == {"seed": 3}


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=8).filter(
    lambda rows: any(length for _, length in rows)
))  # fmt: skip
def test_a_batch_arrives_as_it_was(rows: list[tuple[int, int]]) -> None:
    whole = narrowed(batch(rows), NAMES)
    sent = unpadded(whole)
    assert together(*(sent.batch[name] for name in ("responses", *NAMES)))
    check(pickle.loads(pickle.dumps(sent)), whole)
    some = torch.arange(len(rows)).flip(0)[::2]
    check(pickle.loads(pickle.dumps(sent.select_idxs(some))), whole.select_idxs(some))


def test_padding_takes_no_bytes() -> None:
    # 4 bytes each for an id, an advantage and a turn, 1 for the mask.
    whole = narrowed(batch([(10, 20)] * 99 + [(10, 20_000)]), NAMES)
    assert len(pickle.dumps(unpadded(whole))) < 100 * 10 * 4 + (99 * 20 + 20_000) * 13 + 5_000 < whole.nbytes() / 80


@pytest.mark.parametrize("what", ["gap", "positions", "several positions", "responses", "no rows"])
def test_what_cannot_be_derived_is_sent_as_it_is(what: str) -> None:
    whole = batch([(2, 3), (4, 1)])
    if what == "gap":
        whole.batch["attention_mask"][0, 4] = 0
    elif what == "positions":
        whole.batch["position_ids"] += 1
    elif what == "several positions":
        whole.batch["position_ids"] = whole.batch["position_ids"].unsqueeze(1).repeat(1, 3, 1)
    elif what == "responses":
        whole.batch["responses"][0, 0] += 1
    else:
        whole = whole.select_idxs([])
    whole = narrowed(whole, NAMES)
    assert unpadded(whole) is whole


def test_a_type_that_numpy_does_not_know_is_sent_as_it_is() -> None:
    whole = narrowed(batch([(2, 3), (4, 1)]), NAMES)
    whole.batch["advantages"] = whole.batch["advantages"].bfloat16()
    found = pickle.loads(pickle.dumps(unpadded(whole)))
    assert together(found.batch["responses"], found.batch["turn_ids"])
    assert torch.equal(found.batch["advantages"], whole.batch["advantages"])
