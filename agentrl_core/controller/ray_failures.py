"""Failures on Ray: the errors of failed calls, and a watch that reports dead and frozen ranks of a worker group."""

import logging
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agentrl_core.api.errors import WorkerError
from agentrl_core.controller.runtime import ActorDiedError

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 1.0
FROZEN_SECONDS = 120.0
"""A process that gives no sign of life for so long is frozen. Computing does not count: its own thread answers."""
SILENT_SECONDS = 600.0
"""After so long without an answer the log names the ranks that a call waits for, and again after as long."""

# After one rank has failed, the others get this long to fail too, so that the message can name them.
OTHERS_GRACE_SECONDS = 1.0
# The same after the loss of a connection: Ray takes a few seconds to notice that the other rank's node has died.
LOST_PEER_GRACE_SECONDS = 10.0
LOST_PEER = re.compile(
    r"(?i)connection (reset|closed|refused|aborted)|broken pipe|remote process (exited|has terminated)"
)
ANSI_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Watch:
    """Keeps one small call in flight to every actor. It fails when the actor dies, and stays open when it freezes.

    Then the watch kills all actors: the calls of the other ranks may wait for the lost one in a collective. Calls
    under way and later calls raise `death`. The groups over the actors keep ``last_calls``.
    """

    def __init__(self, role: str, actors: Sequence[Any], nodes: Sequence[str]) -> None:
        self.death: ActorDiedError | None = None
        self.last_calls = ["nothing yet"] * len(actors)
        self._role = role
        self._nodes = nodes
        self._actors = list(actors)
        self._pings = [actor.ping.remote() for actor in actors]
        self._asked = [time.monotonic()] * len(actors)
        self._stopped = threading.Event()
        # The thread must not keep the watch, and with it the actors of a forgotten group, alive.
        threading.Thread(
            target=_watch, args=(weakref.ref(self), self._stopped), name=f"agentrl-watch-{role}", daemon=True
        ).start()

    def stop(self) -> None:
        """End the watch; deaths are not reported any more."""
        self._stopped.set()

    def raise_if_dead(self) -> None:
        """Raise the death that the watch has seen."""
        if self.death is not None:
            raise ActorDiedError(str(self.death)) from self.death.__cause__

    def look(self) -> bool:
        """Look once at every actor. False when there is nothing to watch any more."""
        done, _ = ray.wait(self._pings, num_returns=len(self._pings), timeout=0, fetch_local=False)
        answered, now = set(done), time.monotonic()
        for rank, ping in enumerate(self._pings):
            if ping not in answered:
                if now - self._asked[rank] < FROZEN_SECONDS:
                    continue
                found = f"the worker process is frozen: it has given no sign of life for {FROZEN_SECONDS:g} s"
                self._report(self.describe(rank, found))
                return False
            try:
                ray.get(ping)
            except RayActorError as error:
                self._report(self.describe(rank, "the worker process died or cannot be reached", error))
                return False
            self._pings[rank], self._asked[rank] = self._actors[rank].ping.remote(), now
        return True

    def describe(self, rank: int, found: str, cause: RayActorError | None = None) -> ActorDiedError:
        """The error about a lost rank."""
        death = ActorDiedError(
            f"rank {rank} of {len(self._actors)} of {self._role!r} on node {self._nodes[rank]}: {found}; "
            f"the last method called on it was {self.last_calls[rank]}. {str(cause or '').strip()}".rstrip()
        )
        death.__cause__ = cause
        return death

    def _report(self, death: ActorDiedError) -> None:
        if self._stopped.is_set():
            return
        self.death = death
        logger.error("%s\nKilling all ranks of %r: the others may be waiting for this one.", death, self._role)
        for actor in self._actors:
            kill(actor)

    def __reduce__(self) -> Any:
        # Futures carry the watch of their group, which cannot work in another process.
        return _no_watch, ()

    def __del__(self) -> None:
        self._stopped.set()


def _watch(reference: "weakref.ref[Watch]", stopped: threading.Event) -> None:
    while not stopped.wait(INTERVAL_SECONDS):
        watch = reference()
        # A closed Ray must not be started again by asking it.
        if watch is None or not ray.is_initialized() or not watch.look():
            return
        del watch


def _no_watch() -> None:
    return None


