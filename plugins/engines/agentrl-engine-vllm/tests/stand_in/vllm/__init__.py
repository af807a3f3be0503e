"""Stands in for vLLM: the names that the engine uses, with the real ones' arguments and outputs.

Token ``i`` of an answer is ``(sum of the ids before it + 1000 x version) % VOCAB``, its log-probability minus that
divided by 1000.
"""

from dataclasses import dataclass, field
from typing import Any

VOCAB = 200


def TokensPrompt(**fields: Any) -> dict[str, Any]:
    return fields


@dataclass
class SamplingParams:
    output_kind: str
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: list[int]
    ignore_eos: bool
    logprobs: int
    flat_logprobs: bool
    detokenize: bool
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    structured_outputs: Any = None


class AsyncEngineArgs:
    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments


@dataclass
class Span:
    version: str
    start: int
    end: int


@dataclass
class FlatLogprobs:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Completion:
    token_ids: list[int]
    logprobs: FlatLogprobs
    finish_reason: str
    weight_versions: list[Span] | None


@dataclass
class RequestOutput:
    outputs: list[Completion]
    num_cached_tokens: int
    finished: bool = True
