import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from agentrl_core.api import RewardError, RewardManager, RewardManagerContext, RewardResult, RewardTrajectory
from agentrl_rewards_basic import variants
from agentrl_rewards_basic.config import BatchConfig, BySourceConfig, DapoConfig, NaiveConfig, RateLimitedConfig
from agentrl_rewards_basic.manager import NaiveRewardManager


class Bound:
    """A bound reward function with one result, which counts its calls."""

    def __init__(self, name: str, score: float = 1.0, weight: float = 1.0, **details: Any) -> None:
        self.name, self.weight = name, weight
        self.result = RewardResult(score, **details)
        self.calls = self.running = self.most = 0

    async def __call__(self, trajectory: RewardTrajectory) -> RewardResult:
        self.calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        return self.result


def sample(text: str = "text", **fields: Any) -> RewardTrajectory:
    return RewardTrajectory([], text, text, text, **fields)


def score(manager: RewardManager, **fields: Any) -> RewardResult:
    return asyncio.run(manager.score(sample(**fields)))


@pytest.mark.parametrize(("tags", "total"), [(1.0, 3.5), (0.25, 2.75), (0.0, 0.0), (-1.0, 0.0)])
def test_a_gate_that_is_closed_makes_the_total_zero_and_shows_its_parts(tags: float, total: float) -> None:
    functions = [Bound("tags", tags), Bound("right", 2.0, turn_rewards=[0.0, 2.0], components={"part": 7.0})]
    config = NaiveConfig(tool_reward_weight=0.5, gates=["tags"])
    result = score(
        NaiveRewardManager(config, RewardManagerContext(functions)), tool_rewards=[1.0], tool_reward_turns=[0]
    )
    assert result.score == total
    assert result.turn_rewards == ([0.5, 2.0] if total else [])
    assert result.components == {"tags": tags, "right": 2.0, "right/part": 7.0}
    assert result.metrics["gated"] == float(not total)


def test_token_rewards_are_weighted_and_added() -> None:
    functions = [Bound("a", 3.0, token_rewards=[1.0, 2.0]), Bound("b", 4.0, 0.5, token_rewards=[4.0, 0.0]), Bound("c")]
    result = score(NaiveRewardManager(NaiveConfig(), RewardManagerContext(functions)))
    assert (result.score, result.token_rewards) == (6.0, [3.0, 2.0])


def test_a_gate_that_is_no_function_is_refused() -> None:
    with pytest.raises(ValueError, match="config.gates: no function 'tag' in reward.functions, which has tags; add or"):
        NaiveRewardManager(NaiveConfig(gates=["tag"]), RewardManagerContext([Bound("tags")]))


def by_source(functions: Sequence[Bound], sources: dict[str, list[str]], **options: Any) -> RewardManager:
    return variants.BySourceRewardManager(BySourceConfig(sources=sources, **options), RewardManagerContext(functions))


def test_only_the_functions_of_the_source_are_called() -> None:
    math, text, brief = functions = [Bound("math"), Bound("text", 2.0), Bound("brief", -0.5)]
    manager = by_source(functions, {"gsm8k": ["math", "brief"], "*": ["text"]}, gates=["text"])
    assert score(manager, data_source="gsm8k").components == {"math": 1.0, "brief": -0.5}
    assert score(manager, data_source="trivia").score == 2.0
    assert [function.calls for function in (math, text, brief)] == [1, 1, 1]


def test_an_unknown_source_names_the_key() -> None:
    manager = by_source([Bound("math")], {"gsm8k": ["math"]})
    with pytest.raises(RewardError, match=r"manager.config.sources has no entry for data_source 'gsm'; it has gsm8k"):
        score(manager, data_source="gsm")


@pytest.mark.parametrize(
    ("sources", "problem"),
    [({"a": ["maths"]}, "sources.a: no function 'maths'"), ({"a": []}, "never uses the function 'math'")],
)
def test_sources_must_fit_the_functions(sources: dict[str, list[str]], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        by_source([Bound("math")], sources)


@pytest.mark.parametrize(("tokens", "penalty"), [(6, 0.0), (7, -0.25), (10, -1.0), (11, -1.0)])
def test_dapo_adds_the_overlong_penalty_behind_the_gates(tokens: int, penalty: float) -> None:
    config = DapoConfig(max_length=10, cache_length=4, overlong_weight=0.5, gates=["right"])
    for right in (1.0, 0.0):
        manager = variants.DapoRewardManager(config, RewardManagerContext([Bound("right", right)]))
        result = score(manager, sampled_tokens=tokens)
        assert (result.score, result.components) == (right + 0.5 * penalty, {"right": right, "overlong": penalty})


async def many(manager: RewardManager, count: int) -> None:
    await asyncio.gather(*(manager.score(sample()) for _ in range(count)))


def test_at_most_so_many_calls_run_at_a_time() -> None:
    function = Bound("judge")
    manager = variants.RateLimitedRewardManager(RateLimitedConfig(concurrency=3), RewardManagerContext([function]))
    asyncio.run(many(manager, 10))
    assert (function.calls, function.most) == (10, 3)


def test_calls_above_the_rate_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls per second after a burst of three, on a clock that the test sets."""
    waits: list[float] = []
    now = [1000.0]

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    function = Bound("judge")
    manager = variants.RateLimitedRewardManager(RateLimitedConfig(rate=2.0, burst=3), RewardManagerContext([function]))
    monkeypatch.setattr(variants.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(variants.asyncio, "sleep", sleep)
    asyncio.run(many(manager, 5))
    waited = [wait for wait in waits if wait]
    now[0] += 1.5  # three tokens came, two were owed
    waits.clear()
    asyncio.run(many(manager, 2))
    assert (waited, [wait for wait in waits if wait]) == ([0.5, 1.0], [0.5])


def batch(function: Any, *functions: Bound, **options: Any) -> list[RewardResult]:
    config = BatchConfig(function=function, **options)
    manager = variants.BatchRewardManager(config, RewardManagerContext(functions))

    async def scores() -> list[RewardResult]:
        samples = [sample("x" * length) for length in (3, 1, 2)]
        return list(await manager.score_group(samples, [await manager.score(each) for each in samples]))

    return asyncio.run(scores())


def test_a_batch_function_scores_all_samples_of_a_prompt_in_one_call() -> None:
    async def rank(samples: Sequence[RewardTrajectory]) -> list[int]:
        order = sorted(len(each.model_text) for each in samples)
        return [order.index(len(each.model_text)) for each in samples]

    results = batch(rank, Bound("right"), weight=0.5)
    assert [result.score for result in results] == [2.0, 1.0, 1.5]
    assert results[0].components == {"right": 1.0, "batch": 2.0}
    assert [result.score for result in batch(lambda samples: [1.0] * 3)] == [1.0] * 3


@pytest.mark.parametrize("scores", [[1.0], None, [1.0, None, 2.0], 1.0])
def test_a_batch_function_that_returns_something_else_is_an_error(scores: Any) -> None:
    with pytest.raises(RewardError, match=r"manager.config.function returned .* for 3 samples; return a list"):
        batch(lambda samples: scores, Bound("right"))
