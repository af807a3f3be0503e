"""What engines share: the checks of requests, spans, the model's configuration."""

import math
from pathlib import Path

import numpy as np
import pytest

from agentrl_core.api import EngineError, MultiModal, PolicySpan, SamplingParams
from agentrl_core.engine_kit.requests import check_request, covering_spans, read_model_config


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SamplingParams(4), "request 'r': the prompt is empty; it needs at least 1 token"),
        ([1] * 10, SamplingParams(4), "the prompt has 10 tokens, which leaves no room to sample with max_model_len 10"),
        ([1, 200], SamplingParams(4), "request 'r': token id 200 is outside the vocabulary 0..199"),
        ([1, -1], SamplingParams(4), "request 'r': token id -1 is outside the vocabulary 0..199"),
        (np.array([1, 200]), SamplingParams(4), "request 'r': token id 200 is outside the vocabulary 0..199"),
        (np.array([], np.int64), SamplingParams(4), "the prompt is empty"),
        ([1], SamplingParams(0), "request 'r': max_tokens is 0; allowed: a whole number >= 1"),
        ([1], SamplingParams(1.5), "max_tokens is 1.5; allowed: a whole number >= 1"),
        ([1], SamplingParams(4, temperature=-1.0), "temperature is -1.0; allowed: 0 (greedy), or 0.01 to 2"),
        ([1], SamplingParams(4, temperature=2.5), "temperature is 2.5; allowed: 0 (greedy), or 0.01 to 2"),
        ([1], SamplingParams(4, temperature=0.001), "temperature is 0.001; allowed: 0 (greedy), or 0.01 to 2"),
        ([1], SamplingParams(4, temperature=math.nan), "temperature is nan"),
        ([1], SamplingParams(4, temperature=math.inf), "temperature is inf"),
        ([1], SamplingParams(4, temperature="1"), "temperature is '1'"),
        ([1], SamplingParams(4, top_p=0.0), "top_p is 0.0; allowed: numbers > 0 and <= 1"),
        ([1], SamplingParams(4, top_k=-1), "top_k is -1; allowed: a whole number >= 0 (0: off)"),
        ([1], SamplingParams(4, top_k=2.0), "top_k is 2.0; allowed: a whole number >= 0 (0: off)"),
        ([1], SamplingParams(4, min_p=math.nan), "min_p is nan"),
        ([1], SamplingParams(4, presence_penalty=-2.1), "presence_penalty is -2.1; allowed: -2 to 2"),
        ([1], SamplingParams(4, frequency_penalty=math.nan), "frequency_penalty is nan"),
        ([1], SamplingParams(4, repetition_penalty=math.inf), "repetition_penalty is inf; allowed: finite numbers > 0"),
        ([1], SamplingParams(4, seed=1.0), "seed is 1.0; allowed: a whole number or None"),
        ([1], SamplingParams(4, stop_token_ids=(3, 200)), "stop_token_ids holds 200; allowed: ids of the vocabulary 0"),
        ([1], SamplingParams(4, stop_token_ids=(-1,)), "stop_token_ids holds -1"),
        ([1], SamplingParams(4, logit_bias={200: 1.0}), "logit_bias is {200: 1.0}; allowed: ids of the vocabulary 0"),
        ([1], SamplingParams(4, logit_bias={3: math.inf}), "logit_bias is {3: inf}"),
        ([1], SamplingParams(4, json_schema="[]"), "json_schema '[]' is not the JSON text of an object, for example"),
        ([1], SamplingParams(4, json_schema="{"), "json_schema '{' is not the JSON text"),
        ([1], SamplingParams(4, json_schema="[" * 100_000), "json_schema '[[["),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused(prompt: list[int], params: SamplingParams, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_request("r", prompt, params, vocab_size=200, max_model_len=10)
    assert message in str(caught.value)


def test_what_can_be_served_passes() -> None:
    limits = {"vocab_size": 200, "max_model_len": 10}
    check_request("r", [0, 199], SamplingParams(100, temperature=0.0, top_p=1.0, top_k=5), None, **limits)
    check_request("r", [0] * 9, SamplingParams(1, temperature=2.0, seed=-(2**70)), **limits)
    numbers = {"temperature": np.float32(0.5), "top_k": np.int64(3), "stop_token_ids": tuple(np.arange(3))}
    check_request("r", np.array([0, 199]), SamplingParams(np.int64(4), **numbers), **limits)
    shown = MultiModal(("a", "b"), [0])
    check_request("r", [0], SamplingParams(1), shown, **limits, max_images=2)
    for most, allowed in ((0, "text alone"), (1, "at most 1 images")):
        with pytest.raises(ValueError, match=f"the prompt has 2 images; this engine takes {allowed}"):
            check_request("r", [0], SamplingParams(1), shown, **limits, max_images=most)


def test_spans_cover_the_output_or_are_an_error() -> None:
    assert covering_spans([], 0, 7) == []
    assert covering_spans([], 3, 7) == [PolicySpan(7, 0, 3)]
    spans = [PolicySpan(1, 0, 2), PolicySpan(2, 2, 3)]
    assert covering_spans([PolicySpan(0, 0, 0), *spans], 3, 7) == spans
    for wrong in (spans[:1], spans[1:], [spans[0], PolicySpan(2, 1, 3)]):
        with pytest.raises(EngineError, match=r"weight versions \(\d for .*\) do not cover 3 tokens"):
            covering_spans(wrong, 3, 7)


def test_the_configuration_of_a_model(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"model.path: .*config.json cannot be read .* must be a folder with a model"):
        read_model_config(str(tmp_path))
    (tmp_path / "config.json").write_text('{"vocab_size": 200}')
    assert read_model_config(str(tmp_path)) == {"vocab_size": 200}
