"""agentrl's requests and outputs, and what vLLM makes of them."""

from collections.abc import Sequence
from typing import Any

from agentrl_core.api.engine import FinishReason, PolicySpan, SamplingParams, TokenOutput
from agentrl_core.api.errors import EngineError

FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
MAX_TEMPERATURE = 2.0
"""vLLM takes no higher one."""


def check_request(
    request_id: str,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    multi_modal: dict[str, Any] | None,
    *,
    vocab_size: int,
    max_model_len: int,
) -> None:
    """Refuse what cannot be served, in the words of whoever configured it.

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
    if not (0 <= params.temperature <= MAX_TEMPERATURE and 0 < params.top_p <= 1 and params.top_k >= 0):
        raise ValueError(
            f"{where} temperature {params.temperature}, top_p {params.top_p}, top_k {params.top_k}; allowed are "
            f"0 <= temperature <= {MAX_TEMPERATURE:g}, 0 < top_p <= 1, top_k >= 0"
        )
    if multi_modal:
        raise ValueError(f"{where} the vllm engine takes text only, found {', '.join(sorted(multi_modal))}")


def sampling_arguments(prompt_length: int, params: SamplingParams, max_model_len: int) -> dict[str, Any]:
    """Arguments of vLLM's ``SamplingParams``, without those that only vLLM can name."""
    arguments: dict[str, Any] = {
        "max_tokens": min(params.max_tokens, max_model_len - prompt_length),
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "stop_token_ids": list(params.stop_token_ids),
        # A request ends at its own stop ids, and nowhere else.
        "ignore_eos": True,
        "logprobs": 0,
        "flat_logprobs": True,
        "detokenize": False,
    }
    if params.seed is not None:
        arguments["seed"] = params.seed % 2**63
    return arguments


def token_output(completion: Any, version: int) -> TokenOutput:
    """A finished ``vllm.outputs.CompletionOutput``.

    Args:
        completion: with flat log-probabilities.
        version: of an output that names none because nothing was sampled.

    Raises:
        EngineError: ids and log-probabilities don't belong together, or nobody knows why the request ended.
    """
    token_ids = [int(token) for token in completion.token_ids]
    scored = completion.logprobs
    scored_ids = list(scored.token_ids) if scored is not None else []
    if scored_ids != token_ids:
        raise EngineError(f"vLLM returned {len(token_ids)} tokens but log-probabilities of {len(scored_ids)} others")
    if completion.finish_reason not in FINISH_REASONS:
        raise EngineError(f"vLLM ended a request for a reason that has no name here: {completion.finish_reason!r}")
    return TokenOutput(
        token_ids=token_ids,
        log_probs=[float(value) for value in scored.logprobs] if scored is not None else [],
        finish_reason=FINISH_REASONS[completion.finish_reason],
        spans=_spans(completion.weight_versions or [], len(token_ids), version),
    )


def _spans(entries: Sequence[Any], length: int, version: int) -> list[PolicySpan]:
    spans = [PolicySpan(int(entry.version), entry.start, entry.end) for entry in entries if entry.start < entry.end]
    if not spans:
        return [PolicySpan(version, 0, length)] if length else []
    ends = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != ends[:-1] or ends[-1] != length:
        raise EngineError(f"vLLM's weight versions {entries} do not cover {length} tokens")
    return spans
