"""``agentrl engines``."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from agentrl_core.cli.main import app
from agentrl_core.plugins.resolution import resolve
from agentrl_core.serving import replica_changes
from agentrl_testing.tiny_vision import save_tiny_vision_model
from tests.conftest import tiny_model, tiny_run

__all__ = ["tiny_model", "tiny_run"]
from agentrl_engines.environment import setup_commands


def agentrl(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "300"})


def test_setup_shows_its_commands() -> None:
    options = ("--path", "/env", "--with", "sglang==0.5.23", "--find-links", "d")
    result = agentrl("engines", "setup", "sglang", "--dry-run", *options)
    assert result.exit_code == 0, result.output
    make, install = result.output.splitlines()
    assert make.endswith("/env")
    assert "environment.txt --find-links=d " in install
    assert install.endswith("'sglang>=0.5.21' sglang==0.5.23")


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_setup_installs_the_version_that_was_tested(name: str) -> None:
    plugin = resolve("engine", name)
    _, install = setup_commands(plugin, Path("/env"))
    pins = Path(install[install.index("--constraint") + 1]).read_text().splitlines()
    tested = (Path(f"plugins/engines/agentrl-engine-{name}") / "cpu-requirements.txt").read_text()
    pinned = [line for line in pins if re.match(rf"{name}(-cpu)?==", line)]
    assert pinned and any(line in tested.splitlines() for line in pinned)


def test_setup_of_an_unknown_engine() -> None:
    result = agentrl("engines", "setup", "sglangg")
    assert result.exit_code == 2
    assert "did you mean 'sglang'?" in result.output


def test_bench_measures_the_engine_of_the_file(tiny_run: Any) -> None:
    result = agentrl("engines", "bench", tiny_run(), "--requests", 3, "--concurrency", 2, "--json")
    assert result.exit_code == 0, result.output
    (name, figures), *others = json.loads(result.stdout).items()
    assert (name, others) == ("hf", [])
    assert 3 <= figures["tokens"] <= 3 * 8
    assert 0 < figures["start_seconds"] < 60
    assert figures["tokens_per_second"] == figures["tokens"] / figures["seconds"]
    assert figures["gap_max"] < 1e-4
    assert figures["memory_bytes"] > 100 << 20


def test_bench_takes_the_texts_of_rows_with_images(tiny_run: Any, tmp_path: Path) -> None:
    rows = [{**row, "prompt": "<image>what?", "images": ["red.png"]} for row in tiny_run.rows(4)]
    Image.new("RGB", (28, 28), "red").save(tiny_run.folder / "red.png")
    model = save_tiny_vision_model(tmp_path / "vision")
    result = agentrl("engines", "bench", tiny_run({"model.path": model}, rows), "--requests", 2, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["hf"]["gap_max"] < 1e-3


def test_bench_goes_on_after_an_engine_that_fails(tiny_run: Any) -> None:
    path = tiny_run()
    result = agentrl("engines", "bench", path, "--engine", "sglang=/no/python", "--engine", "hf", "--requests", 1)
    assert result.exit_code == 1
    assert "no such file: /no/python" in result.output
    assert [line.split()[0] for line in result.output.splitlines() if line.strip()][:3] == [
        "ENGINE", "sglang=/no/python", "hf",
    ]  # fmt: skip
    alone = agentrl("engines", "bench", path, "--engine", "sglang=/no/python")
    assert alone.exit_code == 2


def test_replicas_of_a_run_are_changed_and_its_answer_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        replica_changes, "change_replicas", lambda *change: asked.append(change) or f"answer {len(asked)}"
    )
    assert agentrl("engines", "add", tmp_path).stdout == "answer 1\n"
    assert agentrl("engines", "drain", tmp_path, 2).stdout == "answer 2\n"
    add, drain = replica_changes.ReplicaChange("add"), replica_changes.ReplicaChange("drain", 2)
    assert asked == [(tmp_path, add), (tmp_path, drain)]


def test_a_directory_without_a_run_has_no_replicas(tmp_path: Path) -> None:
    result = agentrl("engines", "drain", tmp_path, 0)
    assert result.exit_code == 1 and "holds no run. Give the directory of a run" in result.output


def test_setup_of_a_training_backend_installs_every_plugin() -> None:
    result = agentrl("backends", "setup", "megatron", "--dry-run", "--path", "/env", "--find-links", "d")
    assert result.exit_code == 0, result.output
    make, install, plugins = result.output.splitlines()
    assert make.endswith("/env")
    assert "[train]" in install and "environment.txt --find-links=d " in install
    assert install.endswith("'megatron-core>=0.16,<0.17'")
    assert "--no-deps --find-links=d " in plugins and "agentrl-algorithms" in plugins and "agentrl-core" not in plugins


def test_setup_of_a_training_backend_that_needs_no_environment() -> None:
    result = agentrl("backends", "setup", "fsdp2")
    assert result.exit_code == 2
    assert "training backend 'fsdp2' runs in the trainer's own environment" in result.output
