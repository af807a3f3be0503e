"""Writing a checkpoint while training goes on."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

T = TypeVar("T")


def in_thread(function: Callable[[], T]) -> "Future[T]":
    """Call a function in a thread that does not keep the process alive; without gradients."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            with torch.no_grad():
                future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name="agentrl-checkpoint", daemon=True).start()
    return future
