from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentrl_core.api import PluginSpec, RewardManager, RewardTrajectory
from agentrl_rewards_basic import config, plugin
from agentrl_testing.contracts import (
    RewardFunctionCase,
    RewardFunctionContract,
    RewardManagerCase,
    RewardManagerContract,
)

WEIGHTS: dict[str, Any] = {"tool_reward_weight": 0.5, "turn_score_weight": 0.25}


def answer(text: str, truth: Any = "4", **fields: Any) -> RewardTrajectory:
    counted = {"sampled_tokens": len(text.split())} | fields
    return RewardTrajectory([], text, text, text, ground_truth=truth, **counted)


THOUGHT = "<think>2 and 2</think>\n<answer>4</answer>"
SCHEMA = {"type": "object", "required": ["a"]}
FUNCTIONS: list[tuple[PluginSpec, Any, list[tuple[RewardTrajectory, float]]]] = [
    (
        plugin.HASH_ANSWER,
        config.HashAnswerConfig(format_score=0.1),
        [(answer("#### 4"), 1.0), (answer("#### 5"), 0.1), (answer("4"), 0.0)],
    ),
    (plugin.EXACT_NUMBER, None, [(answer("4"), 1.0), (answer("5"), 0.0)]),
    (plugin.EXACT_MATCH, None, [(answer(" Four\n", "four"), 1.0), (answer("for", "four"), 0.0)]),
    (plugin.FUZZY_MATCH, None, [(answer("four", "fou"), 6 / 7), (answer("", "four"), 0.0)]),
    (plugin.JSON_SCHEMA, config.JsonSchemaConfig(SCHEMA, 0.5), [(answer('{"a": 1}'), 1.0), (answer("[]"), 0.5)]),
    (plugin.TAGS, None, [(answer(THOUGHT), 1.0), (answer("4"), 0.0)]),
    (
        plugin.LENGTH_PENALTY,
        config.LengthPenaltyConfig(max_length=4, cache_length=2),
        [(answer("one two"), 0.0), (answer("one two three"), -0.5)],
    ),
    (plugin.REPETITION_PENALTY, config.RepetitionPenaltyConfig(n=1), [(answer("a b"), 0.0), (answer("a a"), -0.5)]),
]


def lengths(samples: Sequence[RewardTrajectory]) -> list[int]:
    return [len(sample.model_text) for sample in samples]


MANAGERS: list[tuple[PluginSpec, Any]] = [
    (plugin.NAIVE, config.NaiveConfig(**WEIGHTS)),
    (plugin.DAPO, config.DapoConfig(max_length=30, cache_length=10, **WEIGHTS)),
    (plugin.RATE_LIMITED, config.RateLimitedConfig(rate=1e6, **WEIGHTS)),
    (plugin.BATCH, config.BatchConfig(function=lengths, **WEIGHTS)),  # type: ignore[arg-type]
]


class TestFunctions(RewardFunctionContract):
    @pytest.fixture(params=FUNCTIONS, ids=lambda case: case[0].name)
    def plugin(self, request: pytest.FixtureRequest) -> RewardFunctionCase:
        spec, options, scored = request.param
        return RewardFunctionCase(spec, config=options, trajectories=scored)


class TestManagers(RewardManagerContract):
    @pytest.fixture(params=MANAGERS, ids=lambda case: case[0].name)
    def plugin(self, request: pytest.FixtureRequest) -> RewardManagerCase:
        spec, options = request.param
        return RewardManagerCase(spec, config=options)


class AllFunctions(RewardManagerCase):
    """Its options name the functions, whichever a test configures."""

    def make(self, functions: Sequence[Any] | None = None) -> RewardManager:
        names = [function.name for function in functions] if functions else ["first", "second"]
        case = RewardManagerCase(self.spec, config=replace(self.config, sources={"*": names}))
        return case.make(functions)


class TestBySource(RewardManagerContract):
    @pytest.fixture
    def plugin(self) -> RewardManagerCase:
        return AllFunctions(plugin.BY_SOURCE, config=config.BySourceConfig(sources={}, **WEIGHTS))
