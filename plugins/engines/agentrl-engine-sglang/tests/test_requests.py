"""Requests and replies against exchanges that were recorded from SGLang 0.5.23."""

import base64
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl_core.api import PolicySpan, SamplingParams
from agentrl_core.api.errors import EngineError
from agentrl_engine_sglang.client import _reason
from agentrl_engine_sglang.requests import request_body, routed_experts_shape, token_output

RECORDED = json.loads((Path(__file__).parent / "data" / "recorded.json").read_text())


def recorded(path: str, **wanted: Any) -> list[dict[str, Any]]:
    return [e for e in RECORDED if e["path"] == path and all(e[key] == value for key, value in wanted.items())]


def numbered(reply: dict[str, Any]) -> dict[str, Any]:
    """The recording's server had versions with other names."""
    text = json.dumps(reply)
    for name in ("default", "v-abort"):
        text = text.replace(f'"{name}"', '"3"')
    content: dict[str, Any] = json.loads(text)
    return content


def test_recorded_answers_become_outputs() -> None:
    finished, aborted = (numbered(e["reply"]) for e in recorded("/generate", status=200))
    output = token_output(finished, 0)
    assert (output.token_ids, output.finish_reason) == ([259, 84, 364, 219], "length")
    assert output.log_probs == pytest.approx([-2.1517, -0.9195, -2.4622, -1.8204], abs=1e-3)
    assert output.spans == [PolicySpan(3, 0, 4)]
    output = token_output(aborted, 0)
    assert (len(output.token_ids), output.finish_reason, output.spans) == (115, "abort", [PolicySpan(3, 0, 115)])


def test_our_sampling_parameters_are_among_those_that_the_server_knows() -> None:
    (refusal,) = [e["reply"] for e in recorded("/generate", status=400) if "unknown field" in str(e["reply"])]
    body = request_body("r", [1], SamplingParams(4, seed=-1, stop_token_ids=(2,)), 100, seeded=True)
    for name in body["sampling_params"]:
        assert f"`{name}`" in refusal["error"]


def test_refusals_are_told_in_the_servers_words() -> None:
    reasons = {_reason(json.dumps(e["reply"])) for e in RECORDED if e["status"] == 400}
    assert "temperature must be a non-negative finite number, got -1." in reasons
    assert "The input (600 tokens) is longer than the model's context length (512 tokens)." in reasons
    assert "Flush cache failed." in reasons
    assert "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()" in reasons
    assert any(reason.startswith("Failed to get weights iterator") for reason in reasons)


def test_parameters_are_those_of_the_contract() -> None:
    params = SamplingParams(50, temperature=0.5, top_p=0.9, stop_token_ids=(7, 9), seed=3)
    body = request_body("name", [1, 2], params, 20, seeded=False)
    assert body == {
        "rid": "name",
        "input_ids": [1, 2],
        "sampling_params": {
            "max_new_tokens": 18, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "stop_token_ids": [7, 9],
            "min_p": 0.0,
        },
        "return_logprob": True,
    }  # fmt: skip
    assert request_body("name", [1], params, 20, seeded=True)["sampling_params"]["sampling_seed"] == 3


def reply(ids: list[int], spans: list[tuple[str, int, int]], kind: str = "length") -> dict[str, Any]:
    return {
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": kind},
            "output_token_logprobs": [[-1.0, token, None] for token in ids],
            "weight_versions": [{"version": v, "start": a, "end": b} for v, a, b in spans],
        },
    }


def test_experts_of_tokens_are_asked_for_and_read() -> None:
    """Base64 of 32-bit integers, [tokens - 1, layers, experts of a token]."""
    params = SamplingParams(4)
    assert "return_routed_experts" not in request_body("r", [1, 2, 3], params, 20, seeded=False)
    assert request_body("r", [1, 2, 3], params, 20, seeded=False, routed_experts=True)["return_routed_experts"] is True
    experts = np.arange(4 * 3 * 2, dtype=np.int32).reshape(4, 3, 2)
    found = reply([1, 2], [])
    found["meta_info"]["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
    assert token_output(found, 5).routed_experts is None
    np.testing.assert_array_equal(token_output(found, 5, (3, 2)).routed_experts, experts)
    assert token_output(reply([], [], "abort"), 5, (3, 2)).routed_experts is None


def test_a_log_prob_that_is_not_a_number_stays_one() -> None:
    """JSON has none; agentrl ends a trajectory with such a log-prob by name."""
    found = reply([1, 2], [])
    found["meta_info"]["output_token_logprobs"][1][0] = None
    first, second = token_output(found, 5).log_probs or ()
    assert first == -1.0 and math.isnan(second)


def test_a_model_without_experts_has_none_to_return() -> None:
    assert routed_experts_shape({"num_hidden_layers": 3, "num_experts_per_tok": 2}) == (3, 2)
    with pytest.raises(EngineError, match=r"actor.router_replay.*num_experts_per_tok"):
        routed_experts_shape({"num_hidden_layers": 3})


def test_spans_cover_what_there_is() -> None:
    assert token_output(reply([], [], "abort"), 5).spans == []
    assert token_output(reply([1, 2], []), 5).spans == [PolicySpan(5, 0, 2)]
    # An aborted request knows of tokens that it does not return.
    cut = token_output(reply([1, 2], [("4", 0, 2), ("5", 2, 9)], "abort"), 5)
    assert cut.spans == [PolicySpan(4, 0, 2)]


@pytest.mark.parametrize("spans", [[("4", 0, 1)], [("4", 1, 2)], [("4", 0, 1), ("5", 0, 2)]])
def test_spans_with_gaps_are_refused(spans) -> None:
    with pytest.raises(EngineError, match="do not cover 2 tokens"):
        token_output(reply([1, 2], spans), 5)


def test_log_probs_of_other_tokens_and_unknown_endings_are_refused() -> None:
    wrong = reply([1, 2], [("4", 0, 2)])
    wrong["meta_info"]["output_token_logprobs"][1][1] = 9
    with pytest.raises(EngineError, match="log-probabilities"):
        token_output(wrong, 5)
    with pytest.raises(EngineError, match="odd"):
        token_output(reply([1], [("4", 0, 1)], "odd"), 5)
