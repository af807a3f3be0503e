"""The benchmark of a step on a GPU: that it runs to its end, here on the CPU, and that it says why it does not."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_step.py"


@pytest.fixture
def run(run_script: Callable[..., Any]) -> Callable[..., str]:
    def run(*arguments: str | Path) -> str:
        done = run_script("gpu_step.py", *arguments, CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    return run


@pytest.fixture(scope="module")
def gpu_step() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_step", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules["gpu_step"] = module
    spec.loader.exec_module(module)
    return module


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
