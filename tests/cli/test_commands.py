"""``train``, ``eval``, ``export``, ``doctor`` and ``rollouts show`` on a tiny run."""

import errno
import hashlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from agentrl_core.api import RolloutError
from agentrl_core.cli.doctor import TESTED
from agentrl_core.cli.main import app
from agentrl_core.runs.records import read_rollouts
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.trainer import Trainer
from agentrl_testing.tiny_model import tiny_tokenizer

Fit = Callable[..., RunDir]
ROOT = Path(__file__).parents[2]
SCRIPTED = {"rollout.engine": {"name": "scripted"}}
VALIDATED = {"data.validation_files": ["validation.jsonl"]}


def agentrl(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "300"})


@pytest.fixture(autouse=True)
def wide_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich._console", None)


# train


def test_dry_run_prints_plugins_and_arithmetic_and_starts_nothing(tiny_run: Any) -> None:
    path = tiny_run({**VALIDATED, "data.batch_size": 3, "rollout.n": 4, "trainer.steps": 5})
    result = agentrl("train", path, "--dry-run")
    assert result.exit_code == 0, result.output
    for words in (
        "agent_loop  single_turn  agentrl-loop-single-turn",
        "engine  hf  agentrl-engine-hf",
        "reward_function  lower  file",
        "6 training prompts, 3 for validation; longest 24 of 64 tokens",
        "3 prompts x 4 samples = 12 trajectories, each of up to 8 response tokens",
        "5 steps = 2.50 epochs",
        "3 prompts x 2 = 6 trajectories each time",
        "engines 1 x hf, in this process",
        "memory fits: 0.1 GiB in the phase 'update', of",
        "append-only: every turn's prompt starts with the exact tokens of the turn before",
        "The configuration is valid. Nothing was started.",
    ):
        assert " ".join(words.split()) in " ".join(result.output.split())
    assert not (tiny_run.folder / "runs").exists()
    fewer = agentrl("train", path, "--dry-run", "trainer.validation.max_prompts=2").output
    assert "6 training prompts, 2 for validation" in fewer
    found = json.loads(agentrl("train", path, "--dry-run", "--json").stdout)
    assert ("engine", "hf") in [(each["kind"], each["name"]) for each in found["plugins"]]
    numbers = ("training_prompts", "validation_prompts", "longest_prompt", "trajectories_per_step", "steps", "epochs")
    assert [found[name] for name in numbers] == [6, 3, 24, 12, 5, 2.5]
    assert found["prediction"]["fits"] is True and found["append_only"] is True
    without = ("train", path, "plugins.block=[agentrl-plan]", "--dry-run")
    assert "not predicted; pip install agentrl-plan tells whether the run fits" in agentrl(*without).output
    assert json.loads(agentrl(*without, "--json").stdout)["prediction"] is None
    assert "goes with --dry-run" in agentrl("train", path, "--json").output
    many = agentrl("train", path, "--dry-run", "cluster={runtime: ray, nodes: 2, processes_per_node: 8}")
    shown = " ".join(many.output.split())
    assert "2 node(s) x 8 = 16, each with 1/16 of weights" in shown and "engines 16 x hf, colocated" in shown, shown
    (tiny_run.folder / "many.py").write_text(
        "class Many:\n    capabilities = {'logprobs', 'weight_update', 'parallel', 'multi_node'}\n"
    )
    engine = {"name": "./many.py:Many", "tensor_parallel": 2, "pipeline_parallel": 4, "nodes": 2}
    cluster = {"runtime": "ray", "nodes": 2, "processes_per_node": 8}
    large = agentrl("train", tiny_run({"rollout.engine": engine, "cluster": cluster}), "--dry-run")
    shape = "each with 8 devices on 2 hosts (tensor 2 x pipeline 4 x data 1 parallel), colocated"
    assert f"engines 2 x Many, {shape}" in " ".join(large.output.split()), large.output


