"""What a request for samples asks an engine for, and what it is answered."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from agentrl_core.api.engine import SamplingParams, TokenOutput
from agentrl_tinker import messages, requests
from agentrl_tinker.refusals import Refusal
from agentrl_tinker.trainer import Scores


def params_of(asked: requests.Sampling, eos: tuple[int, ...], room: int) -> tuple[SamplingParams, tuple[str, ...]]:
    """Parameters for an engine, and the texts that end a sample.

    Args:
        eos: ids that end a sample for which no stops are given.
        room: most tokens.
    """
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop
    ids = eos if stop is None else tuple(part for part in stop if isinstance(part, int))
    texts = tuple(part for part in stop or () if isinstance(part, str))
    if "" in texts:
        raise Refusal("sampling_params.stop: an empty text would stop everywhere")
    params = SamplingParams(
        max_tokens=asked.max_tokens or max(room, 1),
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=max(asked.top_k, 0),
        seed=asked.seed,
        stop_token_ids=ids,
    )
    return params, texts


def numbered(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of one of several samples: with one seed they would all be the same."""
    return params if params.seed is None else replace(params, seed=params.seed + index)


def cut(output: TokenOutput, texts: tuple[str, ...], decode: Callable[[Sequence[int]], str]) -> TokenOutput:
    """End an output with the token that completes a stop text."""

    def is_ended(length: int) -> bool:
        text = decode(output.token_ids[:length])
        return any(stop in text for stop in texts)

    if not texts or not is_ended(len(output.token_ids)):
        return output
    lengths = range(1, len(output.token_ids) + 1)
    length = lengths[bisect_left(lengths, True, key=is_ended)]
    log_probs = None if output.log_probs is None else output.log_probs[:length]
    return TokenOutput(output.token_ids[:length], log_probs, "stop")


def response(body: requests.Sample, outputs: Sequence[TokenOutput], scores: Scores | None) -> bytes:
    """``SampleResponse``."""
    message = messages.new("SampleResponse")
    for output in outputs:
        sequence = message.sequences.add(
            stop_reason=messages.STOP if output.finish_reason == "stop" else messages.LENGTH,
            tokens=np.array(output.token_ids, "<i4").tobytes(),
        )
        if output.log_probs is not None:
            sequence.logprobs = np.array(output.log_probs, "<f4").tobytes()
    if scores is not None:
        skipped = len(scores.log_probs) - (body.prompt_logprobs_last_n or len(scores.log_probs))
        scores.log_probs[:skipped] = np.nan
        scores.top_log_probs[: max(skipped, 1)] = messages.NO_LOG_PROB
        scores.top_ids[: max(skipped, 1)] = 0
        if body.prompt_logprobs:
            message.prompt_logprobs = scores.log_probs.tobytes()
        if body.topk_prompt_logprobs:
            top = message.topk_prompt_logprobs
            top.token_ids, top.logprobs = scores.top_ids.tobytes(), scores.top_log_probs.tobytes()
            top.length, top.k = scores.top_ids.shape
    return bytes(message.SerializeToString())
