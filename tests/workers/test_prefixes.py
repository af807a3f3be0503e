"""Rows that share prefixes, against each of them alone in a plain model of transformers."""

import copy
import math
from collections.abc import Callable
from itertools import combinations
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen3Config, Starcoder2Config

from agentrl_core.fsdp2 import packed_attention, packing
from agentrl_core.fsdp2.log_probs import response_log_probs, response_logits
from agentrl_core.fsdp2.models import enable_gradient_checkpointing, training_mode
from agentrl_core.fsdp2.packed_attention import VARLEN, Packing
from agentrl_core.fsdp2.packing import pack
from agentrl_core.workers.micro_batching import (
    MOST_SHARING,
    MicroBatch,
    columns_of,
    micro_batches,
    prefixes_of,
    rank_of_rows,
)
from tests.workers.test_packing import PACKABLE, SHAPE, VOCAB, plain_varlen_attn

CPU = torch.device("cpu")
Row = tuple[list[int], list[int], list[int]]
STARCODER2 = Starcoder2Config(
    **SHAPE | {"bos_token_id": 0}, embedding_dropout=0.0, residual_dropout=0.0, use_cache=False, sliding_window=None
)
# Heads of queries share those of keys in the first and the last one. Norms of Qwen compute in float32 whatever comes.
EXACT, ROUNDED = (1e-9, 1e-9), (5e-6, 2e-6)
MODELS = {
    "starcoder2": (STARCODER2, EXACT),
    "learned positions": (PACKABLE["learned positions"], EXACT),
    "qwen3": (Qwen3Config(**SHAPE), ROUNDED),
}


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(2, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def row(prompt: list[int], response: list[int], shared: int = 0) -> Row:
    """The first ``shared`` tokens of the response are trained in another row; every fifth is a tool's."""
    return prompt, response, [int(place >= shared and place % 5 != 4) for place in range(len(response))]


def forks(branches: tuple[int, ...], length: int) -> list[Row]:
    """Of a prompt; what is in front of a fork is trained in the first row only."""
    paths: list[tuple[list[int], int]] = [([], 0)]
    for depth, count in enumerate(branches):
        paths = [
            (path + ids(length, 1000 * depth + count * number + branch), shared if branch == 0 else len(path))
            for number, (path, shared) in enumerate(paths)
            for branch in range(count)
        ]
    return [row(ids(9, 1), path, shared) for path, shared in paths]


PROMPT, TURN = ids(8, 2), ids(12, 3)
CASES = {
    "one row": [row(PROMPT, TURN)],
    "several turns": [row(PROMPT, TURN + ids(20, 4)), row(ids(3, 5), ids(7, 6))],
    "forks 3x3x2": forks((3, 3, 2), 7),
    "samples that begin alike": [row(PROMPT, TURN[:shared] + ids(6, shared)) for shared in (0, 3, 3, 12)],
    # What is in front of the fork is the prompt of the other branch.
    "a branch": [row(PROMPT, TURN), row(PROMPT + TURN[:5], ids(4, 8)), row(PROMPT + TURN[:5], ids(9, 9))],
    "several agents": [
        row(PROMPT[:4] + ids(3, 10), ids(8, 11)), row(PROMPT[:4] + ids(5, 12), ids(3, 13)), row(ids(2, 14), ids(5, 15))
    ],
    "compaction": [row(PROMPT, TURN), row(PROMPT[:5] + ids(3, 16), ids(6, 17))],
    "one begins another": [row(PROMPT, TURN), row(PROMPT, TURN[:5]), row(PROMPT, TURN[:5] + ids(3, 18))],
    "equal rows": [row(PROMPT, TURN), row(PROMPT, TURN), row(PROMPT, TURN)],
}  # fmt: skip


def make_model(config: Any, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa", dtype=dtype).eval()


Found = tuple[dict[tuple[int, int], float], list[torch.Tensor]]
"""Log-probs of the sampled tokens by row and place, and the gradient of a weighted sum of them."""


def weight(number: int, place: int) -> float:
    return math.sin(7 * number + place + 1)


def alone(model: Any, rows: list[Row]) -> Found:
    """Row by row."""
    model.zero_grad()
    found = {}
    for number, (prompt, response, mask) in enumerate(rows):
        logits = model(torch.tensor([prompt + response]), use_cache=False).logits[0].log_softmax(-1)
        log_probs = {
            place: logits[len(prompt) + place - 1, token]
            for place, token in enumerate(response) if mask[place]
        }  # fmt: skip
        sum(weight(number, place) * log_prob for place, log_prob in log_probs.items()).backward()
        found |= {(number, place): float(log_prob.detach()) for place, log_prob in log_probs.items()}
    return found, [parameter.grad.clone() for parameter in model.parameters()]


def together(model: Any, micro: MicroBatch) -> Found:
    model.zero_grad()
    logits_nV, places_br = response_logits(model, micro)
    log_probs_n = logits_nV.log_softmax(-1).gather(-1, micro["responses"][places_br].unsqueeze(-1))[:, 0]
    places = [(int(micro.rows[row]), place) for row, place in places_br.nonzero().tolist()]
    (log_probs_n * torch.tensor([weight(*place) for place in places], dtype=log_probs_n.dtype)).sum().backward()
    found = dict(zip(places, log_probs_n.tolist(), strict=True))
    return found, [parameter.grad.clone() for parameter in model.parameters()]


def micro_of(make_batch: Callable[..., Any], rows: list[Row]) -> MicroBatch:
    (micro,) = micro_batches(columns_of(make_batch(rows), (), "test"), 10_000, by_prefix=True)
    return micro


def prefixes_in(rows: list[Row]) -> set[tuple[int, ...]]:
    whole = [prompt + response for prompt, response, _ in rows]
    return {tuple(ids[:end]) for ids in whole for end in range(1, len(ids) + 1)}


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it does not pay."""
    monkeypatch.setattr(packing, "pays", lambda tokens, padded: True)


@pytest.fixture(params=["blocks", "varlen"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As on the CPU, and as if it were a GPU, with what FlashAttention promises in plain torch."""
    if request.param == "varlen":
        monkeypatch.setattr(packed_attention, "has_varlen", lambda device: True)
        monkeypatch.setattr(packed_attention, "_varlen_attn", lambda: plain_varlen_attn)
        monkeypatch.setattr(packed_attention, "VARLEN_DTYPES", (torch.float32, torch.float64))
    return str(request.param)


def packing_of(model: Any) -> Packing:
    made = Packing(model, lambda micro: response_logits(model, micro), True, CPU)
    assert made.is_possible
    return made


def assert_equal(found: Found, expected: Found, of_log_probs: float, of_gradient: float) -> None:
    """The tolerance of gradients is in parts of the largest one."""
    assert found[0] == pytest.approx(expected[0], rel=0, abs=of_log_probs)
    largest = max(float(each.abs().max()) for each in expected[1])
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, atol=of_gradient * max(largest, 1.0), rtol=0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("case", CASES)
def test_rows_have_the_log_probs_and_gradients_that_each_has_alone(
    make_batch: Any, attention: str, case: str, name: str
) -> None:
    config, tolerances = MODELS[name]
    model, rows = make_model(config, torch.float64), CASES[case]
    expected = alone(model, rows)
    made, micro = packing_of(model), micro_of(make_batch, rows)
    with made.on():
        assert (model.config._attn_implementation == VARLEN) == (attention == "varlen")
        assert pack(micro).inputs["input_ids"].numel() == len(prefixes_in(rows))
        assert_equal(together(model, micro), expected, *tolerances)


def test_in_float32_the_rounding_is_that_of_float32(make_batch: Any, attention: str) -> None:
    model, rows = make_model(STARCODER2, torch.float32), CASES["forks 3x3x2"]
    expected = alone(model, rows)
    with packing_of(model).on():
        found = together(model, micro_of(make_batch, rows))
    assert_equal(found, expected, *ROUNDED)


def test_activations_that_are_computed_again_are_those_of_packed_rows(make_batch: Any, attention: str) -> None:
    model, rows = make_model(STARCODER2, torch.float64), CASES["forks 3x3x2"]
    expected = alone(model, rows)
    made = packing_of(model)
    enable_gradient_checkpointing(model)
    with training_mode(model), made.on():
        found = together(model, micro_of(make_batch, rows))
    assert_equal(found, expected, *EXACT)


tries = st.lists(st.lists(st.integers(2, 4), min_size=2, max_size=12), min_size=1, max_size=8)


@settings(deadline=None, max_examples=60)
@given(paths=tries, prompts=st.lists(st.integers(1, 11), min_size=8, max_size=8), most=st.sampled_from([0, 50, 4096]))
def test_a_token_stands_once_and_sees_the_prefix_that_it_ends(
    make_batch: Any, paths: list[list[int]], prompts: list[int], most: int
) -> None:
    cuts = [min(cut, len(path) - 1) for cut, path in zip(prompts, paths, strict=False)]
    rows = [row(path[:cut], path[cut:]) for path, cut in zip(paths, cuts, strict=True)]
    micro = micro_of(make_batch, rows)
    with patch.object(packing, "CALL", most):
        found, varlen = pack(micro), pack(micro, varlen=True)
    packed = found.inputs["input_ids"][0]
    layout = found.inputs["packed_layout"]
    queries = torch.cat([block.queries.flatten() for block in layout.blocks])
    assert queries[layout.slots].tolist() == list(range(len(packed)))
    ends = []
    for block in layout.blocks:
        causal = torch.ones(*block.queries.shape[1:], *block.keys.shape[1:], dtype=torch.bool).tril()
        seen = (causal if block.seen is None else block.seen[:, 0]).expand(len(block.keys), -1, -1)
        ends += [packed[keys[sees]].tolist() for keys, sees_q in zip(block.keys, seen, strict=True) for sees in sees_q]
    assert {tuple(ends[slot]) for slot in layout.slots} == prefixes_in(rows)
    assert len(packed) == len(prefixes_in(rows))
    assert found.inputs["position_ids"][0].tolist() == [len(ends[slot]) - 1 for slot in layout.slots]
    before = [tuple(ends[layout.slots[token]]) for token in found.predicting]
    ordered = [rows[number] for number in micro.rows.tolist()]
    assert before == [
        tuple((prompt + response)[: len(prompt) + place])
        for prompt, response, mask in ordered for place in range(len(response)) if mask[place]
    ]  # fmt: skip

    layout = varlen.inputs["packed_layout"]
    starts, own = layout.row_starts.tolist(), layout.own_starts.tolist()
    for number in range(len(starts) - 1):
        of_row = layout.row_tokens[starts[number] : starts[number + 1]].tolist()
        assert of_row[starts[number + 1] - starts[number] - (own[number + 1] - own[number]) :] == list(
            range(own[number], own[number + 1])
        )
        assert packed[of_row].tolist() in paths
    assert own[-1] == len(packed)


@settings(deadline=None, max_examples=60)
@given(paths=tries, ranks=st.integers(1, 4))
def test_no_other_cut_gives_the_rank_with_the_most_tokens_fewer(
    make_batch: Any, paths: list[list[int]], ranks: int
) -> None:
    columns = columns_of(make_batch([row(path[:1], path[1:]) for path in paths]), (), "test")
    ranks_B = rank_of_rows(columns, ranks, by_prefix=True).tolist()
    assert max(ranks_B) < ranks

    def tokens(rows: list[int]) -> int:
        return len({tuple(paths[number][:end]) for number in rows for end in range(1, len(paths[number]) + 1)})

    order = prefixes_of(columns).rows
    largest = max(tokens([number for number, rank in enumerate(ranks_B) if rank == each]) for each in range(ranks))
    others = [
        max(tokens(order[start:end]) for start, end in zip((0, *cuts), (*cuts, len(order)), strict=True))
        for cuts in combinations(range(1, len(order)), min(ranks, len(order)) - 1)
    ]
    assert largest == min(others)


@settings(deadline=None, max_examples=60)
@given(paths=tries, most=st.integers(4, 60))
def test_a_micro_batch_has_as_many_different_tokens_as_fit(make_batch: Any, paths: list[list[int]], most: int) -> None:
    rows = [row(path[:1], path[1:]) for path in paths]
    micros = micro_batches(columns_of(make_batch(rows), (), "test"), most, by_prefix=True)
    assert sorted(number for micro in micros for number in micro.rows.tolist()) == list(range(len(rows)))
    sizes = []
    for micro in micros:
        of_micro = [rows[number] for number in micro.rows.tolist()]
        different, lengths = len(prefixes_in(of_micro)), [len(prompt + response) for prompt, response, _ in of_micro]
        is_packed = different <= 0.9 * micro.tokens
        sizes.append(different if is_packed else micro.tokens)
        assert len(of_micro) == 1 or (sizes[-1] <= most and sum(lengths) <= MOST_SHARING * most)
    # The limit of a batch that is not packed is no lower.
    assert len(micros) == 1 or sum(sizes) > most / 2


SAMPLES = {
    # Padded, there is room for one of them.
    "a prompt counts once": ([(PROMPT * 10, ids(10, 50 + seed), [1] * 10) for seed in range(8)], 180, [8]),
    "samples of a prompt stay together": (
        [(ids(3, seed // 2), [4 + seed % 2] * (9 - seed % 2), [1] * (9 - seed % 2)) for seed in range(6)], 21, [2, 2, 2]
    ),
    "all rows have four times as many tokens": ([(PROMPT * 10, [seed], [1]) for seed in range(20)], 200, [9, 9, 2]),
    "tokens that are sampled twice have logits twice": ([(PROMPT, TURN, [1] * 12)] * 8, 50, [4, 4]),
}  # fmt: skip


@pytest.mark.parametrize("case", SAMPLES)
def test_what_counts_towards_a_micro_batch(make_batch: Any, case: str) -> None:
    rows, most, expected = SAMPLES[case]
    micros = micro_batches(columns_of(make_batch(rows), (), "test"), most, by_prefix=True)
    assert [len(micro.rows) for micro in micros] == expected


def test_log_probs_of_a_row_that_others_begin_with_are_in_their_places(make_batch: Any) -> None:
    """Through what a worker calls, with entropies, in an order of rows that is not that of their tokens."""
    model, rows = make_model(MODELS["qwen3"][0], torch.float32), CASES["forks 3x3x2"][::-1]
    micro = micro_of(make_batch, rows)
    with torch.no_grad():
        padded = response_log_probs(model, micro, 0.7, "value")
        with packing_of(model).on():
            packed = response_log_probs(model, micro, 0.7, "value")
    for one, other in zip(padded, packed, strict=True):
        torch.testing.assert_close(torch.where(micro["response_mask"], one, 0.0), other, atol=1e-5, rtol=0)
