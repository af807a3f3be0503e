"""Calls in a forked process."""

import gc
from pathlib import Path

from agentrl_core.plugins.child import map_in_child


class Shared:
    """Garbage whose end both processes would notice."""

    def __init__(self, said: Path) -> None:
        self.said, self.itself = said, self

    def __del__(self) -> None:
        self.said.touch()


def test_a_child_finalises_nothing_of_its_parent(tmp_path: Path) -> None:
    """A collection in the child once closed the connections of a Ray driver, which then waited for ever."""
    said = tmp_path / "finalised"
    gc.disable()
    try:
        Shared(said)
        # It counts what it finds itself only.
        assert map_in_child(lambda _: [gc.collect() for _ in range(2)][-1], ["x"], 10.0) == [0]
        assert not said.exists() and not gc.isenabled()
        gc.collect()
        assert said.exists()
    finally:
        gc.enable()
    assert map_in_child(lambda _: gc.isenabled(), ["x"], 10.0) == [False] and gc.isenabled()
