"""Watching over the actors of a worker group: a death surfaces although no call waits for the one who died."""

import logging
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from agentrl_core.api.errors import WorkerError

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 1.0


class Watch:
    """Keeps one small call in flight to every actor; it fails when the actor dies, busy or not.

    After a death the other actors are killed: their calls may wait in a collective for the one who is gone. The calls
    then fail, and the next ones too, with what `death` says. ``last_calls`` is kept by the groups over the actors.
    """

    def __init__(self, role: str, actors: Sequence[Any], nodes: Sequence[str]) -> None:
        self.death: WorkerError | None = None
        self.last_calls = ["nothing yet"] * len(actors)
        self._role = role
        self._nodes = nodes
        self._actors = list(actors)
        self._pings = [actor.ping.remote() for actor in actors]
        self._stopped = threading.Event()
        # The thread must not keep the watch, and with it the actors of a forgotten group, alive.
        threading.Thread(
            target=_watch, args=(weakref.ref(self), self._stopped), name=f"agentrl-watch-{role}", daemon=True
        ).start()

    def stop(self) -> None:
        """Ends the watch; deaths are no news any more."""
        self._stopped.set()

    def raise_if_dead(self) -> None:
        """Raises the death that was seen."""
        if self.death is not None:
            raise WorkerError(str(self.death)) from self.death.__cause__

    def look(self) -> bool:
        """Looks once at every actor. False when there is nothing to watch any more."""
        done, _ = ray.wait(self._pings, num_returns=len(self._pings), timeout=0, fetch_local=False)
        answered = set(done)
        for rank, ping in enumerate(self._pings):
            if ping not in answered:
                continue
            try:
                ray.get(ping)
            except RayActorError as error:
                if not self._stopped.is_set():
                    self._report(rank, error)
                return False
            self._pings[rank] = self._actors[rank].ping.remote()
        return True

    def describe(self, rank: int, error: RayActorError) -> WorkerError:
        """What is known of the death of a rank."""
        death = WorkerError(
            f"rank {rank} of {len(self._actors)} of {self._role!r} on node {self._nodes[rank]}: the worker process "
            f"died or cannot be reached; the last method called on it was {self.last_calls[rank]}. {str(error).strip()}"
        )
        death.__cause__ = error
        return death

    def _report(self, rank: int, error: RayActorError) -> None:
        self.death = self.describe(rank, error)
        logger.error("%s\nThe other ranks of %r are ended: they may wait for it.", self.death, self._role)
        for other, actor in enumerate(self._actors):
            if other != rank:
                ray.kill(actor)

    def __reduce__(self) -> Any:
        # Futures carry the watch of their group; it means nothing in another process.
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
