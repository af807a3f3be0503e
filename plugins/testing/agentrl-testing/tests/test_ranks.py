"""Processes that compute together stay from one test file to the next, and must not care which came first."""

import importlib
from operator import sub
from pathlib import Path
from types import ModuleType

import pytest

from agentrl_testing.ranks import on_ranks

LATER = """
from dataclasses import dataclass


def where(rank, size, start):
    return start + rank, size


@dataclass
class Fragile:
    number: int = 1

    def __setstate__(self, state):
        raise ArithmeticError("cannot be unpickled")
"""


@pytest.fixture
def later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module whose folder comes on the path after the ranks were started, as a later test file brings one."""
    assert on_ranks(2, sub) == [-2, -1]
    (tmp_path / "came_later.py").write_text(LATER)
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("came_later")


def test_ranks_import_what_came_after_their_start(later: ModuleType) -> None:
    assert on_ranks(2, later.where, 5) == [(5, 2), (6, 2)]


def test_what_a_rank_cannot_read_is_an_error_here(later: ModuleType) -> None:
    with pytest.raises(ArithmeticError, match="cannot be unpickled"):
        on_ranks(2, later.where, later.Fragile())
    assert on_ranks(2, sub) == [-2, -1]
