"""The benchmark of start-up runs to its end and reports every figure; how large they are is not judged here."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "startup.py"


def test_a_short_run_reports_every_figure(tmp_path: Path) -> None:
    report = tmp_path / "figures.json"
    options = ["--distributions", "5", "--repetitions", "1", "--json", str(report)]
    done = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(report.read_text(encoding="utf-8"))["figures"]
    judged = {(figure["case"], figure["name"]) for figure in figures if figure["goal"] is not None}
    assert judged == {
        (command, name)
        for command in ("agentrl --help", "agentrl plugins list")
        for name in ("time, median", "share of importing torch")
    }
    assert all(figure["value"] > 0 for figure in figures)
