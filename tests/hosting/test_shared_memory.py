"""Shared memory that a killed run leaves behind."""

import subprocess
import sys
from pathlib import Path

import pytest

from agentrl_core.hosting import shared_memory
from agentrl_core.hosting.shared_memory import remove_orphans, shared_memory_recorded

RUN = """
import mmap, sys
from pathlib import Path
from agentrl_core.hosting import shared_memory

memory = shared_memory.MEMORY = Path(sys.argv[1])
(memory / "agentrl-weights-x").mkdir()
maps = []
for name in ("psm_1", "sem.mp-1", "sgl_shm_mq_1", "agentrl-weights-x/weights", "foreign"):
    (memory / name).write_bytes(b"0" * 4096)
    with open(memory / name, "r+b") as file:
        maps.append(mmap.mmap(file.fileno(), 0))
with shared_memory.shared_memory_recorded():
    print("recorded", flush=True)
    sys.stdin.read()
"""


def test_the_next_start_removes_the_shared_memory_of_a_killed_run_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "MEMORY", tmp_path)
    (tmp_path / "psm_of_another").touch()
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stdout.readline() == "recorded\n"
        before = set(tmp_path.iterdir())
        remove_orphans()
        assert set(tmp_path.iterdir()) == before
        run.kill()
        run.wait()
        remove_orphans()
    assert {path.name for path in tmp_path.iterdir()} == {"psm_of_another", "foreign"}


def test_a_run_without_shared_memory_leaves_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MEMORY", tmp_path)
    with shared_memory_recorded():
        assert not list(tmp_path.iterdir())
