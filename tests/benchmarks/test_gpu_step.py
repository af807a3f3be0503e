"""The benchmark of a step on a GPU: that it runs to its end, here on the CPU, and that it says why it does not."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from agentrl_core.cli.main import app


@pytest.fixture
def run(run_script: Callable[..., Any]) -> Callable[..., str]:
    def run(*arguments: str | Path) -> str:
        done = run_script("gpu_step.py", *arguments, CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    return run


@pytest.fixture(scope="module")
def gpu_step(import_script: Callable[[str], ModuleType]) -> ModuleType:
    return import_script("gpu_step")


def test_without_a_gpu_it_says_so(run: Callable[..., str]) -> None:
    assert "skipped: torch sees no CUDA device here" in run()


def test_a_tiny_run_on_the_cpu_fills_table_and_page(run: Callable[..., str], tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    output = run("--device", "cpu", "--tiny", "--steps", "1", "--runtimes", "local", "--output", page)
    for name in ("time: rollout", "time: update_actor", "log-prob gap, mean", "update: model FLOP/s"):
        assert name in output and f"| {name} | " in page.read_text(encoding="utf-8")
    assert "not run" not in output.replace("time: log_probs", "")


def test_flops_are_six_per_weight_and_token_where_attention_and_head_are_small(gpu_step: ModuleType) -> None:
    model = {**gpu_step.FULL.model, "vocab_size": 1}
    layer = 1024 * (2 * 2048 + 2 * 1024) + 3 * 1024 * 3072
    assert gpu_step.update_flops(model, 1, 0, 1) == pytest.approx(6 * 28 * layer, rel=1e-3)
    short, long = (gpu_step.update_flops(gpu_step.FULL.model, 1, length, 0) for length in (1000, 2000))
    assert long / short == pytest.approx(2, rel=0.15) and long > 2 * short


@pytest.fixture(scope="module")
def gpu_plan(import_script: Callable[[str], ModuleType]) -> ModuleType:
    return import_script("_gpu_plan")


@pytest.fixture
def plan(gpu_plan: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[dict[str, str], str]]:
    """Predictions where `agentrl plan` ends like this."""

    def predicted(stdout: str = "", stderr: str = "", returncode: int = 0) -> tuple[dict[str, str], str]:
        done = SimpleNamespace(stdout=stdout, stderr=stderr, returncode=returncode)
        monkeypatch.setattr(gpu_plan.subprocess, "run", lambda *command, **options: done)
        return gpu_plan.predicted(Path("config.yaml"), ["model.dtype=bfloat16"])

    return predicted


PHASES = {
    "rollout": {"memory": {"KV cache": 7 << 30}, "seconds": 2.5},
    "log-probs": {"memory": {"weights": 2 << 30}, "seconds": 0.125},
    "update": {"memory": {"weights": 2 << 30, "moments": 4 << 30, "CUDA contexts": 1 << 30}, "seconds": 1.5},
}


@pytest.mark.parametrize("fits", [True, False])
def test_predictions_have_the_names_of_what_is_measured(plan: Any, gpu_step: ModuleType, fits: bool) -> None:
    answer = json.dumps({"fits": fits, "phases": PHASES, "step_seconds": 4.125})
    rows, reason = plan(stdout=answer, returncode=int(not fits))
    assert rows == {
        "time: rollout": "≥ 2.50 s", "time: log_probs": "≥ 0.12 s", "time: update_actor": "≥ 1.50 s",
        "time: sync_weights": "", "time: step": "≥ 4.12 s", "peak memory of the update": "6.00 GiB",
    }  # fmt: skip
    assert not reason
    assert rows.keys() <= {name for name, _ in gpu_step.figures([{"timing/step": 1.0}], {}, "cpu")}


def test_agentrl_plan_answers_for_the_configuration_that_is_measured(
    gpu_plan: ModuleType, import_script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In this process: on fake tensors of CUDA, which shows too that no phase of the step mixes devices."""

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        done = CliRunner().invoke(app, command[3:])
        return SimpleNamespace(stdout=done.stdout, stderr=done.stderr, returncode=done.exit_code)

    monkeypatch.setattr(gpu_plan.subprocess, "run", run)
    bench = import_script("_gpu_bench")
    rows, reason = gpu_plan.predicted(bench.write_run(tmp_path, bench.TINY, "cpu"), [])
    assert not reason
    assert {name for name, value in rows.items() if value} == {
        "time: rollout", "time: log_probs", "time: update_actor", "time: sync_weights", "time: step",
        "peak memory of the update",
    }  # fmt: skip


def test_why_there_is_no_prediction(plan: Any) -> None:
    frame = "Usage: agentrl COMMAND\n╭─ Error ───╮\n│ No such command 'plan'. │\n╰───╯\n"
    assert plan(stderr=frame, returncode=2) == ({}, "agentrl plan: No such command 'plan'.")
    assert plan(returncode=3) == ({}, "agentrl plan: exit status 3")


@pytest.mark.parametrize(
    ("name", "gib", "known"),
    [
        ("NVIDIA H100 80GB HBM3", 79, "h100-80g"),
        ("NVIDIA H100 PCIe", 79, "h100-pcie-80g"),
        ("NVIDIA A100-SXM4-40GB", 39, "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", 79, "a100-80g"),
        ("NVIDIA GeForce RTX 4090", 23, "rtx-4090-24g"),
        ("Tesla T4", 15, ""),
    ],
)
def test_gpus_have_names_for_the_plan(
    plan: Any, gpu_plan: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, gib: int, known: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(total_memory=gib << 30))
    assert gpu_plan.gpu_name() == known
    rows, reason = plan(stdout=json.dumps({"fits": True, "phases": PHASES, "step_seconds": 1.0}))
    assert bool(rows) == bool(known) and bool(reason) != bool(known)
