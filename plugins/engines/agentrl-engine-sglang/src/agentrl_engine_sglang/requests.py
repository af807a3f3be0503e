"""agentrl's requests and outputs, and what SGLang makes of them."""

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from agentrl_core.api.engine import FinishReason, MultiModal, PolicySpan, SamplingParams, TokenOutput
from agentrl_core.api.errors import EngineError
from agentrl_core.engine_kit.images import data_url
from agentrl_core.engine_kit.media import first_difference
from agentrl_core.engine_kit.requests import covering_spans

FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def request_body(
    rid: str,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    max_model_len: int,
    seeded: bool,
    adapter: str = "",
    routed_experts: bool = False,
) -> dict[str, Any]:
    """The body of ``/generate``. Everything is said, so that no default of the server or the model applies.

    Args:
        adapter: by which the server knows it.
        routed_experts: the reply shall say to which experts each token was sent.
    """
    sampling: dict[str, Any] = {
        "max_new_tokens": int(min(params.max_tokens, max_model_len - len(prompt_ids))),
        "temperature": float(params.temperature),
        "top_p": float(params.top_p),
        "top_k": int(params.top_k) or -1,
        "stop_token_ids": [int(token) for token in params.stop_token_ids],
        "min_p": float(params.min_p),
    }
    if params.logit_bias:
        sampling["logit_bias"] = {str(token): float(bias) for token, bias in params.logit_bias.items()}
    if seeded and params.seed is not None:
        sampling["sampling_seed"] = int(params.seed) % 2**63
    body = {
        "rid": rid,
        "input_ids": [int(token) for token in prompt_ids],
        "sampling_params": sampling,
        "return_logprob": True,
    }
    if routed_experts:
        body["return_routed_experts"] = True
    # The server finds it by its name, in a field that is named after the path.
    return body | ({"lora_path": adapter} if adapter else {})


def shown(multi_modal: MultiModal) -> dict[str, Any]:
    """What the body of ``/generate`` has in addition, or instead, for a prompt with images: SGLang expands it."""
    return {
        "input_ids": [int(token) for token in multi_modal.collapsed_ids],
        "image_data": [data_url(name, multi_modal.data[name]) for name in multi_modal.images],
        # Of pixels alone SGLang would take a wide image for a high one.
        "mm_hashes": [name[:16] for name in multi_modal.images],
        "return_prompt_token_ids": True,
    }


def check_expansion(reply: dict[str, Any], prompt_ids: Sequence[int], request_id: str) -> None:
    """Raises EngineError where SGLang has expanded a prompt with images to other ids than ``prompt_ids``."""
    if problem := first_difference(reply["prompt_token_ids"], prompt_ids):
        raise EngineError(f"request {request_id!r}: SGLang expands its images to other tokens: {problem}")


def token_output(reply: dict[str, Any], version: int, experts: tuple[int, int] | None = None) -> TokenOutput:
    """The reply of ``/generate``.

    Args:
        version: that of a reply which names none because nothing was sampled.
        experts: the shape of a token's experts, [layers, experts of a token]; None where they were not asked for.

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
        # JSON has no NaN: SGLang writes null.
        log_probs=[math.nan if entry[0] is None else float(entry[0]) for entry in scored],
        finish_reason=FINISH_REASONS[kind],
        spans=covering_spans(_spans(meta, len(token_ids)), len(token_ids), version),
        routed_experts=None if experts is None else _routed_experts(meta, experts),
    )


def routed_experts_shape(model: Mapping[str, Any]) -> tuple[int, int]:
    """[layers, experts of a token] of a model's text ``config.json``, as SGLang reads it.

    Raises:
        EngineError: the model has no experts.
    """
    try:
        return int(model["num_hidden_layers"]), int(model["num_experts_per_tok"])
    except (KeyError, TypeError) as error:
        raise EngineError(
            "actor.router_replay: config.json of the model has no num_experts_per_tok, by which SGLang knows models "
            "with experts; set it to false"
        ) from error


def _routed_experts(meta: dict[str, Any], shape: tuple[int, int]) -> "np.ndarray[Any, Any] | None":
    # None of a request that was aborted before it was computed.
    found = meta.get("routed_experts")
    return None if found is None else np.frombuffer(base64.b64decode(found), np.int32).reshape(-1, *shape)


def _spans(meta: dict[str, Any], length: int) -> Iterator[PolicySpan]:
    # The last one may count a token that was cut off.
    for entry in meta.get("weight_versions") or []:
        yield PolicySpan(int(entry["version"]), int(entry["start"]), min(int(entry["end"]), length))
