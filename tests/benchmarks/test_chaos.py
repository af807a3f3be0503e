"""A part of ``make chaos``: every kind of fault of the local runtime once, each at a random moment of a real run."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


def test_every_fault_is_survived_as_promised(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    arguments = ["--parts", "local", "--faults", "9", "--steps", "12", "--results", str(results)]
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    seen = [json.loads(line) for line in results.read_text().splitlines()]
    assert done.returncode == 0 and not any(each["problems"] for each in seen), done.stderr
    assert len({each["fault"] for each in seen}) == len(seen) == 9


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6, socket.AF_UNIX])
def test_a_socket_that_somebody_listens_at_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: socket.AddressFamily
) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    from _chaos_run import listening, still_open

    before = listening({os.getpid()})
    with socket.socket(family) as server:
        address = str(tmp_path / "socket") if family == socket.AF_UNIX else ("", 0)
        server.bind(address)
        server.listen()
        port = "" if family == socket.AF_UNIX else str(server.getsockname()[1])
        held = {inode: at for inode, at in listening({os.getpid()}).items() if inode not in before}
        (found,) = still_open(held)
        assert found.endswith(port or str(address))
    assert still_open(held) == []
