"""A part of ``make chaos``: every kind of fault of the local runtime once, each at a random moment of a real run."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


@pytest.mark.slow
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


def test_what_was_seen_is_kept_when_the_script_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import chaos

    class Run:
        """A run that goes on until the script is stopped at the third fault of the second run."""

        run_dir, is_running, pid = tmp_path, True, 2**30

        def __init__(self, folder: Path, *_: object) -> None: ...

        def wait(self) -> int:
            return 0

    def hit(self: chaos.Chaos, run: Run, fault: chaos.Fault) -> bool:
        if len(self.seen) == 5:
            run.is_running = False
            raise KeyboardInterrupt
        outcome = "the run ended" if len(self.seen) == 4 else chaos.GOES_ON
        problems = ["the run ended"] if outcome != chaos.GOES_ON else []
        self.seen.append(chaos.Seen("local", fault.title, fault.promise, "rollout", outcome, problems, examined=False))
        run.is_running = len(self.seen) != 3
        return True

    monkeypatch.setattr(chaos, "adopt_orphans", lambda: None)
    monkeypatch.setattr(chaos, "ChaosRun", Run)
    monkeypatch.setattr(chaos.Chaos, "_start", lambda *_: None)
    monkeypatch.setattr(chaos.Chaos, "_hit", hit)
    monkeypatch.setattr(chaos.Chaos, "_left", lambda *_: ["left behind: a process"])
    for name in ("lost_or_repeated", "unreadable"):
        monkeypatch.setattr(chaos, name, lambda *_, **__: [])
    results = tmp_path / "runs" / "results.jsonl"
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            chaos.main(["--parts", "local", "--faults", "9", "--results", str(results)])
    seen = [json.loads(line) for line in results.read_text().splitlines()]
    assert [each["examined"] for each in seen] == 2 * [True, True, True, False, False]
    assert [bool(each["problems"]) for each in seen] == 2 * [False, False, True, False, True]
    counts = [int(row.split("|")[3]) for row in chaos.table(chaos.Results.at(results).all())[2:]]
    assert sum(counts) == 8, "the fourth fault of each: nobody knows how its run would have ended"