def kill(actor: Any, *, restart: bool = False) -> None:
    """Kill an actor's process; ``restart``: Ray starts a new one if the actor has restarts left.

    Ray asks the process to exit, and gives that up where one that has been frozen for minutes has lost its connection.
    So a process that stands still is killed from its node.
    """
    # The public `ray.util.state.get_actor` asks the dashboard over HTTP, which runs here are started without.
    known = ray._private.state.actors(actor._actor_id.hex())
    ray.kill(actor, no_restart=not restart)
    if known.get("State") == "ALIVE":
        pid, node = known["Pid"], known["Address"]["NodeID"]
        if node == ray.get_runtime_context().get_node_id():
            kill_frozen(pid)
        else:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            ray.remote(num_cpus=0)(kill_frozen).options(scheduling_strategy=there).remote(pid)


def kill_frozen(pid: int) -> None:
    """Kill a process of this machine that is stopped, or waits for a device."""
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state in ("T", "D"):
            os.kill(pid, signal.SIGKILL)


def fetch(method: str, labels: Sequence[str], watch: Watch | None, handles: Sequence[Any]) -> list[Any]:
    """The values of all handles; raises the first failure as soon as there is one."""
    try:
        return _patiently(method, labels, handles)
    except Exception as error:  # noqa: BLE001 - Ray raises the task's own exception class
        if isinstance(error, RayActorError) and watch is not None:
            # This rank may have been ended only because another one, whose death is the news, was waited for.
            watch.raise_if_dead()
        raise _group_error(method, labels, handles, error, watch) from root_cause(error)


def _patiently(method: str, labels: Sequence[str], handles: Sequence[Any]) -> list[Any]:
    """``ray.get``, while the log names the ranks that have not answered for long."""
    start = time.monotonic()
    while True:
        try:
            return list(ray.get(list(handles), timeout=SILENT_SECONDS))
        except GetTimeoutError as error:
            # A task may raise this class too.
            if isinstance(error, RayTaskError):
                raise
        _, open_ones = ray.wait(list(handles), num_returns=len(handles), timeout=0, fetch_local=False)
        silent = [label for label, handle in zip(labels, handles, strict=True) if handle in open_ones]
        logger.warning("%s: %r has not returned for %.0f s", ", ".join(silent), method, time.monotonic() - start)


def _group_error(
    method: str, labels: Sequence[str], handles: Sequence[Any], error: BaseException, watch: Watch | None
) -> WorkerError:
    lost_peer = not isinstance(error, RayActorError) and LOST_PEER.search(str(error)) is not None
    grace = LOST_PEER_GRACE_SECONDS if lost_peer else OTHERS_GRACE_SECONDS
    done, _ = ray.wait(list(handles), num_returns=len(handles), timeout=grace, fetch_local=False)
    failures = {}
    for label, handle in zip(labels, handles, strict=True):
        if handle in done:
            try:
                ray.get(handle, timeout=OTHERS_GRACE_SECONDS)
            except GetTimeoutError:
                continue
            except Exception as failure:  # noqa: BLE001 - Ray raises the task's own exception class
                failures[label] = str(failure)
                if lost_peer and isinstance(failure, RayActorError):
                    # The rank that lost the connection survives; the news is the one at its other end.
                    error, lost_peer = failure, False
    if lost_peer and watch is not None:
        watch.raise_if_dead()
    # The text has the id of the process; the exceptions themselves may be equal on all ranks.
    first = next((label for label, text in failures.items() if text == str(error)), f"one of {len(labels)} ranks")
    others = [label for label in failures if label != first]
    also = f"\nAlso failed: {', '.join(others)}" if others else ""
    kind = ActorDiedError if isinstance(error, RayActorError) else WorkerError
    return kind(describe(f"{first}, in {method!r}", error) + also)


def describe(who: str, error: BaseException) -> str:
    """What failed and how, for the message of a WorkerError."""
    if isinstance(error, RayActorError):
        return f"{who}: the worker process died or cannot be reached. {str(error).strip()}"
    if isinstance(error, RayTaskError):
        return f"{who}: {type(root_cause(error)).__name__}\n{ANSI_COLOURS.sub('', str(error)).strip()}"
    return f"{who}: {type(error).__name__}: {error}"


def root_cause(error: BaseException) -> BaseException:
    """The exception that the remote code raised."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) and error.cause is not error:
        error = error.cause
    return error
