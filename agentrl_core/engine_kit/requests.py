"""What every engine does again: refuse requests that it cannot serve, and say which weights sampled which tokens.

An engine may live in an interpreter without torch: nothing here needs more than numpy.

    class Echo(InferenceEngine):
        async def generate(self, prompt_ids, sampling_params, request_id, multi_modal=None):
            check_request(request_id, prompt_ids, sampling_params, multi_modal, vocab_size=32000, max_model_len=2048)
            ids = prompt_ids[: sampling_params.max_tokens]
            return TokenOutput(ids, [0.0] * len(ids), "length", covering_spans([], len(ids), version=0))
"""

import json
import math
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_core.api.engine import PolicySpan, SamplingParams
from agentrl_core.api.errors import EngineError


def check_request(
    request_id: str,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    multi_modal: dict[str, Any] | None = None,
    *,
    vocab_size: int,
    max_model_len: int,
    max_temperature: float = math.inf,
) -> None:
    """Refuse what an engine of text could not digest, in the words of whoever configured it.

    Args:
        vocab_size: ids at or above it are refused.
        max_model_len: tokens of prompt and response together.
        max_temperature: the highest that the engine takes.

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
    if not _all_known(prompt_ids, vocab_size):
        token = next(token for token in prompt_ids if not 0 <= token < vocab_size)
        raise ValueError(f"{where} token id {token} is outside the vocabulary 0..{vocab_size - 1}")
    if params.max_tokens < 1:
        raise ValueError(f"{where} max_tokens is {params.max_tokens}; it must be at least 1")
    if not (0 <= params.temperature <= max_temperature and 0 < params.top_p <= 1 and params.top_k >= 0):
        bound = "temperature >= 0" if max_temperature == math.inf else f"0 <= temperature <= {max_temperature:g}"
        raise ValueError(
            f"{where} temperature {params.temperature}, top_p {params.top_p}, top_k {params.top_k}; allowed are "
            f"{bound}, 0 < top_p <= 1, top_k >= 0"
        )
    penalties = (params.presence_penalty, params.frequency_penalty)
    if not (0 <= params.min_p <= 1 and max(map(abs, penalties)) <= 2 and params.repetition_penalty > 0):
        raise ValueError(
            f"{where} min_p {params.min_p}, presence_penalty {penalties[0]}, frequency_penalty {penalties[1]}, "
            f"repetition_penalty {params.repetition_penalty}; allowed are 0 <= min_p <= 1, penalties from -2 to 2, "
            "repetition_penalty > 0"
        )
    for token, bias in params.logit_bias.items():
        if not 0 <= token < vocab_size or not math.isfinite(bias):
            raise ValueError(
                f"{where} logit_bias {{{token}: {bias}}}; allowed are ids in 0..{vocab_size - 1} and finite values"
            )
    if params.json_schema is not None and not _is_object(params.json_schema):
        raise ValueError(
            f"{where} json_schema {params.json_schema!r:.100} is not the JSON text of an object, for example "
            '\'{"type": "object"}\''
        )
    if multi_modal:
        raise ValueError(f"{where} this engine takes text only, found {', '.join(sorted(multi_modal))}")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (TypeError, ValueError, RecursionError):
        return False


def _all_known(ids: Sequence[int], vocab_size: int) -> bool:
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
