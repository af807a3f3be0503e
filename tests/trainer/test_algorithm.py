"""What happens between rollout and update, against plain loops."""

import math

import numpy as np
import pytest
import torch

from agentrl_core.api import AgentLoopOutput, ConfigError, RewardResult, RolloutError, Termination
from agentrl_core.api.tree import Tree
from agentrl_core.config import load_config
from agentrl_core.plugins.official import OFFICIAL
from agentrl_core.protocol import DataProto
from agentrl_core.protocol.ragged import like, ragged
from agentrl_core.rollout.batching import to_data_proto
from agentrl_core.rollout.loop_output import adopt
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.trainer import algorithm as algorithm_module
from agentrl_core.trainer.algorithm import Algorithm, add_baselines
from agentrl_core.trainer.dynamic_sampling import fill

# One needs a teacher.
ESTIMATORS = sorted({name for kind, name in OFFICIAL if kind == "advantage_estimator"} - {"on_policy_distillation"})
ROWS = [("a", "a0", [1, 0, 1], 1.0), ("a", "a1", [1, 1, 0], 0.0), ("b", "b0", [1, 1, 1], 0.5)]


def trajectory(uid: str, name: str, mask: list[int], score: float | None) -> TrajectoryResult:
    output = AgentLoopOutput([1], [5] * len(mask), mask, [-0.5 * each for each in mask], Termination.COMPLETED)
    reward = None if score is None else RewardResult(score)
    return TrajectoryResult({"uid": uid}, name, Termination.COMPLETED, adopt("by hand", Tree(), output), reward)


@pytest.fixture
def batch():
    made = to_data_proto([trajectory(*row) for row in ROWS], 0, {})
    shape = made.batch["response_mask"].shape
    generator = torch.Generator().manual_seed(0)
    for name in ("old_log_probs", "ref_log_prob"):
        made.batch[name] = -torch.rand(shape, generator=generator)
    return made


@pytest.fixture
def algorithm(tiny_run):
    def make(**keys) -> Algorithm:
        return Algorithm(load_config(tiny_run({f"algorithm.{name}": value for name, value in keys.items()})))

    return make


def test_a_kl_penalty_in_the_reward_lowers_each_token_and_the_score(algorithm, batch) -> None:
    made = algorithm(kl_placement="reward", kl_coef=0.1, kl_target=1e-6)
    before, scores = batch.batch["rm_scores"].clone(), batch.batch["scores"].clone()
    metrics = made.penalise(batch)
    kls = []
    for row, (_, _, mask, _) in enumerate(ROWS):
        total = 0.0
        for t, sampled in enumerate(mask):
            kl = float(batch.batch["old_log_probs"][row, t] - batch.batch["ref_log_prob"][row, t]) if sampled else 0.0
            assert math.isclose(float(batch.batch["rm_scores"][row, t]), float(before[row, t]) - 0.1 * kl, abs_tol=1e-6)
            total += kl
            kls += [kl] if sampled else []
        assert math.isclose(float(batch.batch["scores"][row]), float(scores[row]) - 0.1 * total, abs_tol=1e-6)
    assert math.isclose(metrics["reward/kl"], np.mean(kls), abs_tol=1e-6) and metrics["reward/kl_coef"] == 0.1
    # Three trajectories; the error is clipped to 0.2 in its direction.
    expected = 0.1 * (1 + math.copysign(0.2, np.mean(kls)) * 3 / 10_000)
    assert math.isclose(made.kl_coef, expected) and made.state["kl_coef"] == made.kl_coef


def test_the_entropy_bonus_pauses_above_its_target_and_a_checkpoint_knows(algorithm) -> None:
    made, resumed = (algorithm(entropy_coef=0.01, entropy_target=0.5) for _ in range(2))
    assert made.entropy_coef == 0.01
    made.note({"actor/entropy": 0.6})
    resumed.state = made.state
    assert made.entropy_coef == resumed.entropy_coef == 0.0
    made.note({"actor/entropy": 0.4})
    assert made.entropy_coef == 0.01


