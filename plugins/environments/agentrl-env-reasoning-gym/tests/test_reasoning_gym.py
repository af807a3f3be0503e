from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import reasoning_gym

from agentrl_core.api import ConfigError, EnvironmentContext, PromptOutcome, RewardTrajectory, SamplerContext
from agentrl_env_reasoning_gym.config import DataSetConfig, LevelsConfig, ReasoningGymConfig
from agentrl_env_reasoning_gym.environment import VALIDATION_SEED, ReasoningGym
from agentrl_env_reasoning_gym.levels import Levels
from agentrl_env_reasoning_gym.plugin import ENVIRONMENT, LEVELS
from agentrl_testing.contracts import EnvironmentCase, EnvironmentContract, SamplerCase, SamplerContract
from agentrl_testing.contracts.case import run

EIGHT = (
    "basic_arithmetic", "chain_sum", "countdown", "gcd", "leg_counting", "letter_counting", "number_sorting",
    "spell_backward",
)  # fmt: skip


def made(datasets: Mapping[str, DataSetConfig], **options: Any) -> ReasoningGym:
    return ReasoningGym(ReasoningGymConfig(datasets=dict(datasets), **options), EnvironmentContext("reasoning_gym"))


def reference(task: Mapping[str, Any], size: int = 10) -> dict[str, Any]:
    """The entry, made by reasoning-gym itself."""
    place = task["extra_info"]
    seed = VALIDATION_SEED if place["split"] == "validation" else 0
    entry: dict[str, Any] = reasoning_gym.create_dataset(task["data_source"], seed=seed, size=size)[place["index"]]
    return entry


def oracle(task: Mapping[str, Any], seed: int, messages: Any) -> list[str]:
    return [f"Let me think. <answer>{reference(task)['answer']}</answer>"]


class TestReasoningGym(EnvironmentContract):
    @pytest.fixture(params=["leg_counting", "spell_backward", "countdown"])
    def plugin(self, request: pytest.FixtureRequest) -> EnvironmentCase:
        config = ReasoningGymConfig(datasets={request.param: DataSetConfig()}, tasks=10, validation_tasks=10)
        return EnvironmentCase(ENVIRONMENT, config=config, oracle=oracle)


class TestLevels(SamplerContract):
    @pytest.fixture
    def plugin(self) -> SamplerCase:
        rows = [{"data_source": "ab"[i % 2], "extra_info": {"level": i % 3}, "raw_prompt": []} for i in range(30)]
        return SamplerCase(LEVELS, config=LevelsConfig(window=4, threshold=0.5), rows=rows)


def test_tasks_are_those_of_reasoning_gym_and_splits_differ() -> None:
    environment = made({"leg_counting": DataSetConfig()}, tasks=10, validation_tasks=10, system_prompt=None)
    for split in ("train", "validation"):
        for task in environment.tasks(split):  # type: ignore[arg-type]
            episode = run(environment.open(task, 5))
            assert episode.messages == [{"role": "user", "content": reference(task)["question"]}]


def test_weights_are_shares_of_the_tasks() -> None:
    environment = made(
        {"gcd": DataSetConfig(3.0), "leg_counting": DataSetConfig(1.0), "countdown": DataSetConfig(2.0)}, tasks=1001
    )
    counts = Counter(task["data_source"] for task in environment.tasks("train"))
    assert sum(counts.values()) == 1001
    assert counts == pytest.approx({"gcd": 500.5, "leg_counting": 166.8, "countdown": 333.7}, abs=1)


def test_a_curriculum_has_tasks_of_every_level_that_grow_harder() -> None:
    environment = made({"spell_backward": DataSetConfig(curriculum=True)}, tasks=40, validation_tasks=12)
    levels = environment.levels("spell_backward")
    assert levels > 2
    assert len(environment.tasks("train")) == 40 * levels and len(environment.tasks("validation")) == 12
    lengths = []
    for level in (0, levels - 1):
        rows = [task for task in environment.tasks("train") if task["extra_info"]["level"] == level]
        lengths.append(sum(len(run(environment.open(row, 0)).messages[-1]["content"]) for row in rows))
    assert lengths[0] < lengths[1]


def test_the_answer_is_the_last_tag_of_the_last_turn() -> None:
    environment = made({"leg_counting": DataSetConfig()}, tasks=10)
    task = environment.tasks("train")[0]
    right = reference(task)["answer"]

    def score(text: str, tag: str | None = "answer") -> Any:
        environment.config.answer_tag = tag
        episode = run(environment.open(task, 0))
        return run(episode.score(RewardTrajectory([], text, text, text)))

    assert score(f"<answer>0</answer> no, <answer>{right}</answer>").score == 1.0
    assert score(f"it is {right}").components == {"answered": 0.0}
    assert score(f" {right} ", None).score == 1.0


def test_a_scorer_that_raises_is_a_counted_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = made({"leg_counting": DataSetConfig()}, tasks=10)
    episode = run(environment.open(environment.tasks("train")[0], 0))
    monkeypatch.setattr(episode._dataset, "score_answer", lambda answer, entry: 1 / 0)
    result = run(episode.score(RewardTrajectory([], "", "<answer>1</answer>", "")))
    assert (result.score, result.metrics) == (0.0, {"scorer_errors": 1.0})


@pytest.mark.parametrize(
    ("datasets", "message"),
    [
        ({}, "datasets is empty"),
        ({"countdwon": DataSetConfig()}, "no such data set; did you mean countdown"),
        ({"composite": DataSetConfig()}, "list the data sets of the mixture here"),
        ({"gcd": DataSetConfig(config={"size": 3})}, "size cannot be set here"),
        ({"gcd": DataSetConfig(config={"min_number": 3})}, "datasets.gcd.config: TypeError: .*min_number"),
        ({"gcd": DataSetConfig(config={"min_value": -3})}, "datasets.gcd.config: AssertionError"),
    ],
)
def test_options_that_cannot_work_are_refused(datasets: dict[str, DataSetConfig], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(datasets)


def test_an_index_out_of_range_says_what_there_is() -> None:
    environment = made({"gcd": DataSetConfig()}, tasks=5)
    task = {"data_source": "gcd", "extra_info": {"split": "train", "level": 0, "index": 5}}
    with pytest.raises(IndexError, match="gcd has the train tasks 0 to 4, not 5"):
        run(environment.open(task, 0))


def test_levels_rise_with_the_rewards_and_a_resumed_run_goes_on_from_there() -> None:
    environment = made({name: DataSetConfig(curriculum=True) for name in EIGHT}, tasks=80)
    rows = environment.tasks("train")
    context = SamplerContext(rows, 16, 0)
    sampler = Levels(LevelsConfig(threshold=0.5, window=2, review=0.25), context)

    def levels_in(step: int) -> set[tuple[str, int]]:
        return {(rows[row]["data_source"], rows[row]["extra_info"]["level"]) for row in sampler.batch(step)}

    assert {level for _, level in levels_in(1)} == {0}
    for step in range(1, 30):
        able = {row: rows[row]["data_source"] == "gcd" for row in sampler.batch(step)}
        sampler.update(step, [PromptOutcome(row, [float(able[row])] * 2) for row in sampler.batch(step)])
    assert {name for name, level in sampler.level.items() if level > 0} == {"gcd"}
    again = Levels(LevelsConfig(threshold=0.5, window=2, review=0.25), context)
    again.load_state_dict(sampler.state_dict())
    assert [again.batch(step) for step in range(30, 40)] == [sampler.batch(step) for step in range(30, 40)]