def test_dry_run_refuses_an_engine_that_cannot_take_new_weights(tiny_run: Any) -> None:
    path = tiny_run({"rollout.engine": "./engines.py:Frozen"})
    (tiny_run.folder / "engines.py").write_text("class Frozen:\n    capabilities = {'logprobs'}\n")
    result = agentrl("train", str(path), "--dry-run")
    assert result.exit_code == 2
    (line,) = [line for line in result.stderr.splitlines() if "Frozen" in line]
    head, _, installed = line.partition("installed with it: ")
    assert head.strip() == (
        "- rollout.engine.name: inference engine 'Frozen' lacks the capability 'weight_update', which training needs;"
    )
    assert {"hf", "scripted"} <= set(installed.split(", "))
    assert not (tiny_run.folder / "runs").exists()


@pytest.mark.parametrize(
    ("capability", "changes", "feature"),
    [
        ("live_update", {"max_staleness": 1}, "rollout.max_staleness=1"),
        ("old_cache", {"on_new_weights": "continue"}, "rollout.on_new_weights=continue"),
        ("pause", {"on_new_weights": "restart"}, "rollout.on_new_weights=restart"),
    ],
)
def test_dry_run_refuses_an_engine_that_cannot_do_this_with_new_weights(
    tiny_run: Any, capability: str, changes: dict[str, Any], feature: str
) -> None:
    (tiny_run.folder / "engines.py").write_text(
        f"class Lacks:\n    capabilities = {{'logprobs', 'weight_update', 'live_update', 'old_cache', 'pause'}} - "
        f"{{{capability!r}}}\n"
    )
    config = {
        "cluster.runtime": "ray",
        "algorithm.loss.name": "dppo",
        "rollout.engine": {"name": "./engines.py:Lacks", "placement": "standalone"},
        **{f"rollout.{key}": value for key, value in changes.items()},
    }
    result = agentrl("train", str(tiny_run(config)), "--dry-run")
    assert result.exit_code == 2
    text = " ".join(result.stderr.split())
    assert f"'Lacks' lacks the capability '{capability}', which {feature} needs; installed with it:" in text
    assert {"hf", "vllm"} <= set(re.findall(r"[a-z]+", text.partition("installed with it: ")[2]))


def test_dry_run_says_how_far_a_run_samples_ahead(tiny_run: Any) -> None:
    changes = {
        "cluster.runtime": "ray", "algorithm.loss.name": "dppo", "rollout.engine.placement": "standalone",
        "rollout.max_staleness": 4,
    }  # fmt: skip
    result = agentrl("train", str(tiny_run(changes)), "--dry-run")
    assert result.exit_code == 0, result.output
    assert "overlap     samples 1 batch(es) ahead; tokens are at most 4 version(s) old\n" in result.output
    assert "overlap" not in agentrl("train", str(tiny_run()), "--dry-run").output


def test_train_says_what_to_do_next(tiny_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_run({**SCRIPTED, **VALIDATED})
    monkeypatch.chdir(tiny_run.folder)
    result = agentrl("train", path.name, "trainer.steps=1")
    assert result.exit_code == 0, result.output
    assert "runs/tiny holds metrics.jsonl, rollouts, checkpoints. Next:" in result.output
    assert "  agentrl rollouts show runs/tiny -n 3" in result.output
    assert "  agentrl eval config.yaml trainer.steps=1 --checkpoint runs/tiny/checkpoints/latest" in result.output
    assert "--resume" not in result.output


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"actor.optimiser.lr": 1.0}, 2, r"actor.optimiser.*did you mean 'optimizer'"),
        ({"data.batch_size": "many"}, 2, r"data.batch_size.*expected an integer >= 1, found 'many'"),
        ({"algorithm.advantage": "gropo"}, 2, r"algorithm.advantage.*'gropo'.*did you mean 'grpo'"),
        ({"model.path": "nowhere"}, 2, r"model.path.*no such directory: .*nowhere"),
        ({"rollout.n": 1}, 2, r"rollout.n.*group size 1 with advantage estimator 'grpo'"),
        ({"data.max_prompt_length": 3}, 2, r"no train prompt is left: 6 rows in .*train.jsonl, all longer"),
        ({"actor.mini_batches": 500}, 2, r"actor.mini_batches .*: found 500, but a step has 4 trajectories"),
        ({"trainer.resume": "nowhere"}, 1, r"nowhere is no checkpoint: it has no trainer.json"),
    ],
)
def test_errors_are_messages(tiny_run: Any, changes: dict[str, Any], code: int, message: str) -> None:
    result = agentrl("train", tiny_run({**SCRIPTED, **changes}))
    assert result.exit_code == code, result.output
    assert re.search(message, result.output), result.output
    assert "error: " in result.output and "Traceback" not in result.output


