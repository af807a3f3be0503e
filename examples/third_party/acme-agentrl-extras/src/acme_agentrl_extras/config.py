"""Options of the plugins."""

from dataclasses import dataclass

from agentrl_core.api import option


@dataclass
class SecondThoughtConfig:
    max_turns: int = option(6, ge=1, unit="turns", help="most turns of the policy in one trajectory")
    question: str = option("Are you sure? Answer again.", help="what an answer is told, once")


@dataclass
class ConvertConfig:
    digits: int = option(6, ge=1, le=15, unit="digits", help="significant digits of a result")


@dataclass
class ClosenessConfig:
    tolerance: float = option(0.1, gt=0, help="relative error that halves the score")


@dataclass
class AgreementConfig:
    scale: float = option(0.1, gt=0, unit="nats", help="gap between engine and trainer that weighs 1/e")