def test_the_greedy_answer_is_the_baseline_and_the_groups_mean_where_it_has_no_score(caplog) -> None:
    results = [trajectory(*row) for row in ROWS]
    add_baselines(results, [trajectory("a", "g", [1], 0.25), trajectory("b", "g", [1], None)])
    assert [result.baseline for result in results] == [0.25, 0.25, 0.5]
    assert "1 of 2 greedy answers have no score" in caplog.text
    assert to_data_proto(results, 0, {}).batch["baselines"].tolist() == [0.25, 0.25, 0.5]


def group(uid: str, *scores: float) -> list[TrajectoryResult]:
    return [trajectory(uid, f"{uid}{number}", [1], score) for number, score in enumerate(scores)]


def test_prompts_without_signal_are_replaced_until_the_batch_is_full() -> None:
    asked = []

    def more(number: int, prompts: int) -> list[TrajectoryResult]:
        asked.append((number, prompts))
        return [each for p in range(prompts) for each in group(f"m{number}{p}", 0.0, float(number == 2 or p == 0))]

    results = fill(1, group("a", 1, 1) + group("b", 0, 1) + group("c", 0, 0) + group("d", 0, 0), 3, more)
    assert asked == [(1, 3), (2, 2)]
    batch = to_data_proto(results, 0, {})
    assert len(set(batch.non_tensor_batch["uid"])) == 4 and len(batch) == 8
    # Nothing is lost: records show those that were replaced too.
    assert len(results) == 8 + 6 + 4
    # The sampler chose the prompts of the step, and learns from these alone.
    assert [result.further for result in results] == [False] * 8 + [True] * 10


def test_a_batch_that_cannot_be_filled_ends_the_run_with_the_key_to_change() -> None:
    with pytest.raises(RolloutError, match="only 1 of 2 prompts .* after 2 rounds .* raise rollout.resample_rounds"):
        fill(7, group("a", 1, 0) + group("b", 1, 1), 2, lambda number, prompts: group(f"m{number}", 1, 1))


def test_a_correction_without_the_log_probs_of_the_rollout_says_what_lacks_them(algorithm, batch) -> None:
    made = algorithm(correction={"name": "token_tis"})
    assert made.correct(batch)["correction/weight_mean"] > 0
    batch.batch = batch.batch.exclude("rollout_log_probs")
    with pytest.raises(ConfigError, match="algorithm.correction needs .* an agent loop made rows without response_log"):
        made.correct(batch)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_with_separate_groups_say_the_same_of_parts_of_a_step(
    algorithm, batch, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit what the whole step in padded tensors gives; others get the whole step."""
    chance = np.random.default_rng(1)
    results = [
        trajectory(f"u{row % 7}", f"t{row}", chance.integers(0, 2, 1 + row * row % 23).tolist(), float(chance.random()))
        for row in range(40)
    ]
    whole = to_data_proto(results, 0, {})
    for column in ("old_log_probs", "values", "entropys", "teacher_log_probs"):
        whole.batch[column] = like(whole.batch["response_mask"], torch.rand(whole.batch["response_mask"].shape))
    whole.batch["baselines"] = torch.rand(len(whole))
    components = [{"a": float(chance.random())} for _ in results]
    whole.non_tensor_batch["reward_components"] = np.array(components, dtype=object)
    made, seen = algorithm(advantage=name), []
    monkeypatch.setattr(algorithm_module, "PART", 9)
    padded = DataProto.from_dict(
        {key: getattr(column, "padded", column.clone)() for key, column in whole.batch.items()}, whole.non_tensor_batch
    )
    expected, metrics = made._estimated(padded), made.estimate(whole)
    for column in ("advantages", "returns"):
        assert torch.equal(whole.batch[column], getattr(expected, column)), column
        assert ragged(whole.batch[column]) is not None
    assert metrics == {f"advantage/{key}": value for key, value in expected.metrics.items()}
    monkeypatch.setattr(made, "_estimator", lambda batch: (seen.append(len(batch.response_mask)), expected)[1])
    if made._settings.advantage.has("separate_groups"):
        assert not expected.metrics
    else:
        made.estimate(whole)
        assert seen == [len(results)]
