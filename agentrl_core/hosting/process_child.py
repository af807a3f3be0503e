"""The child side of :mod:`agentrl_core.hosting.process_host`: builds one plugin and answers calls to it.

Calls are pickles on stdin, from a process that this one trusts. Answers are JSON on stdout (see
:mod:`agentrl_core.hosting.wire`), because the process that reads them does not trust this one. Eight bytes with the
length precede each message. The plugin's own output goes to stderr.
"""

import asyncio
import inspect
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

from agentrl_core.hosting.wire import HEADER, encode


def read_message(stream: BinaryIO) -> bytes | None:
    """Read the next message; None when the other side has exited."""
    header = stream.read(HEADER.size)
    return stream.read(HEADER.unpack(header)[0]) if len(header) == HEADER.size else None


def read_questions(stream: BinaryIO, questions: "queue.SimpleQueue[bytes]") -> None:
    """Queue every call. When the parent has exited, kill this process and those that it started, busy or not."""
    while (message := read_message(stream)) is not None:
        questions.put(message)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Serve until stdin closes."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.path[:] = pickle.loads(read_message(sys.stdin.buffer) or b"")
    questions: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=read_questions, args=(sys.stdin.buffer, questions), daemon=True).start()
    with asyncio.Runner() as runner:
        target: Any = None

        def build(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
            nonlocal target
            target = function(*args)

        def ask(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = (getattr(target, method) if method else target)(*args, **kwargs)
            return runner.run(result) if inspect.iscoroutine(result) else result

        handle: Callable[..., Any] = build
        while True:
            data = answer(handle, questions.get())
            replies.write(HEADER.pack(len(data)) + data)
            replies.flush()
            handle = ask


def answer(handle: Callable[..., Any], question: bytes) -> bytes:
    """Make a call. Return its result, or the exception as texts, because the parent may not have its class."""
    try:
        return encode(["ok", handle(*pickle.loads(question))])
    except BaseException as error:  # noqa: BLE001 - user code may raise anything; it belongs to the caller
        frames = error.__traceback__
        while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        trace = "".join(traceback.format_exception(error.with_traceback(frames)))
        return encode(["error", type(error).__name__, str(error), trace])
