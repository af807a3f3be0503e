"""The tables of benchmarks."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from _report import Figure, print_figures

FIGURES = [
    Figure(
        "a case with a name that is long", "tokens per second of all replicas", 123456.78, "tokens/s", 100000.0, True
    ),
    Figure("another case", "seconds of a step", 1.25, "s"),
]


@pytest.mark.parametrize("columns", [40, 80, 200, None])
def test_numbers_are_whole_at_any_width_and_in_a_pipe(
    columns: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns or 60))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: columns is not None)
    print_figures("Figures", FIGURES)
    text = capsys.readouterr().out
    for number in ("123456.78 tokens/s", "≥ 100000", "pass", "1.25 s"):
        assert number in text
    assert "…" not in text
