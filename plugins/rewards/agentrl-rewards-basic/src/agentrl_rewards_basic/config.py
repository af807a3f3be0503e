"""Options of the rewards."""

from dataclasses import dataclass
from typing import Any, Literal

from agentrl_core.api import option

ANSWER_TAG = "take the answer from the last <tag>…</tag> of the last turn, named without brackets; null: the whole turn"


@dataclass
class NaiveConfig:
    tool_reward_weight: float = option(0.0, help="factor of the sum of the rewards that tools returned")
    turn_score_weight: float = option(0.0, help="factor of the sum of the scores that interactions returned")
    gates: list[str] = option(
        default_factory=list, help="functions that must score above 0; where one does not, the sum is replaced by 0"
    )


@dataclass(kw_only=True)
class BySourceConfig(NaiveConfig):
    sources: dict[str, list[str]] = option(
        help='functions that count for each data_source, such as {gsm8k: [math], "*": [exact_match]}; "*": all others'
    )


@dataclass(kw_only=True)
class OverlongConfig:
    max_length: int = option(ge=1, help="longest length with a penalty above -1, e.g. rollout.max_response_length")
    cache_length: int = option(ge=1, help="length below max_length over which the penalty falls from 0 to -1")


@dataclass(kw_only=True)
class DapoConfig(OverlongConfig, NaiveConfig):
    overlong_weight: float = option(1.0, ge=0, help="factor of the overlong penalty")


@dataclass
class RateLimitedConfig(NaiveConfig):
    concurrency: int = option(16, ge=1, help="maximum calls of functions at a time, per reward worker")
    rate: float | None = option(
        None, gt=0, unit="calls per second", help="maximum rate of calls, per reward worker; null: no limit"
    )
    burst: int = option(1, ge=1, unit="calls", help="calls that may start at the same time after a pause")


@dataclass(kw_only=True)
class BatchConfig(NaiveConfig):
    function: str = option(
        code=True,
        help="scores all samples of a prompt in one call: 'package.module:function', or 'file.py:function' relative to "
        "the config file",
    )
    weight: float = option(1.0, help="factor of the scores that the function returns")


@dataclass
class HashAnswerConfig:
    format_score: float = option(0.0, help="score of a wrong answer that is written as '#### x'")


@dataclass
class ExactMatchConfig:
    tag: str | None = option(None, help=ANSWER_TAG)
    normalize: Literal["text", "squad"] = option(
        "text", help="text: ignore case, spaces and Unicode variants; squad: also ASCII punctuation and a, an, the"
    )


@dataclass
class FuzzyMatchConfig(ExactMatchConfig):
    threshold: float = option(0.0, ge=0, le=1, help="lowest similarity that scores; less scores 0")


@dataclass
class JsonSchemaConfig:
    schema: dict[str, Any] | None = option(None, help="JSON schema of rows without extra_info.json_schema; null: none")
    format_score: float = option(0.0, help="score of JSON that the schema rejects")
    tag: str | None = option(None, help=ANSWER_TAG)


@dataclass
class TagsConfig:
    tags: list[str] = option(default_factory=lambda: ["think", "answer"], help="the tags in order, without brackets")
    prefilled: bool = option(False, help="the chat template writes the first opening tag, so the policy does not")


@dataclass(kw_only=True)
class LengthPenaltyConfig(OverlongConfig):
    unit: Literal["tokens", "characters"] = option("tokens", help="what the lengths count")


@dataclass
class RepetitionPenaltyConfig:
    n: int = option(3, ge=1, help="length of the n-grams")
    unit: Literal["words", "characters"] = option("words", help="what n-grams consist of; words end at spaces")


@dataclass
class RemoteConfig:
    url: str = option(help="address that gets each trajectory in a POST request")
    attempts: int = option(3, ge=1, help="maximum requests for one trajectory")
    attempt_timeout: float = option(10.0, gt=0, unit="seconds", help="time limit of one request")
    max_body_bytes: int = option(4 * 2**20, ge=1, unit="bytes", help="longest answer, decompressed")
    backoff: float = option(0.5, ge=0, unit="seconds", help="pause before the second request, doubled for each further")
    token_env: str | None = option(None, help="environment variable with a bearer token; null: no authorization")
