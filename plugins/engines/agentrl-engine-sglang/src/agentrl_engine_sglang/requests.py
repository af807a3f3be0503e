"""agentrl's requests and outputs, and what SGLang makes of them."""

from collections.abc import Sequence
from typing import Any

from agentrl_core.api.engine import FinishReason, PolicySpan, SamplingParams, TokenOutput
from agentrl_core.api.errors import EngineError

FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def check_request(
    request_id: str,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    multi_modal: dict[str, Any] | None,
    *,
    vocab_size: int,
    max_model_len: int,
) -> None:
    """Nothing that the server could not digest may reach it: an id outside the vocabulary kills it.

    Raises:
        ValueError: the request cannot be served.
    """
    where = f"request {request_id!r}:"
    if not prompt_ids:
        raise ValueError(f"{where} the prompt is empty; it needs at least 1 token")
    if len(prompt_ids) >= max_model_len:
        raise ValueError(
            f"{where} the prompt has {len(prompt_ids)} tokens, which leaves no room to sample with max_model_len "
            f"{max_model_len}"
        )
    for token in (min(prompt_ids), max(prompt_ids)):
        if not 0 <= token < vocab_size:
            raise ValueError(f"{where} token id {token} is outside the vocabulary 0..{vocab_size - 1}")
    if params.max_tokens < 1:
        raise ValueError(f"{where} max_tokens is {params.max_tokens}; it must be at least 1")
    if not (params.temperature >= 0 and 0 < params.top_p <= 1 and params.top_k >= 0):
        raise ValueError(
            f"{where} temperature {params.temperature}, top_p {params.top_p}, top_k {params.top_k}; allowed are "
            f"temperature >= 0, 0 < top_p <= 1, top_k >= 0"
        )
    if multi_modal:
        raise ValueError(f"{where} the sglang engine takes text only, found {', '.join(sorted(multi_modal))}")


def request_body(
    rid: str, prompt_ids: Sequence[int], params: SamplingParams, max_model_len: int, seeded: bool
) -> dict[str, Any]:
    """The body of ``/generate``. Everything is said, so that no default of the server or the model applies."""
    sampling: dict[str, Any] = {
        "max_new_tokens": min(params.max_tokens, max_model_len - len(prompt_ids)),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "stop_token_ids": list(params.stop_token_ids),
    }
    if seeded and params.seed is not None:
        sampling["sampling_seed"] = params.seed % 2**63
    return {
        "rid": rid,
        "input_ids": [int(token) for token in prompt_ids],
        "sampling_params": sampling,
        "return_logprob": True,
    }


def token_output(reply: dict[str, Any], version: int) -> TokenOutput:
    """The reply of ``/generate``; ``version`` is that of a reply which names none because nothing was sampled.

    Raises:
        EngineError: ids and log-probabilities don't belong together, or nobody knows why the request ended.
    """
    meta = reply["meta_info"]
    token_ids = [int(token) for token in reply["output_ids"]]
    scored = meta.get("output_token_logprobs") or []
    if [int(entry[1]) for entry in scored] != token_ids:
        raise EngineError(f"SGLang returned {len(token_ids)} tokens but log-probabilities of {len(scored)} others")
    kind = (meta.get("finish_reason") or {}).get("type")
    if kind not in FINISH_REASONS:
        raise EngineError(f"SGLang ended a request for a reason that has no name here: {meta.get('finish_reason')!r}")
    return TokenOutput(
        token_ids=token_ids,
        log_probs=[float(entry[0]) for entry in scored],
        finish_reason=FINISH_REASONS[kind],
        spans=_spans(meta.get("weight_versions") or [], len(token_ids), version),
    )


def _spans(entries: list[dict[str, Any]], length: int, version: int) -> list[PolicySpan]:
    spans = [
        PolicySpan(int(entry["version"]), int(entry["start"]), min(int(entry["end"]), length))
        for entry in entries
        if int(entry["start"]) < min(int(entry["end"]), length)
    ]
    if not spans:
        return [PolicySpan(version, 0, length)] if length else []
    ends = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != ends[:-1] or ends[-1] != length:
        raise EngineError(f"SGLang's weight versions {entries} do not cover {length} tokens")
    return spans
