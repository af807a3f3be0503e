"""What every engine does again: refuse requests that it cannot serve, and say which weights sampled which tokens.

An engine may live in an interpreter without torch: nothing here needs more than numpy.

    class Echo(InferenceEngine):
        async def generate(self, prompt_ids, sampling_params, request_id, multi_modal=None):
            check_request(request_id, prompt_ids, sampling_params, multi_modal, vocab_size=32000, max_model_len=2048)
            ids = prompt_ids[: sampling_params.max_tokens]
            return TokenOutput(ids, [0.0] * len(ids), "length", covering_spans([], len(ids), version=0))
"""

import hashlib
import json
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_core.api.engine import MultiModal, PolicySpan, SamplingParams, TokenOutput
from agentrl_core.api.errors import EngineError

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""vLLM raises lower ones in silence, and takes no higher one."""


def check_request(
    request_id: str,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    multi_modal: MultiModal | None = None,
    *,
    vocab_size: int,
    max_model_len: int,
    max_images: int = 0,
) -> None:
    """Refuse what an engine could not digest, in the words of whoever configured it.

    Args:
        vocab_size: ids at or above it are refused.
        max_model_len: tokens of prompt and response together.
        max_images: that a prompt may have; 0 for an engine, or a model, that takes text alone.

    Raises:
        ValueError: the request cannot be served.
    """
    where = f"request {request_id!r}:"
    if len(prompt_ids) == 0:
        raise ValueError(f"{where} the prompt is empty; it needs at least 1 token")
    if len(prompt_ids) >= max_model_len:
        raise ValueError(
            f"{where} the prompt has {len(prompt_ids)} tokens, which leaves no room to sample with max_model_len "
            f"{max_model_len}"
        )
    if not all_known(prompt_ids, vocab_size):
        token = next(token for token in prompt_ids if not 0 <= token < vocab_size)
        raise ValueError(f"{where} token id {token} is outside the vocabulary 0..{vocab_size - 1}")
    if problem := sampling_problem(params, vocab_size):
        raise ValueError(f"{where} {problem}")
    if multi_modal is not None and len(multi_modal.images) > max_images:
        allowed = f"at most {max_images} images" if max_images else "text alone"
        raise ValueError(f"{where} the prompt has {len(multi_modal.images)} images; this engine takes {allowed}")


def sampling_problem(params: SamplingParams, vocab_size: int | None = None) -> str:
    """What no engine is asked for, so that each value means the same with all of them; empty for valid parameters.

    Args:
        vocab_size: ids at or above it are refused; None where it is not known yet.
    """
    if not _whole(params.max_tokens, 1):
        return f"max_tokens is {params.max_tokens!r}; allowed: a whole number >= 1"
    numbers = _numbers_of(params)
    try:
        problem = _problem_of_numbers(*numbers)
    except TypeError:  # what cannot be hashed is no number
        problem = _problem_of_numbers.__wrapped__(*numbers)
    if problem:
        return problem
    if not (params.seed is None or _whole(params.seed, -math.inf)):
        return f"seed is {params.seed!r}; allowed: a whole number or None"
    size = math.inf if vocab_size is None else vocab_size
    ids = f"ids of the vocabulary 0..{size - 1}" if vocab_size is not None else "token ids >= 0"
    for token in params.stop_token_ids:
        if not (_whole(token, 0) and token < size):
            return f"stop_token_ids holds {token!r}; allowed: {ids}"
    for token, bias in params.logit_bias.items():
        if not (_whole(token, 0) and token < size and _within(bias, -math.inf, math.inf) and math.isfinite(bias)):
            return f"logit_bias is {{{token!r}: {bias!r}}}; allowed: {ids}, and finite values"
    if params.json_schema is not None and not _is_object(params.json_schema):
        return (
            f"json_schema {params.json_schema!r:.100} is not the JSON text of an object, for example "
            '\'{"type": "object"}\''
        )
    return ""


_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_numbers_of = attrgetter(*_NUMBERS)
_WHOLE = (int, np.integer)
_NUMBER = (*_WHOLE, float, np.floating)


@lru_cache(maxsize=256, typed=True)
def _problem_of_numbers(
    temperature: Any, top_p: Any, top_k: Any, min_p: Any, presence: Any, frequency: Any, repetition: Any
) -> str:
    """Of :data:`_NUMBERS`, which are the same for almost all requests of a run."""
    values = (temperature, top_p, top_k, min_p, presence, frequency, repetition)
    allowed = (
        (
            _within(temperature, 0, MAX_TEMPERATURE) and (temperature == 0 or temperature >= MIN_TEMPERATURE),
            f"0 (greedy), or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}",
        ),
        (_within(top_p, 0, 1) and top_p > 0, "numbers > 0 and <= 1"),
        (_whole(top_k, 0), "a whole number >= 0 (0: off)"),
        (_within(min_p, 0, 1), "0 to 1"),
        (_within(presence, -2, 2), "-2 to 2"),
        (_within(frequency, -2, 2), "-2 to 2"),
        (_within(repetition, 0, math.inf) and 0 < repetition < math.inf, "finite numbers > 0"),
    )
    for name, value, (is_valid, words) in zip(_NUMBERS, values, allowed, strict=True):
        if not is_valid:
            return f"{name} is {value!r}; allowed: {words}"
    return ""


def _within(value: Any, low: float, high: float) -> bool:
    return isinstance(value, _NUMBER) and bool(low <= value <= high)


def _whole(value: Any, low: float) -> bool:
    return isinstance(value, _WHOLE) and bool(value >= low)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (TypeError, ValueError, RecursionError):
        return False


def all_known(ids: Sequence[int], vocab_size: int) -> bool:
    """Whether all of these are ids of a vocabulary. Raises TypeError where one is no whole number."""
    try:
        # Four times faster than min() and max(); negative numbers overflow.
        return bool(np.maximum.reduce(np.frombuffer(array("I", ids), np.uint32)) < vocab_size)
    except OverflowError:
        return False


def covering_spans(spans: Iterable[PolicySpan], length: int, version: int) -> list[PolicySpan]:
    """The spans of an output, empty ones left out.

    Args:
        length: tokens of the output.
        version: of the weights, for an engine that names none because nothing was sampled, or only one was there.

    Raises:
        EngineError: they don't cover the output without a gap.
    """
    given = [span for span in spans if span.start < span.end]
    if not given:
        return [PolicySpan(version, 0, length)] if length else []
    ends = [0, *(span.end for span in given)]
    if [span.start for span in given] != ends[:-1] or ends[-1] != length:
        named = ", ".join(f"{span.version} for {span.start}..{span.end}" for span in given)
        raise EngineError(f"the engine's weight versions ({named}) do not cover {length} tokens")
    return given


def read_model_config(model_path: str) -> dict[str, Any]:
    """The model's ``config.json``.

    Raises:
        EngineError: there is none.
    """
    path = Path(model_path) / "config.json"
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise EngineError(f"model.path: {path} cannot be read ({error}); it must be a folder with a model") from error
    return content


def can_continue(params: SamplingParams) -> bool:
    """Whether a request that was ended early can go on after its tokens: penalties on what was sampled, and a schema's
    JSON, would begin again if these became part of the prompt."""
    return not (params.presence_penalty or params.frequency_penalty or params.json_schema is not None)


def remaining(
    prompt_ids: Sequence[int], params: SamplingParams, so_far: TokenOutput | None
) -> tuple[Sequence[int], SamplingParams]:
    """The request that continues ``so_far``."""
    if so_far is None or not so_far.token_ids:
        return prompt_ids, params
    done = len(so_far.token_ids)
    seed = params.seed
    if seed is not None:
        # The same seed again would give the continuation the random numbers of the beginning.
        digest = hashlib.blake2b(f"{seed}/{done}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "big") >> 1
    return [*prompt_ids, *so_far.token_ids], replace(params, max_tokens=params.max_tokens - done, seed=seed)


def remaining_media(multi_modal: MultiModal | None, so_far: TokenOutput | None) -> MultiModal | None:
    """The images of the request that continues ``so_far``."""
    if multi_modal is None or so_far is None:
        return multi_modal
    return replace(multi_modal, collapsed_ids=[*multi_modal.collapsed_ids, *so_far.token_ids])


def joined(so_far: TokenOutput | None, output: TokenOutput) -> TokenOutput:
    """One output of two that follow each other."""
    if so_far is None or not so_far.token_ids:
        return output
    done = len(so_far.token_ids)
    both = so_far.log_probs is not None and output.log_probs is not None
    # What comes later says it of all tokens, perhaps with other weights.
    experts = so_far.routed_experts if output.routed_experts is None else output.routed_experts
    if so_far.routed_experts is not None and output.routed_experts is not None:
        experts = np.concatenate([so_far.routed_experts, output.routed_experts[len(so_far.routed_experts) :]])
    return TokenOutput(
        [*so_far.token_ids, *output.token_ids],
        [*(so_far.log_probs or []), *(output.log_probs or [])] if both else None,
        output.finish_reason,
        [*so_far.spans, *(PolicySpan(span.version, span.start + done, span.end + done) for span in output.spans)],
        so_far.queued + output.queued,
        output.replica,
        experts,
    )
