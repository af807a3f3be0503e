"""Requests to change the engine replicas of a run that runs, and their answers: files in the run's directory.

``agentrl engines add|drain`` writes a request and waits for its answer. The process that holds the directory looks for
requests whenever it looks after its replicas.
"""

import asyncio
import json
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import yaml

from agentrl_core.api import AgentRLError, EngineError
from agentrl_core.runs.atomic import read_file, replace_file
from agentrl_core.runs.run_dir import RunDir

logger = logging.getLogger(__name__)
FOLDER = ".engine-changes"
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class ReplicaChange:
    """Start one more replica, or let one end.

    Args:
        action: ``add`` or ``drain``.
        replica: number of the one to drain.
    """

    action: Literal["add", "drain"]
    replica: int = -1


class ChangeRequests:
    """The requests to one run, on the side of the process that holds its directory. Earlier ones are dropped.

    Args:
        run: its directory.
        add: starts one more replica, and returns its number.
        drain: lets the replica of this number end.
    """

    def __init__(self, run: Path, add: Callable[[], Awaitable[int]], drain: Callable[[int], Awaitable[None]]) -> None:
        self._folder = run / FOLDER
        self._add, self._drain = add, drain
        self.tasks: set[asyncio.Task[None]] = set()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700)

    def begin(self) -> None:
        """Begin to carry out each new request, in the event loop that runs."""
        # Others are answers, or not whole yet.
        for file in sorted(self._folder.glob("*.request")):
            try:
                text = read_file(file)
                file.unlink()
                change = ReplicaChange(**json.loads(text))
            except (OSError, ValueError, TypeError) as error:
                logger.warning("%s: no request of `agentrl engines`: %s", file, error)
                continue
            task = asyncio.get_running_loop().create_task(self._carry_out(change, file.with_suffix(".answer")))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def close(self) -> None:
        """Take no further requests. An answer that nobody has read stays until the next run begins."""
        with suppress(OSError):
            self._folder.rmdir()

    async def _carry_out(self, change: ReplicaChange, answer: Path) -> None:
        failed = False
        try:
            if change.action == "add":
                text = f"replica {await self._add()} serves"
            else:
                await self._drain(change.replica)
                text = f"replica {change.replica} has answered its requests and is closed"
            logger.info("engine %s", text)
        except AgentRLError as error:
            text, failed = str(error), True
            logger.warning("cannot %s an engine replica: %s", change.action, error)
        with suppress(OSError):  # the disk is full
            replace_file(answer, json.dumps({"text": text, "failed": failed}))


def change_replicas(path: Path, change: ReplicaChange) -> str:
    """Ask the run in a directory for a change, and wait until it is made; what the run says of it.

    Raises:
        EngineError: the run is not running, refuses the change, fails to make it, or ends before.
    """
    run = RunDir(path)
    status = run.shown_status()
    if status == "-":
        raise EngineError(f"{path}: holds no run. Give the directory of a run, such as runs/NAME")
    if not run.is_in_use():
        raise EngineError(f"{path}: the run is not running (it is {status}), and only a running one has replicas")
    config = yaml.safe_load(read_file(run.config_file))
    if config["cluster"]["runtime"] == "local":
        raise EngineError(
            f"{path}: found cluster.runtime=local, where the engine is in the trainer's process; replicas can be added "
            "and drained with cluster.runtime=ray only"
        )
    folder = path / FOLDER
    request = folder / f"{time.time_ns()}-{os.getpid()}.request"
    try:
        replace_file(request, json.dumps(asdict(change)))
    except OSError as error:
        raise EngineError(f"{path}: the run takes no requests yet. Try again once its first step has begun") from error
    answer = request.with_suffix(".answer")
    try:
        while not answer.exists():
            if not run.is_in_use():
                raise EngineError(f"{path}: the run ended before it could {change.action} a replica")
            time.sleep(POLL_SECONDS)
        said = json.loads(read_file(answer))
    finally:
        for file in (request, answer):
            file.unlink(missing_ok=True)
    if said["failed"]:
        raise EngineError(f"{path}: {said['text']}")
    return str(said["text"])
