"""The benchmarks of the rollout loop run to their end and report every figure; their size is not judged here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def figures_of(run_script: Callable[..., Any], tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    def run(script: str, *options: str) -> list[dict[str, Any]]:
        report = tmp_path / "figures.json"
        done = run_script(script, *options, "--vocabulary", "600", "--json", report)
        assert done.returncode == 0, done.stderr
        figures: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["figures"]
        return figures

    return run


def test_all_trajectories_are_in_flight_together_and_end(figures_of: Callable[..., list[dict[str, Any]]]) -> None:
    figures = figures_of("in_flight.py", "--sizes", "64")
    assert {figure["case"] for figure in figures} == {"64 trajectories"}
    assert all(figure["verdict"] == "pass" for figure in figures if figure["goal"] is not None)


def test_a_tiny_run_reports_every_figure(figures_of: Callable[..., list[dict[str, Any]]]) -> None:
    sizes = ["--trajectories", "4", "--samples", "2", "--concurrent", "4", "--delay", "1", "--repetitions", "1"]
    figures = figures_of("orchestration.py", *sizes)
    reported = {(figure["case"].split(",")[0], figure["name"]) for figure in figures}
    for case in ("4 prompts × 1", "2 prompts × 2"):
        assert {(case, "CPU per trajectory"), (case, "ratio"), (case, "event-loop lag, p99")} <= reported
    judged = [figure for figure in figures if figure["goal"] is not None]
    assert judged and all(figure["verdict"] in ("pass", "miss") for figure in judged)
    assert all(figure["value"] >= 0 for figure in figures if "lag" not in figure["name"])
