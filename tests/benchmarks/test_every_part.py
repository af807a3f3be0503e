"""Benchmarks with few and small cases: every part runs to its end and reports its figures, whose size is not judged.

The parts that need vLLM and SGLang are in ``tests_real/test_benchmarks.py``.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = {
    "engines.py": ["--requests", "4", "--repetitions", "1"],
    "packing.py": ["--samples", "1", "--repetitions", "1"],
    "prompts.py": ["--rows", "20", "--repetitions", "1", "--vocabulary", "600"],
    "prompts.py, streamed": ["--rows", "20", "--repetitions", "1", "--vocabulary", "600", "--streaming"],
    "sandbox.py": ["--calls", "4", "--at-once", "2"],
    "weights.py": ["--mib", "1", "--repetitions", "1"],
}
CASES = {
    "engines.py": {
        "4 ragged requests", "1 conversations of 4 turns", "4 ragged requests, transformers",
    },
    "sandbox.py": {"a sandbox per call", "a sandbox per trajectory"},
}  # fmt: skip


RunScript = Callable[..., Any]


@pytest.mark.parametrize("name", SMALL)
def test_every_part_reports_its_figures(run_script: RunScript, tmp_path: Path, name: str) -> None:
    report = tmp_path / "figures.json"
    done = run_script(name.partition(",")[0], *SMALL[name], "--json", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(report.read_text(encoding="utf-8"))["figures"]
    found = {figure["case"] for figure in figures}
    for case in CASES.get(name, ()):
        assert any(each == case or each.startswith(f"{case}, ") for each in found), (case, found)
    assert figures and all(figure["value"] >= 0 for figure in figures)


TRL = """
from types import SimpleNamespace

GRPOConfig = SimpleNamespace

class GRPOTrainer:
    def __init__(self, model, reward_funcs, args, train_dataset, callbacks):
        self.steps, self.data, self.callbacks, self.reward = args.max_steps, train_dataset, callbacks, reward_funcs

    def train(self):
        for _ in range(self.steps):
            self.reward([[{"role": "assistant", "content": self.data[0]["prompt"][0]["content"]}]])
            for callback in self.callbacks:
                callback.on_log(None, None, None, {"completions/mean_length": 1.0})
"""


def test_steps_take_turns_with_those_of_a_peer(run_script: RunScript, tmp_path: Path) -> None:
    """TRL is not installed here: a module of its names stands for it."""
    (tmp_path / "trl.py").write_text(TRL)
    report = tmp_path / "figures.json"
    options = ["--trl-python", sys.executable, "--threads", "1", "--steps", "2", "--json", str(report)]
    done = run_script("vs_trl.py", *options, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    figures = {figure["name"] for figure in json.loads(report.read_text())["figures"]}
    assert any("TRL" in name for name in figures) and any(name.startswith("agentrl: ") for name in figures)


def test_the_tool_parsers_are_timed(run_script: RunScript) -> None:
    done = run_script("formats.py", "--characters", "2000", "--every", "40", "hermes")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("hermes")


def test_the_viewer_is_timed(run_script: RunScript) -> None:
    done = run_script("viewer.py", "--trajectories", "3200", "--browser", "/nowhere/chromium")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "page at 0, order" in done.stdout and "index of" in done.stdout


def test_figures_are_written_as_they_come(tmp_path: Path) -> None:
    """A part that fails takes none of the figures before it along."""
    code = (
        "import sys; from pathlib import Path; from _report import Figure, report\n"
        "def measure():\n"
        "    yield Figure('first', 'seconds', 1.0, 's')\n"
        "    raise RuntimeError('the second part fails')\n"
        "report('Parts', measure(), Path(sys.argv[1]))\n"
    )
    path = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=BENCHMARKS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "the second part fails" in done.stderr
    assert [figure["case"] for figure in json.loads(path.read_text())["figures"]] == ["first"]
    assert "first" in done.stdout
