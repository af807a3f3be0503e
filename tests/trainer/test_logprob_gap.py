"""The gap between the engine's log-probs and the actor's."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_core.api import EngineError
from agentrl_core.protocol import DataProto
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.trainer.logprob_gap import logprob_gap

Fit = Callable[..., RunDir]
STALE = """
from agentrl_core.api import WeightUpdate
from agentrl_engine_hf.config import HFEngineConfig
from agentrl_engine_hf.engine import HFEngine


class Stale(HFEngine):
    # Takes the first weights, and after that only their number.
    capabilities = frozenset({"logprobs", "weight_update", "sessions"})
    taken = False

    def __init__(self, config, context):
        super().__init__(HFEngineConfig(), context)

    async def update_weights(self, update, version):
        if not self.taken:
            self.taken = True
            await super().update_weights(update, version)
"""


def test_gaps_are_told_by_turn_and_only_over_sampled_tokens() -> None:
    # The second row is a branch, which goes on with the trajectory's second turn.
    turns = torch.tensor([[0, 0, -1, 1], [1, -1, -1, -1]])
    mask = turns >= 0
    engine = torch.tensor([[-1.0, -2.0, -99.0, -3.0], [-1.0, 0.0, 0.0, 0.0]])
    actor = torch.tensor([[-1.5, -2.0, 0.0, -1.0], [-1.25, 9.0, 9.0, 9.0]])
    batch = DataProto.from_dict(tensors={"response_mask": mask, "rollout_log_probs": engine, "turn_ids": turns})
    # |exp(engine) - exp(actor)| of the four tokens with mask 1.
    probabilities = np.abs(np.exp([-1.0, -2.0, -3.0, -1.0]) - np.exp([-1.5, -2.0, -1.0, -1.25]))
    assert logprob_gap(batch, actor) == pytest.approx({
        "rollout/probs_diff_mean": probabilities.mean(),
        "rollout/probs_diff_max": probabilities.max(),
        "rollout/probs_diff_std": probabilities.std(),
        "rollout/logprob_gap_mean": 2.75 / 4,
        "rollout/logprob_gap_max": 2.0,
        "rollout/logprob_gap/turn_1_mean": (0.5 + 0.0) / 2,
        "rollout/logprob_gap/turn_1_max": 0.5,
        "rollout/logprob_gap/turn_2_mean": (2.0 + 0.25) / 2,
        "rollout/logprob_gap/turn_2_max": 2.0,
    })  # fmt: skip
    assert logprob_gap(DataProto.from_dict(tensors={**batch.batch, "response_mask": mask & False}), actor) == {}


def test_rows_with_tokens_of_older_weights_are_left_out_of_the_gap_and_stay_trained() -> None:
    versions = torch.tensor([[3, 3, -1], [2, 3, 3], [3, -1, -1]])
    mask = versions >= 0
    engine, actor = torch.full((3, 3), -1.0), torch.tensor([[-1.5, -1.0, 9.0], [-7.0, -7.0, -7.0], [-1.25, 9.0, 9.0]])
    tensors = {"response_mask": mask.clone(), "rollout_log_probs": engine, "turn_ids": torch.where(mask, 0, -1)}
    batch = DataProto.from_dict(tensors={**tensors, "policy_versions": versions})
    gap = logprob_gap(batch, actor, version=3)
    assert (gap["rollout/logprob_gap_mean"], gap["rollout/logprob_gap_max"]) == pytest.approx((0.75 / 3, 0.5))
    assert torch.equal(batch.batch["response_mask"], mask)
    assert logprob_gap(batch, actor, version=4) == {}


def test_the_gap_is_told_before_the_first_step_and_in_every_step(fit: Fit, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="agentrl_core")
    run = fit({"rollout.max_logprob_gap": 1e-4, "rollout.engine.config": {}})
    assert "log-probs before the first step: engine and actor differ by" in caplog.text
    for metrics in run.read_metrics():
        assert metrics["rollout/logprob_gap/turn_1_mean"] <= metrics["rollout/logprob_gap/turn_1_max"] < 1e-4


def test_an_engine_with_stale_weights_stops_the_run(fit: Fit, tiny_run: Any) -> None:
    (tiny_run.folder / "stale.py").write_text(STALE)
    changes = {
        "rollout.engine": {"name": "./stale.py:Stale"},
        "rollout.max_logprob_gap": 1e-3,
        "actor.optimizer.lr": 0.01,
        "trainer.steps": 4,
    }
    known = "replica 0 answers exactly as before: the engine still serves the weights from before the update"
    with pytest.raises(EngineError, match=rf"(?s)after the first update: the engine's log-probs differ.*{known}"):
        fit(changes)


def test_an_engine_with_stale_weights_is_reported_once(
    fit: Fit, tiny_run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (tiny_run.folder / "stale.py").write_text(STALE)
    engine = {"rollout.engine": {"name": "./stale.py:Stale"}, "actor.optimizer.lr": 0.05, "trainer.steps": 5}
    gaps = [metrics["rollout/logprob_gap_mean"] for metrics in fit(engine).read_metrics()]
    first = next(step for step, gap in enumerate(gaps, 1) if gap > 0.01)
    assert first > 1 and all(gap > 0.01 for gap in gaps[first - 1 :]) and len(gaps) > first
    warnings = [each.getMessage() for each in caplog.records if "differ from the actor's" in each.getMessage()]
    assert len(warnings) == 1 and warnings[0].startswith("after the first update: ")
    assert "still serves the weights from before" in warnings[0] and "float32 explains up to 0.01" in warnings[0]


def test_a_gap_that_comes_back_is_reported_again(fit: Fit, tiny_run: Any, caplog: pytest.LogCaptureFixture) -> None:
    # Two answers of the probe and of the steps: the second step's are right.
    wrong = STALE.replace("    taken = False", "    wrong = {0, 1, 3, 4}").replace(
        "        if not self.taken:\n            self.taken = True\n", ""
    )
    wrong = wrong.replace("            await super().update_weights", "        await super().update_weights")
    wrong += """
    async def generate(self, prompt_ids, params, request_id, multi_modal=None):
        output = await super().generate(prompt_ids, params, request_id)
        step = 0 if request_id == "probe" else int(request_id.split("-")[1])
        if step in self.wrong:
            output.log_probs = [each - 1 for each in output.log_probs]
        return output
"""
    (tiny_run.folder / "stale.py").write_text(wrong)
    fit({"rollout.engine": {"name": "./stale.py:Stale"}, "trainer.steps": 4})
    warnings = [each.getMessage() for each in caplog.records if "differ from the actor's" in each.getMessage()]
    assert [text.partition(":")[0] for text in warnings] == ["before the first step", "step 3"]


def test_an_engine_that_is_wrong_from_the_start_stops_the_run_before_step_1(fit: Fit) -> None:
    with pytest.raises(EngineError, match="before the first step: the engine's log-probs differ"):
        fit({"rollout.engine": {"name": "scripted"}, "rollout.max_logprob_gap": 0.5})


def test_without_a_limit_a_large_gap_is_a_warning(fit: Fit, caplog: pytest.LogCaptureFixture) -> None:
    fit({"rollout.engine": {"name": "scripted"}, "trainer.steps": 1})
    assert "rollout.max_logprob_gap stops a run over this" in caplog.text
