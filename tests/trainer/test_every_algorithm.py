"""Every estimator, loss and correction of agentrl-algorithms in a whole run."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import ConfigError, RolloutError
from agentrl_core.config import load_config
from agentrl_core.plugins.official import OFFICIAL
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.trainer import Trainer

Fit = Callable[..., RunDir]
SEES = """
import json
from agentrl_core.api import hookimpl

class Sees:
    def __init__(self, config, context):
        self.file = context.run_dir / "old.json"

    @hookimpl
    def on_batch_ready(self, batch):
        self.file.write_text(json.dumps(batch.batch["old_log_probs"][batch.batch["response_mask"].bool()].tolist()))
"""
SLOTS = {"advantage_estimator": "advantage", "policy_loss": "loss", "rollout_correction": "correction"}
NAMES = [(SLOTS[kind], name) for kind, name in OFFICIAL if kind in SLOTS]


@pytest.mark.parametrize(("slot", "name"), NAMES)
def test_a_run_with_it_updates_the_policy(fit: Fit, tiny_model: Path, slot: str, name: str) -> None:
    changes: dict[str, Any] = {"trainer.steps": 1, "actor.mini_batches": 2, f"algorithm.{slot}": {"name": name}}
    if name == "on_policy_distillation":
        changes["teacher.path"] = str(tiny_model)
    metrics = fit(changes).read_metrics()[-1]
    assert metrics["actor/grad_norm"] > 0 and math.isfinite(metrics["actor/pg_loss"])
    if slot == "correction":
        assert any(key.startswith("correction/") for key in metrics)


@pytest.mark.parametrize("estimator", ["grpo", "optimal_token_baseline"])
@pytest.mark.parametrize(("source", "passes"), [("rollout", True), ("actor", False)])
def test_old_log_probs_come_from_where_the_key_says(
    fit: Fit, tmp_path: Path, estimator: str, source: str, passes: bool
) -> None:
    """The scripted engine reports -0.5 for every token; the actor computes other values."""
    (tmp_path / "sees.py").write_text(SEES)
    run = fit({
        "trainer.steps": 1, "rollout.engine": {"name": "scripted", "config": {"turns": ["aB"], "log_prob": -0.5}},
        "algorithm.advantage": {"name": estimator}, "algorithm.old_log_probs": source, "hooks": ["./sees.py:Sees"],
    })  # fmt: skip
    values = json.loads((run.path / "old.json").read_text())
    assert values and all(value == -0.5 for value in values) is passes


def test_kl_in_the_reward_loads_a_reference_and_adapts(fit: Fit) -> None:
    run = fit({"trainer.steps": 2, "algorithm.kl_coef": 0.1, "algorithm.kl_placement": "reward",
               "algorithm.kl_target": 0.01})  # fmt: skip
    first, second = (line for line in run.read_metrics() if "reward/kl" in line)
    assert first["reward/kl_coef"] == 0.1 and second["reward/kl_coef"] != 0.1
    assert "actor/kl" not in second


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm.kl_target": 0.1}, r"algorithm.kl_target.* has no effect without algorithm.kl_placement=reward"),
        ({"algorithm.kl_placement": "reward"}, r"algorithm.kl_placement.* has no effect without algorithm.kl_coef > 0"),
        ({"algorithm.advantage": "on_policy_distillation"}, r"teacher.path.* needs a teacher: name its model"),
        (
            {"algorithm.correction": {"name": "token_tis"}, "algorithm.old_log_probs": "rollout"},
            r"algorithm.correction.* algorithm.old_log_probs=rollout leaves no difference to correct",
        ),
    ],
)
def test_keys_that_do_not_fit_together(tiny_run: Callable[..., Path], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(tiny_run(changes))


def test_a_teacher_with_another_tokenizer_is_refused(
    tiny_run: Callable[..., Path], tiny_model: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(tiny_model, tmp_path / "teacher")
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(content))
    config = load_config(tiny_run({"algorithm.advantage": "on_policy_distillation", "teacher.path": str(other)}))
    with pytest.raises(ConfigError, match="teacher.path: the tokenizer of .* differs from that of model.path"):
        Trainer(config)


def test_dynamic_sampling_stops_where_no_prompt_has_a_signal(fit: Fit, tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("def one(trajectory):\n    return 1.0\n")
    constant = {"reward.functions": [{"name": "./one.py:one", "isolation": "inline"}]}
    with pytest.raises(RolloutError, match="after 2 rounds of further prompts"):
        fit({"trainer.steps": 1, "rollout.resample_rounds": 2, **constant})
