"""Options of the rewards."""

from dataclasses import dataclass

from agentrl_core.api import option


@dataclass
class NaiveConfig:
    tool_reward_weight: float = option(0.0, help="factor of the sum of the rewards that tools returned")
    turn_score_weight: float = option(0.0, help="factor of the sum of the scores that interactions returned")


@dataclass
class HashAnswerConfig:
    format_score: float = option(0.0, help="score of a wrong answer that is written as '#### x'")
