"""`make gpu` without a GPU: what it says of parts that cannot run, and of those that fail."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def run(run_script: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: run_script("gpu.py", *arguments, CUDA_VISIBLE_DEVICES="")


def test_parts_that_cannot_run_say_why_and_the_page_names_the_device(run: Callable[..., Any], tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    here = ("--vllm-python", sys.executable, "--sglang-python", "nowhere", "--output", page)
    done = run("--parts", "sglang-sleep", "vllm-nccl", "vllm-ipc", *here)
    assert done.returncode == 0, done.stderr
    text = page.read_text(encoding="utf-8")
    assert "on CPU (" in text and "its figures mean nothing" in text
    for reason in ("no interpreter ", "needs 2 CUDA devices, found 0", "needs a CUDA device"):
        assert f"Not run: {reason}" in text


def test_a_part_that_is_cut_is_on_the_page_and_the_next_one_runs(run: Callable[..., Any], tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    done = run("--parts", "local", "vllm-ipc", "--limit", "0.1", "--output", page)
    assert done.returncode == 0, done.stderr
    text = page.read_text(encoding="utf-8")
    assert "**Failed** (exit status none within 0.1 s)" in text and "Not run: " in text


def test_an_unknown_part_is_named(run: Callable[..., Any]) -> None:
    done = run("--parts", "lokal")
    assert done.returncode == 2 and "--parts: lokal; allowed: tests, local, ray" in done.stderr