def test_all_errors_at_once(tiny_run: Any) -> None:
    result = agentrl("train", tiny_run({"rollout.nn": 1, "trainer.steps": 0, "trainer.sed": 1}))
    assert result.exit_code == 2
    for key in ("rollout.nn", "trainer.steps", "trainer.sed"):
        assert key in result.output


def test_a_run_that_fails_says_how_to_continue(tiny_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_run({**SCRIPTED, "trainer.steps": 2, "trainer.checkpoint.interval": 1})
    failing = Trainer.finish_step

    def fail_after_the_first(self: Trainer, step: int, *arguments: Any) -> None:
        failing(self, step, *arguments)
        raise RolloutError("the engine is ill")

    monkeypatch.setattr(Trainer, "finish_step", fail_after_the_first)
    result = agentrl("train", path, "rollout.n=3")
    assert result.exit_code == 1
    error = result.output[result.output.index("error: ") :]
    assert error.splitlines() == [
        "error: the engine is ill",
        f"To continue the run after the last checkpoint: agentrl train {path} rollout.n=3 --resume",
    ]


def test_a_resume_that_cannot_read_its_checkpoint_does_not_advise_itself(fit: Fit, tiny_run: Any) -> None:
    changes = {**SCRIPTED, "trainer.steps": 1, "trainer.checkpoint.interval": 1}
    run = fit(changes)
    run.write_state("stopped", 1, [])
    (run.checkpoints_dir / "latest" / "trainer.json").write_text("{")
    result = agentrl("train", tiny_run({**changes, "trainer.steps": 2}), "--resume")
    assert result.exit_code == 1
    assert "trainer.resume=intact" in result.output and "To continue" not in result.output


def test_failing_run_shows_the_root_traceback_and_no_other(tiny_run: Any) -> None:
    functions = [{"name": "./rewards.py:raises", "isolation": "inline"}]
    result = agentrl("train", tiny_run({**SCRIPTED, "reward.functions": functions}))
    assert result.exit_code == 1
    assert "the judge is ill" in result.output and "rewards.py" in result.output
    assert "trainer.py" not in result.output


# eval


def accuracies(output: str) -> dict[str, str]:
    return dict(re.findall(r"(validation/\S+)\s+([\d.]+)", output))


def test_eval_of_an_adapter_names_it_and_keeps_its_configuration(fit: Fit, tiny_run: Any, tmp_path: Path) -> None:
    adapted = {**VALIDATED, "model.adapter": {"rank": 2}, "trainer.steps": 1}
    actor = fit(adapted).checkpoints_dir / "step-000001" / "actor"
    checkpoint, output = actor.parent, tmp_path / "evaluated"
    done = agentrl("eval", tiny_run(adapted), "--checkpoint", checkpoint, "--output", output, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["model"] == str(actor)
    assert yaml.safe_load((output / "config.yaml").read_text())["model"]["adapter"]["path"] == str(actor)


def test_eval_uses_the_checkpoint(fit: Fit, tiny_run: Any) -> None:
    sampled = {**VALIDATED, "trainer.validation": {"greedy": False, "n": 2}, "rollout.deterministic": True}
    run = fit({**sampled, "actor.optimizer.lr": 0.1})
    config = tiny_run(sampled)
    name = "validation/tiny/score_mean_sampled"
    rows = run.read_metrics()
    assert rows[0][name] != pytest.approx(rows[-1][name])
    before = agentrl("eval", config)
    after = agentrl("eval", config, "--checkpoint", run.checkpoints_dir / "latest")
    assert before.exit_code == after.exit_code == 0, before.output + after.output
    assert accuracies(before.output)[name] == f"{rows[0][name]:.3f}"
    assert accuracies(after.output)[name] == f"{rows[-1][name]:.3f}"
    assert accuracies(after.output).keys() == {
        name,
        "validation/tiny/accuracy_sampled",
        "validation/tiny/reward/lower_sampled",
        *(f"validation/tiny/{each}_at_2{end}" for each in ("pass", "maj", "best") for end in ("", "_stderr")),
    }


def test_eval_without_validation_data(tiny_run: Any) -> None:
    result = agentrl("eval", tiny_run(SCRIPTED))
    assert result.exit_code == 2
    assert "data.validation_files: expected at least one file to evaluate on, found none" in result.output


def test_eval_of_what_is_no_checkpoint(tiny_run: Any) -> None:
    result = agentrl("eval", tiny_run({**SCRIPTED, **VALIDATED}), "--checkpoint", tiny_run.folder)
    assert result.exit_code == 1
    assert "is no checkpoint: it has no trainer.json" in result.output


# export


def test_export_loads_in_transformers_and_equals_the_checkpoint(fit: Fit, tiny_run: Any) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = fit({"actor.optimizer.lr": 0.1})
    out = tiny_run.folder / "out"
    result = agentrl("export", run.checkpoints_dir / "latest", out)
    assert result.exit_code == 0, result.output
    model = AutoModelForCausalLM.from_pretrained(out)
    saved = load_file(run.checkpoints_dir / "latest" / "actor" / "model.safetensors")
    start = load_file(tiny_run.model / "model.safetensors")
    weights = model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in saved.items())
    assert any(not torch.equal(start[name], tensor) for name, tensor in saved.items())
    messages = [{"role": "user", "content": "hello"}]
    tokenizer = AutoTokenizer.from_pretrained(out)
    expected = tiny_tokenizer().apply_chat_template(messages, tokenize=False)
    assert tokenizer.apply_chat_template(messages, tokenize=False) == expected
    assert not (out / "training").exists()

    again = agentrl("export", run.path, out)
    assert again.exit_code == 1 and "is not an empty directory. Choose a new one" in again.output
    file = agentrl("export", run.path, out / "config.json")
    assert file.exit_code == 1 and "is not an empty directory. Choose a new one" in file.output
    wrong = agentrl("export", tiny_run.folder, tiny_run.folder / "other")
    assert wrong.exit_code == 1 and "is no checkpoint" in wrong.output


def test_export_onto_a_full_disk_leaves_nothing(fit: Fit, tiny_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fit({**SCRIPTED, "trainer.steps": 1})
    out, copytree = tiny_run.folder / "out", shutil.copytree

    def full(source: Path, folder: Path, **options: Any) -> None:
        copytree(source, folder, **options)
        raise shutil.Error([("a", "b", "[Errno 28] No space left on device"), ("c", "d", "[Errno 28]")])

    killed = out / ".exporting"
    killed.mkdir(parents=True)
    (killed / "config.json").write_text("{")
    monkeypatch.setattr(shutil, "copytree", full)
    result = agentrl("export", run.path, out)
    assert result.exit_code == 1 and "No space left on device" in result.output and "Traceback" not in result.output
    assert not any(out.iterdir()) and not killed.exists()
    monkeypatch.setattr(shutil, "copytree", copytree)
    assert agentrl("export", run.path, out).exit_code == 0
    assert (out / "config.json").exists() and not killed.exists()
    monkeypatch.chdir(out)
    for file in out.iterdir():
        file.unlink()
    assert agentrl("export", run.path, ".").exit_code == 0 and Path("config.json").exists()
    inside = run.checkpoints_dir / "latest" / "actor" / "out"
    assert agentrl("export", run.path, inside).exit_code == 0
    assert {file.name for file in inside.iterdir()} == {file.name for file in out.iterdir()}


# rollouts show


def test_rollouts_of_a_run(fit: Fit) -> None:
    run = fit({"rollout.engine": {"name": "scripted", "config": {"turns": ["yes"]}}, **VALIDATED})
    result = agentrl("rollouts", "show", run.path, "--step", 1, "-n", 2, "--no-color")
    assert result.exit_code == 0, result.output
    assert result.output.count("step 1 · train · sample") == 2
    assert "⟦yes<|im_end|>⟧" in result.output and "reward  1" in result.output
    validation = agentrl("rollouts", "show", run.path, "--validation", "--no-color")
    assert "step 2 · validation" in validation.output


# doctor


def test_doctor() -> None:
    result = agentrl("doctor")
    assert result.exit_code == 0, result.output
    for package, version in TESTED.items():
        assert re.search(rf"{package} .*{re.escape(version)}", result.output), result.output
    assert "GPU:" in result.output


def test_doctor_knows_the_tested_versions() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert TESTED == {package: tested[package] for package in TESTED}


def test_doctor_of_a_model(tiny_model: Path) -> None:
    result = agentrl("doctor", "--model", tiny_model)
    assert result.exit_code == 0, result.output
    for line in (
        r"system message +yes",
        r"tool schemas +yes",
        r"tool role +yes",
        r"tool parser +hermes",
        r"append-only +yes",
        r"weights 0.1 MiB",
    ):
        assert re.search(line, result.output), result.output


def test_doctor_of_a_model_as_json(tiny_model: Path) -> None:
    found = json.loads(agentrl("doctor", "--model", tiny_model, "--json").stdout)
    assert {each["package"] for each in found["packages"]} >= {"python", "torch"}
    model = found["model"]
    assert model["tool_parsers"][0] == "hermes" and model["append_only"] and model["memory_bytes"]["weights"] > 0


def test_doctor_of_a_config_asks_its_renderer(tiny_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tiny_run.folder / "loud.py").write_text(
        "from agentrl_core.data.chat_template import ChatTemplateRenderer\n\n"
        "class Loud(ChatTemplateRenderer):\n"
        "    def render(self, messages, tools=(), *, generation_prompt=False):\n"
        "        found = super().render(messages, tools, generation_prompt=generation_prompt)\n"
        "        return found._replace(text=f'{len(messages)} {found.text}')\n"
    )
    path = tiny_run({"rollout.renderer": "./loud.py:Loud"})
    found = json.loads(agentrl("doctor", "--config", path, "--json").stdout)["model"]
    assert (found["renderer"], found["append_only"], found["reads_text"]) == ("Loud", False, False)
    assert "not needed: the renderer reads the calls" in agentrl("doctor", "--config", path).output
    assert "leave out one of the two" in agentrl("doctor", "--config", path, "--model", "m").output


def test_doctor_of_what_is_no_model(tmp_path: Path) -> None:
    result = agentrl("doctor", "--model", tmp_path)
    assert result.exit_code == 2
    assert "expected a directory with config.json, weights and tokenizer" in result.output


def test_doctor_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The brackets of the extra are no markup."""
    monkeypatch.setitem(TESTED, "agentrl-no-such-package", "1.0")
    result = agentrl("doctor")
    assert "pip install 'agentrl-core[train]'" in " ".join(result.output.split())


def test_eval_keeps_metrics_and_trajectories_and_prints_json(tiny_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_run({**SCRIPTED, **VALIDATED})
    monkeypatch.chdir(tiny_run.folder)
    for number in ("1", "2"):
        result = agentrl("eval", path, "--json")
        assert result.exit_code == 0, result.output
        shown = json.loads(result.stdout)
        kept = RunDir(Path(shown["directory"]))
        assert kept.path == tiny_run.folder / "runs" / "tiny.eval" / number
        assert kept.read_metrics() == [{"step": 0, **shown["metrics"]}]
        assert len(list(read_rollouts(kept.rollout_file(0, "validation")))) == 2 * 3
    assert agentrl("rollouts", "show", shown["directory"], "--validation").exit_code == 0
    again = agentrl("eval", path, "--output", shown["directory"])
    assert again.exit_code == 2 and "is not empty. Choose a new directory" in again.output


def test_resuming_a_complete_run_has_nothing_to_do(tiny_run: Any) -> None:
    config = tiny_run({**SCRIPTED, "trainer.steps": 1})
    assert agentrl("train", config).exit_code == 0
    run = RunDir(tiny_run.folder / "runs" / "tiny")
    before = {file: file.read_bytes() for file in run.path.rglob("*") if file.is_file()}
    again = agentrl("train", config, "--resume")
    assert again.exit_code == 0 and "is complete: all 1 steps ran" in again.output, again.output
    assert {file: file.read_bytes() for file in run.path.rglob("*") if file.is_file()} == before


def test_the_summary_names_the_best_checkpoint(tiny_run: Any) -> None:
    best = {"interval": 1, "best_metric": "validation/tiny/accuracy_greedy"}
    result = agentrl("train", tiny_run({**SCRIPTED, **VALIDATED, "trainer.steps": 1, "trainer.checkpoint": best}))
    assert "tiny/checkpoints/best out/" in result.output, result.output
    assert "--checkpoint" in result.output and "checkpoints/latest" not in result.output


def test_a_resume_reads_the_weights_once(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    fit({**SCRIPTED, "trainer.steps": 1})
    read: list[str] = []
    digest = hashlib.file_digest
    monkeypatch.setattr("hashlib.file_digest", lambda file, name: read.append(file.name) or digest(file, name))
    fit({**SCRIPTED, "trainer.steps": 2, "trainer.resume": "auto", "trainer.checkpoint": {"interval": 10}})
    assert sum(name.endswith("step-000001/actor/model.safetensors") for name in read) == 1


@pytest.mark.parametrize("case", ["shard", "pickle", "architecture", "template"])
def test_a_model_that_cannot_be_loaded_fails_the_dry_run(tiny_run: Any, case: str) -> None:
    folder = shutil.copytree(tiny_run.model, tiny_run.folder / "model")
    weights = folder / "model.safetensors"
    changes: dict[str, Any] = {"model.path": str(folder)}
    if case == "shard":
        index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        message = "model-00002-of-00002.safetensors, which model.safetensors.index.json names, is missing"
    elif case == "pickle":
        weights.unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(print))
        message = "pytorch_model.bin cannot be read, copy it again"
    elif case == "architecture":
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**content, "hidden_size": -1}))
        message = "transformers cannot build a model from"
    else:
        template = tiny_run.folder / "huge.jinja"
        template.write_text("{%- generation -%}{{ 'x' * 10**10 }}{%- endgeneration -%}")
        changes["model.chat_template"] = str(template)
        message = "the chat template multiplies by more than 1,000,000 in line 1"
    result = agentrl("train", tiny_run({**SCRIPTED, **changes}), "--dry-run")
    assert result.exit_code == 2 and message in result.output, result.output


def test_pickled_weights_that_hold_tensors_only_are_a_model(tiny_run: Any) -> None:
    import torch
    from safetensors.torch import load_file

    folder = shutil.copytree(tiny_run.model, tiny_run.folder / "model")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    result = agentrl("train", tiny_run({**SCRIPTED, "model.path": str(folder)}), "--dry-run")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "a"}', '{"prompt": '], "train.jsonl, line 2: not valid JSON"),
        (['{"prompt": "a"}', "[1]"], "train.jsonl, line 2: expected an object with a prompt"),
    ],
)
def test_a_bad_row_is_named_with_its_file_and_line(tiny_run: Any, lines: list[str], message: str) -> None:
    config = tiny_run(SCRIPTED)
    (tiny_run.folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    result = agentrl("train", config, "--dry-run")
    assert result.exit_code == 2 and message in result.output, result.output


def test_a_tool_of_a_file_is_named_by_its_file(tiny_run: Any) -> None:
    (tiny_run.folder / "tools.py").write_text(
        'def look(text):\n    """Looks.\n\n    Args:\n        text: any.\n    """\n'
    )
    tools = {"tools": [{"name": "./tools.py:look"}], "rollout.agent": {"loops": [{"name": "tool_agent"}]}}
    result = agentrl("train", tiny_run({**SCRIPTED, **tools, "rollout.tool_parser": "hermes"}), "--dry-run")
    assert "parameter text needs a type annotation" in result.output, result.output
    assert f"{tiny_run.folder / 'tools.py'}: building tool" in result.output
    assert not re.search(r"\b[0-9a-f]{40,}\b", result.output)


def test_the_interpreter_of_a_named_engine_is_named_by_its_key(tiny_run: Any) -> None:
    named = {"engines": {"judge": {"name": "scripted", "model": str(tiny_run.model), "python": "nowhere/bin/python"}}}
    result = agentrl("train", tiny_run({**SCRIPTED, **named}), "--dry-run")
    assert "engines.judge.python" in result.output and "rollout.engine.python" not in result.output, result.output


def test_a_directory_whose_name_is_no_text(tiny_run: Any) -> None:
    folder = os.fsdecode(os.fsencode(tiny_run.folder) + b"/\xff")
    run = [sys.executable, "-m", "agentrl_core.cli.main"]
    for command in (["train", tiny_run(SCRIPTED), f"trainer.output_dir={folder}"], ["export", folder, folder]):
        done = subprocess.run([*run, *map(str, command)], capture_output=True, text=True, errors="replace", check=False)
        assert done.returncode in (1, 2) and "Traceback" not in done.stderr, done.stderr
        assert "\\udcff" in done.stderr, done.stderr


def test_export_below_a_file(fit: Fit, tiny_run: Any) -> None:
    run = fit({**SCRIPTED, "trainer.steps": 1})
    (tiny_run.folder / "file").write_text("")
    result = agentrl("export", run.path, tiny_run.folder / "file" / "out")
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert "Not a directory" in result.output, result.output


# where the command line can be started, and what it says about the disk


def test_the_module_is_a_program_so_that_pdb_can_run_it() -> None:
    command = [sys.executable, "-m", "agentrl_core.cli.main", "--version"]
    assert subprocess.run(command, capture_output=True, text=True).stdout.startswith("agentrl ")


@pytest.mark.parametrize("arguments", [["-h"], ["train", "-h"], ["rollouts", "show", "-h"]])
def test_h_is_help(arguments: list[str]) -> None:
    result = agentrl(*arguments)
    assert result.exit_code == 0 and "Usage:" in result.output


def test_a_directory_that_cannot_be_written_is_named(tiny_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.mkdir

    def mkdir(path: Path, *arguments: Any, **options: Any) -> None:
        if "runs" in path.parts:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        real(path, *arguments, **options)

    path = tiny_run(SCRIPTED)
    monkeypatch.setattr(Path, "mkdir", mkdir)
    result = agentrl("train", path)
    assert result.exit_code == 2
    assert "runs/tiny cannot be written: read-only file system. Choose another trainer.output_dir" in result.output


def test_a_full_disk_is_one_line(tiny_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tiny_run(SCRIPTED)
    monkeypatch.setattr("agentrl_core.runs.atomic.os.fsync", fsync)
    result = agentrl("train", path)
    assert result.exit_code == 1 and "Traceback" not in result.output
    assert "config.yaml: no space left on device. Make room; `agentrl train … --resume`" in result.output
    assert not list(tiny_run.folder.rglob(".*.tmp"))
