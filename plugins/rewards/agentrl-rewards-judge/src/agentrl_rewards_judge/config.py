"""Options of the judge."""

from dataclasses import dataclass

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
    temperature: float = option(0.0, ge=0, help="of the judge's first answer; further ones are sampled at 1")
    max_tokens: int = option(512, ge=1, unit="tokens", help="maximum length of the judge's answer")
