"""Real runs that train an adapter: sampled, checkpointed, resumed, exported."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from agentrl_core.cli.main import app
from agentrl_core.runs.records import read_rollouts
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.workers.reference import TeacherWorker

ADAPTER = {"model.adapter.rank": 4, "actor.optimizer.lr": 0.01, "rollout.max_logprob_gap": 1e-3}
Fit = Callable[..., RunDir]


def adapter_of(run: RunDir, step: int) -> Path:
    return run.path / "checkpoints" / f"step-{step:06d}" / "actor"


def test_a_resumed_run_ends_with_the_same_adapter(fit: Fit) -> None:
    changes = {
        **ADAPTER, "rollout.deterministic": True, "algorithm.kl_coef": 0.01, "trainer.checkpoint.interval": 2,
        "trainer.steps": 4,
    }  # fmt: skip
    through = fit({**changes, "trainer.name": "through"})
    fit({**changes, "trainer.steps": 2, "trainer.name": "resumed"})
    resumed = fit({**changes, "trainer.resume": "auto", "trainer.name": "resumed"})
    first, second = (load_file(adapter_of(run, 4) / "adapter_model.safetensors") for run in (through, resumed))
    assert first.keys() == second.keys() and all(bool((first[name] == second[name]).all()) for name in first)
    assert any(bool(tensor.any()) for name, tensor in first.items() if ".lora_B." in name)


def test_an_adapter_is_evaluated_and_exported(fit: Fit, tiny_run: Any) -> None:
    folder = tiny_run.folder
    shutil.copytree(tiny_run.model, folder / "own")
    changes = {"model.path": "own", "trainer.steps": 1, "data.validation_files": ["validation.jsonl"]}
    run = fit({**ADAPTER, **changes})
    for name, arguments in (("adapter", ()), ("merged", ("--merge",))):
        command = ["export", str(run.path / "checkpoints" / "step-000001"), str(folder / name), *arguments]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
    base = AutoModelForCausalLM.from_pretrained(tiny_run.model)
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged").state_dict()
    whole = PeftModel.from_pretrained(base, str(folder / "adapter")).merge_and_unload().state_dict()
    assert max(float((whole[name] - merged[name]).abs().max()) for name in whole) < 1e-6
    command = ["eval", str(folder / "config.yaml"), "--checkpoint", str(run.path / "checkpoints" / "step-000001")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    (folder / "own").rename(folder / "moved")
    command = ["export", str(run.path / "checkpoints" / "step-000001"), str(folder / "again"), "--merge"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1 and "own; name the directory of the model" in " ".join(result.output.split())
    result = CliRunner().invoke(app, [*command[:-1], "--base", str(folder / "moved")])
    assert result.exit_code == 1 and "--base: names the model for --merge" in result.output
    result = CliRunner().invoke(app, [*command, "--base", str(folder / "moved")])
    assert result.exit_code == 0 and (folder / "again" / "model.safetensors").is_file(), result.output
    # Nobody can see that another model of the same shape is not the one that was trained.
    assert re.search(r"merged into .*moved; the run trained this adapter on .*own", " ".join(result.output.split()))


@pytest.mark.slow
@pytest.mark.ray
def test_a_trajectory_ends_with_the_version_with_which_it_began(fit: Fit) -> None:
    run = fit({
        **ADAPTER, "cluster.runtime": "ray", "rollout.engine.placement": "standalone", "rollout.max_staleness": 2,
        "rollout.on_new_weights": "finish", "algorithm.loss.name": "dppo", "trainer.steps": 5,
        "algorithm.kl_coef": 0.01, "trainer.profile.steps": [2],
    })  # fmt: skip
    seen = set()
    for step in range(1, 6):
        for record in read_rollouts(run.rollout_file(step, "train")):
            versions = {version for version in record.policy_versions if version >= 0}
            assert len(versions) == 1 and step - 1 - min(versions) <= 2
            seen |= versions
    assert len(seen) > 1
    gaps = [row["rollout/logprob_gap_max"] for row in run.read_metrics() if "rollout/logprob_gap_max" in row]
    assert gaps and max(gaps) < 1e-3
    # The actor is the reference too, and has one profile.
    assert (run.path / "profiles/step-000002/actor-rank-0.json.gz").is_file()


def test_a_teacher_of_the_same_model_is_the_actor_without_its_adapter(
    fit: Fit, tiny_run: Any, monkeypatch: Any
) -> None:
    started: list[str] = []
    ready = TeacherWorker._ready
    monkeypatch.setattr(TeacherWorker, "_ready", lambda self: started.append("teacher") or ready(self))
    shutil.copytree(tiny_run.model, tiny_run.folder / "copy")
    found = []
    for name, path in (("same", str(tiny_run.model)), ("copy", "copy")):
        changes = {"algorithm.advantage": "on_policy_distillation", "teacher.path": path, "trainer.steps": 3}
        run = fit({**ADAPTER, **changes, "rollout.deterministic": True, "trainer.name": name})
        found.append([row["actor/grad_norm"] for row in run.read_metrics() if row["step"]])
        assert started == ["teacher"] * (name == "copy")
    assert found[0] == pytest.approx(found[1], rel=1e-4) and len(found[0]) == 3 and found[0][-1] > 0
