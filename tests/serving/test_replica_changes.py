"""Requests to change the replicas of a run, in its directory."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import EngineError
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.serving.replica_changes import FOLDER, ChangeRequests, ReplicaChange, change_replicas


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run on Ray that a process held, and holds no more."""
    run = RunDir.create(tmp_path, "run")
    run.config_file.write_text("cluster: {runtime: ray}")
    run.write_state("running", 3)
    return run


def ask(run: RunDir, action: Any = "add", replica: int = -1) -> str:
    return change_replicas(run.path, ReplicaChange(action, replica))


def test_a_request_is_carried_out_by_the_run_which_answers_it(run: RunDir) -> None:
    drained: list[int] = []

    async def add() -> int:
        if drained:
            raise EngineError("engine-2 has not answered for 60 s")
        return 2

    async def drain(replica: int) -> None:
        drained.append(replica)

    async def serve(requests: ChangeRequests) -> None:
        while not ended.is_set():
            requests.begin()
            await asyncio.sleep(0.01)

    ended = threading.Event()
    with run.locked():
        # What was asked of the run before this one is not carried out.
        (run.path / FOLDER).mkdir()
        (run.path / FOLDER / "1-1.request").write_text('{"action": "drain", "replica": 1}')
        requests = ChangeRequests(run.path, add, drain)
        (run.path / FOLDER / "0.request").write_text("nonsense")
        thread = threading.Thread(target=lambda: asyncio.run(serve(requests)))
        thread.start()
        try:
            assert ask(run) == "replica 2 serves"
            assert ask(run, "drain", 1) == "replica 1 has answered its requests and is closed"
            with pytest.raises(EngineError, match=f"{run.path}: engine-2 has not answered for 60 s"):
                ask(run)
        finally:
            ended.set()
            thread.join()
    assert drained == [1] and not list((run.path / FOLDER).iterdir())


def test_only_runs_that_run_on_ray_have_replicas_to_change(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"the run is not running \(it is interrupted\)"):
        ask(run)
    with pytest.raises(EngineError, match="holds no run. Give the directory of a run"):
        ask(RunDir(tmp_path))
    with run.locked():
        with pytest.raises(EngineError, match="takes no requests yet"):
            ask(run)
        run.config_file.write_text("cluster: {runtime: local}")
        with pytest.raises(EngineError, match="found cluster.runtime=local.*cluster.runtime=ray only"):
            ask(run)


def test_a_run_that_ends_leaves_nobody_waiting(run: RunDir) -> None:
    (run.path / FOLDER).mkdir()
    held = threading.Event()

    def hold() -> None:
        with run.locked():
            held.set()
            while not list((run.path / FOLDER).glob("*.request")):
                held.wait(0.01)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    with pytest.raises(EngineError, match="the run ended before it could add a replica"):
        ask(run)
    thread.join()
    assert not list((run.path / FOLDER).iterdir())
