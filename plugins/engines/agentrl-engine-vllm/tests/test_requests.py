"""Requests and outputs, without vLLM."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_core.api import PolicySpan, SamplingParams
from agentrl_core.api.errors import EngineError
from agentrl_engine_vllm.requests import sampling_arguments, token_output


def completion(ids: list[int], spans: list[tuple[str, int, int]] | None, reason: str = "length") -> Any:
    return SimpleNamespace(
        token_ids=ids,
        logprobs=SimpleNamespace(token_ids=list(ids), logprobs=[-float(token) for token in ids]),
        finish_reason=reason,
        weight_versions=spans and [SimpleNamespace(version=v, start=a, end=b) for v, a, b in spans],
    )


def test_parameters_are_those_of_the_contract() -> None:
    params = SamplingParams(
        50, temperature=0.5, top_p=0.9, top_k=3, stop_token_ids=(7, 9), seed=-1, min_p=0.1, logit_bias={5: 2.0}
    )
    assert sampling_arguments(2, params, 20) == {
        "max_tokens": 18, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop_token_ids": [7, 9], "ignore_eos": True,
        "logprobs": 0, "flat_logprobs": True, "detokenize": False, "seed": 2**63 - 1,
        "min_p": 0.1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        "logit_bias": {5: 2.0},
    }  # fmt: skip
    assert "seed" not in sampling_arguments(2, SamplingParams(50), 20)
    constrained = sampling_arguments(2, SamplingParams(50, json_schema="{}"), 20)
    assert (constrained["json_schema"], constrained["ignore_eos"]) == ("{}", False)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=6))
def test_versions_become_spans_that_cover_the_tokens(runs: list[tuple[int, int]]) -> None:
    spans, end = [], 0
    for version, length in runs:
        spans.append((str(version), end, end + length))
        end += length
    output = token_output(completion(list(range(end)), spans), 9)
    assert [span.end - span.start for span in output.spans] == [length for _, length in runs if length]
    assert [span.version for span in output.spans] == [version for version, length in runs if length]
    assert output.log_probs == [-float(token) for token in range(end)]


def test_an_output_without_versions_is_of_the_present_one() -> None:
    assert token_output(completion([5, 6], None), 9).spans == [PolicySpan(9, 0, 2)]
    assert token_output(completion([], None, "abort"), 9).spans == []


@pytest.mark.parametrize("spans", [[("1", 0, 1)], [("1", 1, 2)], [("1", 0, 1), ("2", 0, 2)]])
def test_versions_that_do_not_cover_the_tokens_are_an_error(spans: list[tuple[str, int, int]]) -> None:
    with pytest.raises(EngineError, match="do not cover 2 tokens"):
        token_output(completion([5, 6], spans), 9)


def test_log_probs_of_other_tokens_are_an_error() -> None:
    wrong = completion([5, 6], None)
    wrong.logprobs.token_ids = [5, 7]
    with pytest.raises(EngineError, match="returned 2 tokens but log-probabilities of 2 others"):
        token_output(wrong, 0)


def test_an_unknown_reason_is_an_error() -> None:
    with pytest.raises(EngineError, match="'error'"):
        token_output(completion([5], None, "error"), 0)


def test_experts_of_tokens_are_passed_on() -> None:
    found = completion([5, 6], None)
    assert token_output(found, 9).routed_experts is None
    found.routed_experts = np.zeros((4, 2, 2), np.uint8)
    assert token_output(found, 9).routed_experts is found.routed_experts
