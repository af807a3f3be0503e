"""Files in memory: overwritten in place, and gone with their process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from agentrl_core.api import ArrayBucket, EngineError, map_safetensors
from agentrl_core.engine_kit import memory_files
from agentrl_core.engine_kit.memory_files import MemoryFolder, SharedMemoryOf, WeightFile

LAYOUT = [
    ArrayBucket(("a", "b"), ((2,), (3, 1)), ("float32", "bfloat16"), np.empty(0, np.uint8)),
    ArrayBucket(("none", "c"), ((0,), ()), ("float32", "int64"), np.empty(0, np.uint8)),
]


def test_updates_overwrite_the_same_file(tmp_path: Path) -> None:
    file = WeightFile(LAYOUT, tmp_path)
    mapped = map_safetensors(file.path)
    assert (mapped.names, mapped.shapes) == (("a", "b", "none", "c"), ((2,), (3, 1), (0,), ()))
    inode = os.stat(file.path).st_ino
    for value in (1, 2):
        for view in file.views.values():
            view[:] = value
        # A process that has mapped the file sees the new bytes: nothing is copied on that side.
        assert mapped.nbytes == 8 + 6 + 8 and set(mapped.data) == {value}
    assert os.stat(file.path).st_ino == inode
    assert os.stat(file.path).st_mode & 0o077 == 0
    file.close()
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_file_system_is_an_error_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EngineError, match="No space left on device.*TMPDIR"):
        WeightFile(LAYOUT, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_room_in_memory_the_files_go_to_the_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_files.tempfile, "gettempdir", lambda: str(tmp_path))
    huge = MemoryFolder("huge", 2**60)
    try:
        assert huge.path.parent == tmp_path
    finally:
        huge.close()


def test_a_killed_process_leaves_no_files_behind(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from agentrl_core.engine_kit.memory_files import MemoryFolder\n"
        "folder = MemoryFolder('test', parent=pathlib.Path(sys.argv[1])); print(folder.path, flush=True)\n"
        "sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    directory = Path(process.stdout.readline().strip())
    assert directory.is_dir()
    process.send_signal(signal.SIGKILL)
    # The output ends when the last process that holds it does; the one that clears up holds none of it.
    process.communicate()
    deadline = time.monotonic() + 30
    # Another process removes it; there is nothing to wait on but the directory.
    while directory.exists():
        assert time.monotonic() < deadline, f"{directory} is still there"
        time.sleep(0.01)


MAPS = """
import mmap, sys
from pathlib import Path

memory = Path(sys.argv[1])
maps = []
for name in ("psm_1", "sem.mp-1", "sglang_loads_1.shm", "foreign"):
    (memory / name).write_bytes(b"0" * 4096)
    with open(memory / name, "r+b") as file:
        maps.append(mmap.mmap(file.fileno(), 0))
print("mapped", flush=True)
sys.stdin.read()
"""
OWNS = """
import sys
from pathlib import Path
from agentrl_core.engine_kit.memory_files import SharedMemoryOf

owned = SharedMemoryOf([int(sys.argv[2])], Path(sys.argv[1]))
print("owned", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["close", "kill"])
def test_memory_of_an_engines_processes_goes_with_the_engine(tmp_path: Path, end: str) -> None:
    (tmp_path / "psm_of_another").touch()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", MAPS, str(tmp_path)], **pipes) as server:
        assert server.stdout is not None and server.stdout.readline() == "mapped\n"
        if end == "close":
            owned = SharedMemoryOf([server.pid], tmp_path)
        else:
            owner = subprocess.Popen([sys.executable, "-c", OWNS, str(tmp_path), str(server.pid)], **pipes)
            assert owner.stdout is not None and owner.stdout.readline() == "owned\n"
        server.kill()
        server.wait()
    assert len(list(tmp_path.iterdir())) == 5, "nobody has removed anything yet"
    if end == "close":
        owned.close()
        owned.close()
    else:
        with owner:
            owner.kill()
        deadline = time.monotonic() + 30
        while len(list(tmp_path.iterdir())) > 2 and time.monotonic() < deadline:
            time.sleep(0.02)
    assert {path.name for path in tmp_path.iterdir()} == {"psm_of_another", "foreign"}
