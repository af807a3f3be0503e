"""The hook counts what metrics say, ends the run at its limits, and goes on counting when the run is resumed."""

from pathlib import Path
from typing import Any

import pytest

from agentrl_backend_tinker.config import LimitsConfig
from agentrl_backend_tinker.limits import Limits
from agentrl_core.api import HookContext
from agentrl_core.api.errors import ConfigError

STEP = {
    "rollout/engine/total_prompt_tokens": 1000.0,
    "rollout/engine/total_sampled_tokens": 200.0,
    "actor/forward_tokens": 50.0,
    "actor/trained_tokens": 30.0,
}


def hook(folder: Path, reasons: list[str], **config: Any) -> Limits:
    return Limits(LimitsConfig(**config), HookContext("tinker_limits", folder, reasons.append))


def grown(step: int) -> dict[str, float]:
    return {name: value * step if "total" in name else value for name, value in STEP.items()}


def test_tokens_of_all_kinds_count(tmp_path: Path) -> None:
    reasons: list[str] = []
    limits = hook(tmp_path, reasons, max_tokens=2 * 1280)
    limits.on_step_end(1, grown(1))
    assert reasons == []
    limits.on_step_end(2, grown(2))
    (reason,) = reasons
    assert "2560 tokens reach max_tokens=2560" in reason


def test_cost_counts_with_a_price_for_each_kind(tmp_path: Path) -> None:
    reasons: list[str] = []
    prices = {"price_prompt": 1000.0, "price_sampled": 2000.0, "price_trained": 10_000.0}
    cost = (1050 * 1000 + 200 * 2000 + 30 * 10_000) / 1e6
    limits = hook(tmp_path, reasons, max_cost=1.5 * cost, **prices)
    limits.on_step_end(1, grown(1))
    assert reasons == []
    limits.on_step_end(2, grown(2))
    assert f"a cost of {2 * cost:.4g} reaches" in reasons[0]


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    """Its engines begin at 0 again."""
    reasons: list[str] = []
    hook(tmp_path, reasons).on_step_end(1, grown(1))
    hook(tmp_path, reasons, max_tokens=2560).on_step_end(2, grown(1))
    assert len(reasons) == 1


def test_a_run_that_has_reached_its_limit_is_not_resumed_for_another_step(tmp_path: Path) -> None:
    reasons: list[str] = []
    hook(tmp_path, reasons).on_step_end(1, grown(1))
    with pytest.raises(ConfigError, match=r"1280 tokens reach max_tokens=1280 .* Raise the limit to continue"):
        hook(tmp_path, reasons, max_tokens=1280)
    hook(tmp_path, reasons, max_tokens=1281)
    assert reasons == []


def test_engines_that_are_restarted_begin_again_and_policies_add_up(tmp_path: Path) -> None:
    reasons: list[str] = []
    limits = hook(tmp_path, reasons, max_tokens=10_000_000)
    limits.on_step_end(1, grown(3))
    limits.on_step_end(2, {"rollout/engine/total_sampled_tokens": 7.0, "policy/a/actor/trained_tokens": 5.0,
                           "policy/b/actor/trained_tokens": 6.0})  # fmt: skip
    assert limits._spent.sampled == 607 and limits._spent.trained == 41


@pytest.mark.parametrize("config", [{}, {"price_trained": 5.0}])
def test_without_a_limit_the_run_goes_on(tmp_path: Path, config: Any) -> None:
    reasons: list[str] = []
    limits = hook(tmp_path, reasons, **config)
    for step in range(1, 4):
        limits.on_step_end(step, grown(1000 * step))
    assert reasons == []
