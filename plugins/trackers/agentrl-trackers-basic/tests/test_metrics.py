"""The meaning of metric names."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_trackers_basic.metrics import (
    PHASE_LABELS,
    Accuracy,
    mean_accuracies,
    read_metrics,
    time_shares,
    validation_accuracies,
)


def test_accuracies_are_found_for_data_sources_with_slashes() -> None:
    metrics = {
        "validation/openai/gsm8k/accuracy_greedy": 0.5,
        "validation/calculator/accuracy_sampled": 0.25,
        "validation/calculator/score_mean": 0.9,
        "validation/calculator/accuracy_greedy": float("nan"),
        "reward/mean": 0.4,
    }
    assert validation_accuracies(metrics) == {
        Accuracy("openai/gsm8k", "greedy"): 0.5,
        Accuracy("calculator", "sampled"): 0.25,
    }


def test_mean_over_data_sources() -> None:
    metrics = {"validation/a/accuracy_sampled": 0.2, "validation/b/accuracy_sampled": 0.4}
    assert mean_accuracies(metrics) == {"sampled": pytest.approx(0.3)}


@given(st.dictionaries(st.sampled_from([*PHASE_LABELS, "step"]), st.floats(0, 1e4)))
def test_shares_sum_to_one_or_there_are_none(seconds: dict[str, float]) -> None:
    shares = time_shares({f"timing/{phase}": value for phase, value in seconds.items()})
    assert not shares or sum(shares.values()) == pytest.approx(1)
    assert all(0 <= share <= 1 for share in shares.values())
    assert bool(shares) == any(value > 0 for value in seconds.values())


def test_actor_and_critic_are_one_update_and_the_rest_is_other() -> None:
    shares = time_shares(
        {"timing/rollout": 5.0, "timing/update_actor": 2.0, "timing/update_critic": 1.0, "timing/step": 10.0}
    )
    assert shares == {"rollout": 0.5, "update": pytest.approx(0.3), "other": pytest.approx(0.2)}


def test_validation_outside_of_the_step_time_is_counted() -> None:
    assert time_shares({"timing/rollout": 1.0, "timing/validation": 3.0, "timing/step": 1.0})["validation"] == 0.75


def test_reading_passes_over_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\n7\n{"step": 2, "a": "\xe2\x80')
    assert read_metrics(path) == [{"step": 1}]
