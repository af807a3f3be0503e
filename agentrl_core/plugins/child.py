"""Calls that may hang, print or end the process: they are made in a forked process, which is killed where needed.

A fork starts within milliseconds and has all that is imported here, where a new interpreter would need a tenth of a
second. A thread could not be killed, and would share the exit of the process.
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Lost:
    """A call that did not return; ``reason`` is the predicate of a sentence: "… did not end within 10 s"."""

    reason: str


def map_in_child(function: Callable[[T], R], items: Sequence[T], time_limit: float) -> list[R | Lost]:
    """``function`` of each item. What the calls print goes to stderr, whatever way they print.

    Args:
        function: its results can be pickled; it should not raise.
        time_limit: seconds for one call. The calls after one that is lost are made in a new process.
    """
    results: list[R | Lost] = []
    while len(results) < len(items):
        results += _map_until_lost(function, items[len(results) :], time_limit)
    return results


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """What this process writes to stdout meanwhile goes to stderr, ``os.write(1, …)`` and C libraries included."""
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _map_until_lost(function: Callable[[T], R], items: Sequence[T], time_limit: float) -> list[R | Lost]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_call_all, args=(function, items, sender), daemon=True)
    with _no_collections():
        child.start()
    # Or the end of the child would not be the end of the pipe.
    sender.close()
    results: list[R | Lost] = []
    try:
        while len(results) < len(items):
            if not receiver.poll(time_limit):
                return [*results, Lost(f"did not end within {time_limit:g} s")]
            results.append(receiver.recv())
    except EOFError:
        child.join()
        results.append(Lost(f"ended the process with {exit_text(child.exitcode)}"))
    finally:
        # Not asked to end: a thread that some module has started may keep it.
        child.kill()
        child.join()
        receiver.close()
    return results


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """The child must not find garbage of this process: what is finalised there closes connections that both have. A
    driver of Ray waits for ever then."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _call_all(function: Callable[[T], R], items: Sequence[T], sender: Connection) -> None:
    # What is here already is not looked at, not even by a module that asks for a collection.
    gc.freeze()
    os.dup2(2, 1)
    sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False, encoding="utf-8", errors="replace")
    for item in items:
        sender.send(function(item))
    # Without the exit handlers of what was imported: they belong to a process that does more than look.
    os._exit(0)


def exit_text(code: int | None) -> str:
    """How a process ended, from its return code."""
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"
