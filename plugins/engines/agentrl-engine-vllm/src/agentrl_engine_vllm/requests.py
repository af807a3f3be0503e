"""agentrl's requests and outputs, and what vLLM makes of them."""

from typing import Any

from agentrl_core.api.engine import FinishReason, PolicySpan, SamplingParams, TokenOutput
from agentrl_core.api.errors import EngineError
from agentrl_core.engine_kit.requests import covering_spans

NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def sampling_arguments(prompt_length: int, params: SamplingParams, max_model_len: int) -> dict[str, Any]:
    """Arguments of vLLM's ``SamplingParams``, without those that only vLLM can name, and ``json_schema``, if any."""
    arguments: dict[str, Any] = {
        "max_tokens": int(min(params.max_tokens, max_model_len - prompt_length)),
        "top_k": int(params.top_k),
        "stop_token_ids": [int(token) for token in params.stop_token_ids],
        **{name: float(getattr(params, name)) for name in NUMBERS},
        # A request ends at its own stop ids, and nowhere else. After complete JSON vLLM also allows the tokenizer's end
        # of sequence, and constrains nothing that follows it: with a schema the request must end there too.
        "ignore_eos": params.json_schema is None,
        "logprobs": 0,
        "flat_logprobs": True,
        "detokenize": False,
    }
    if params.logit_bias:
        arguments["logit_bias"] = {int(token): float(bias) for token, bias in params.logit_bias.items()}
    if params.json_schema is not None:
        arguments["json_schema"] = params.json_schema
    if params.seed is not None:
        arguments["seed"] = int(params.seed) % 2**63
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
        spans=covering_spans(
            (PolicySpan(int(entry.version), entry.start, entry.end) for entry in completion.weight_versions or []),
            len(token_ids),
            version,
        ),
        routed_experts=getattr(completion, "routed_experts", None),
    )
