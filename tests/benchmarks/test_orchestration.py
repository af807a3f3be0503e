"""The benchmark of the rollout loop runs to its end and reports every figure; how large they are is not judged here."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "orchestration.py"


def test_a_tiny_run_reports_every_figure(tmp_path: Path) -> None:
    report = tmp_path / "figures.json"
    sizes = ["--trajectories", "4", "--samples", "2", "--concurrent", "4", "--delay", "1", "--repetitions", "1"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *sizes, "--vocabulary", "600", "--json", str(report)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(report.read_text(encoding="utf-8"))["figures"]
    reported = {(figure["case"].split(",")[0], figure["name"]) for figure in figures}
    for case in ("4 prompts × 1", "2 prompts × 2"):
        assert {(case, "CPU per trajectory"), (case, "ratio"), (case, "event-loop lag, p99")} <= reported
    judged = [figure for figure in figures if figure["goal"] is not None]
    assert judged and all(figure["verdict"] in ("pass", "miss") for figure in judged)
    assert all(figure["value"] >= 0 for figure in figures if "lag" not in figure["name"])
