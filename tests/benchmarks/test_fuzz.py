"""``make fuzz`` loses nothing of a round in which the interpreter crashes."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TESTS = """
import os, signal
from hypothesis import given, settings, strategies as st

@given(st.integers())
@settings(max_examples=int(os.environ["FUZZ_EXAMPLES"]))
def test_first(number): ...

@given(st.integers())
def test_second(number):
    {fault}

def test_third(): ...
"""


def fuzz(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str) -> int:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.chdir(tmp_path)
    script = importlib.import_module("fuzz")
    (tmp_path / "test_parts.py").write_text(TESTS.format(fault=fault))
    monkeypatch.setattr(script, "FOLDER", tmp_path)
    arguments = ["fuzz.py", "--minutes", "0", "--examples", "30", "--first-seed", "7"]
    monkeypatch.setattr(sys, "argv", arguments)
    return int(script.main())


def test_a_crash_is_a_failure_with_its_seed_and_the_examples_before_it_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fuzz(monkeypatch, tmp_path, "os.kill(os.getpid(), signal.SIGKILL)") == 1
    said = capfd.readouterr().out
    assert "seed 7 failed:" in said and "pytest ended with -9 in test_parts.py::test_second" in said
    assert "      30 test_parts.py::test_first\n" in said
    assert "      30 examples in 1 rounds, 1 of them with a failure" in said


def test_a_test_that_fails_is_in_the_output_and_its_examples_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fuzz(monkeypatch, tmp_path, "assert number < 5, 'it is large'") == 1
    said = capfd.readouterr().out
    assert "it is large" in said and "pytest ended with 1\n" in said
    assert "test_parts.py::test_second\n" in said and "test_third" not in said


def test_rounds_without_a_failure_end_with_0(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fuzz(monkeypatch, tmp_path, "pass") == 0
    assert "     130 examples in 1 rounds, 0 of them with a failure" in capfd.readouterr().out
