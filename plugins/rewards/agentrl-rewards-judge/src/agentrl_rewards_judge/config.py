"""Options of the judge and of the reward model."""

from dataclasses import dataclass
from typing import Literal

from agentrl_core.api import option


@dataclass
class JudgeConfig:
    engine: str = option(help="name of the judge's engine in `engines`")
    template: str = option(
        help="what the judge reads; {question}, {answer}, {ground_truth} and {conversation} are replaced"
    )
    score: str = option(
        "number",
        help="where the verdict is: the last 'number', the last yes or no ('yes_no'), or the last match of a regular "
        "expression whose first group is a number, yes or no",
    )
    scale: list[float] | None = option(
        None, help="lowest and highest verdict, which score 0 and 1; a number outside is no verdict; null: unscaled"
    )
    retries: int = option(2, ge=0, help="further answers that the judge may give after one without a verdict")
    temperature: float = option(0.0, ge=0, le=2, help="of the judge's first answer; further ones are sampled at 1")
    max_tokens: int = option(512, ge=1, unit="tokens", help="maximum length of the judge's answer")


@dataclass
class RewardModelConfig:
    model: str = option(
        help="directory of a transformers model with its tokenizer: for sequence classification, or with scores=tokens "
        "for token classification"
    )
    scores: Literal["last", "turns", "tokens"] = option(
        "last",
        help="what is scored: the whole conversation, also each turn of the policy by the change in score, or each "
        "token that the policy sampled",
    )
    label: int | None = option(None, ge=0, help="label whose log-probability is the score; null: a model of one label")
    batch_size: int = option(16, ge=1, unit="conversations", help="most that are computed at a time")
    max_length: int = option(4096, ge=1, unit="tokens", help="longest conversation; a longer one is a reward_error")
    dtype: Literal["float32", "bfloat16", "float16"] = option("float32", help="data type of the weights")
    device: str = option(
        "auto",
        help="auto (a GPU if the reward worker sees one, on Ray with RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0), cpu, cuda, "
        "or cuda:1",
    )
