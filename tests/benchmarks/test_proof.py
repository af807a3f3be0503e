"""The proof of learning: what is done is not repeated, and the page says what each seed reached."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import proof


def write_metrics(folder: Path, lines: Sequence[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_every_example_has_a_configuration_and_a_model_script() -> None:
    for name in proof.PROOFS:
        folder = proof.ROOT / "examples" / name
        assert (folder / "config.yaml").is_file() and (folder / "prepare.py").is_file()


def test_the_ends_of_a_run_are_means_of_steps(tmp_path: Path) -> None:
    games = [{"step": step, "reward/mean": 0.0, "reward/environment/found": step / 10} for step in range(1, 11)]
    assert proof.found(write_metrics(tmp_path / "a", games)) == pytest.approx((0.2, 0.8))
    name = "validation/calculator/accuracy_greedy"
    lines = [{"step": 0, name: 0.25}, {"step": 1, "reward/mean": 0.5}, {"step": 2, name: 0.875}]
    assert proof.accuracy(write_metrics(tmp_path / "b", lines)) == (0.25, 0.875)


def test_a_run_is_complete_with_its_last_step(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model: {path: model}\ndata: {train_files: [x.jsonl]}\nrollout: {agent: {loops: [single_turn]}}\n"
                      "reward: {functions: [exact_match]}\ntrainer: {steps: 3}\n")  # fmt: skip
    assert not proof.is_complete(tmp_path / "run", config)
    assert not proof.is_complete(write_metrics(tmp_path / "run", [{"step": 2}]), config)
    assert proof.is_complete(write_metrics(tmp_path / "run", [{"step": 2}, {"step": 3}]), config)


def test_a_goal_is_met_where_every_seed_meets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {"kuhn_poker-0": 0.05, "kuhn_poker-1": 0.09, "guess_number-0": 0.95, "guess_number-1": 0.5}
    monkeypatch.setattr(proof, "train", lambda name, seed, work: Path(f"{name}-{seed}"))
    for name in ("kuhn_poker", "guess_number"):
        old = proof.PROOFS[name]
        fake = proof.Proof(old.measures, lambda run: (0.4, ends[run.name]), old.goal, old.why, old.lower)
        monkeypatch.setitem(proof.PROOFS, name, fake)
    output = tmp_path / "proof.md"
    monkeypatch.setattr("sys.argv", ["proof.py", "kuhn_poker", "guess_number", "--seeds", "2", "--output", str(output)])
    proof.main()
    rows = [line for line in output.read_text().splitlines() if line.startswith("| [")]
    assert len(rows) == 2
    assert "0: 0.950, 1: 0.500" in rows[0] and rows[0].endswith("| no |")
    assert "0: 0.050, 1: 0.090" in rows[1] and rows[1].endswith("| yes |")
    assert "Not run here: calculator." in output.read_text()


def test_an_unknown_example_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["proof.py", "chess"])
    with pytest.raises(SystemExit):
        proof.main()
    assert "there is no chess; choose from calculator, guess_number, kuhn_poker" in capsys.readouterr().err
