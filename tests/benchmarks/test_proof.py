"""The proof of learning: what is done is not repeated, and the page says what each seed reached."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import proof

from agentrl_core.runs.run_dir import RunDir


def write_metrics(folder: Path, lines: Sequence[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_every_example_has_a_configuration_and_a_model_script() -> None:
    for name, each in proof.PROOFS.items():
        folder = proof.ROOT / "examples" / (each.example or name)
        config = "config.yaml" if each.config == proof.TRL else each.config
        assert (folder / config).is_file() and (folder / "prepare.py").is_file()


def test_a_curve_has_the_mean_of_the_first_steps_and_of_every_five(tmp_path: Path) -> None:
    games = [{"step": step, "reward/mean": 0.0, "reward/environment/found": step / 10} for step in range(1, 11)]
    curve = proof.found(write_metrics(tmp_path / "a", games))
    assert [step for step, _ in curve] == [0, 5, 10]
    assert [value for _, value in curve] == pytest.approx([0.2, 0.3, 0.8])


def test_validations_are_a_curve_as_they_are(tmp_path: Path) -> None:
    name = "validation/calculator/accuracy_greedy"
    lines = [{"step": 0, name: 0.25}, {"step": 1, "reward/mean": 0.5}, {"step": 2, name: 0.875}]
    assert proof.PROOFS["calculator"].curve(write_metrics(tmp_path / "b", lines)) == [(0, 0.25), (2, 0.875)]


def test_a_run_is_complete_with_its_last_step(tmp_path: Path) -> None:
    assert not proof.is_complete(tmp_path / "run", 3)
    assert not proof.is_complete(write_metrics(tmp_path / "run", [{"step": 2}]), 3)
    assert proof.is_complete(write_metrics(tmp_path / "run", [{"step": 2}, {"step": 3}]), 3)


def written(ends: dict[str, float], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of the page where runs end so; ``{"example-seed": value}``, two seeds each."""
    names = list(dict.fromkeys(run.rpartition("-")[0] for run in ends))
    monkeypatch.setattr(proof, "train", lambda name, seed, work: Path(f"{name}-{seed}"))
    for name in names:
        fake = replace(proof.PROOFS[name], curve=lambda run: [(0, 0.4), (5, 0.41), (10, ends[run.name])])
        monkeypatch.setitem(proof.PROOFS, name, fake)
    output = folder / "proof.md"
    monkeypatch.setattr("sys.argv", ["proof.py", *names, "--seeds", "2", "--output", str(output)])
    proof.main()
    return output.read_text().splitlines()


def test_a_goal_is_met_where_every_seed_meets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {"kuhn_poker-0": 0.05, "kuhn_poker-1": 0.09, "guess_number-0": 0.95, "guess_number-1": 0.5}
    lines = written(ends, tmp_path, monkeypatch)
    rows = [line for line in lines if line.startswith("| [")]
    assert len(rows) == 2
    assert "0: 0.950, 1: 0.500" in rows[0] and rows[0].endswith("| no, 1 of 2 |")
    assert "0: 0.050, 1: 0.090" in rows[1] and rows[1].endswith("| yes |")
    assert any(line.startswith("Not run here: calculator, kuhn_poker-two-policies, maze") for line in lines)
    (way,) = (line for line in lines if line.startswith("| guess_number |"))
    assert way.startswith("| guess_number | 10 | 0.4") and way.endswith("| 0.72 (0.50 to 0.95) |")
    assert not (tmp_path / "proof.png").exists(), "no example was trained in several ways"


def test_a_seed_below_trls_band_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {"reverse_text-0": 0.9, "reverse_text-1": 0.6, "reverse_text-trl-0": 0.7, "reverse_text-trl-1": 0.8}
    lines = written(ends, tmp_path, monkeypatch)
    (line,) = (line for line in lines if line.startswith("`reverse_text`: TRL"))
    assert "between 0.700 and 0.800" in line and line.endswith("above it: 1 of 2.")
    assert (tmp_path / "proof.png").is_file()


def test_an_unknown_example_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["proof.py", "chess"])
    with pytest.raises(SystemExit):
        proof.main()
    assert "there is no chess; choose from calculator, guess_number, kuhn_poker" in capsys.readouterr().err


def test_the_page_says_which_runs_warned_that_learning_had_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ends = {"kuhn_poker-0": 0.05, "kuhn_poker-1": 0.09}
    assert "Runs that warned that learning had stopped: none." in written(ends, tmp_path, monkeypatch)
    run = RunDir(tmp_path / "kuhn_poker-1")
    run.path.mkdir()
    about = {"first": 1, "last": 10, "steps": 10, "warned": True, "over": False, "message": "why"}
    run.write_state("completed", 10, [{"check": check, **about} for check in ("no_signal", "no_entropy")])
    expected = "Runs that warned that learning had stopped: kuhn_poker-1 of `no_signal`, `no_entropy`."
    assert expected in written(ends, tmp_path, monkeypatch)
