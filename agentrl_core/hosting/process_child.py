"""The child side of :mod:`agentrl_core.hosting.process_host`: builds one plugin and answers calls to it.

Calls are pickles, from a process that this one trusts. Answers are JSON (see :mod:`agentrl_core.hosting.wire`), because
the process that reads them does not trust this one. The plugin's own output goes to stderr.
"""

import asyncio
import inspect
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

from agentrl_core.hosting.wire import HEADER, encode

MAX_TEXT = 1 << 20
"""Characters of an exception's message, and of its traceback."""


def read_message(stream: BinaryIO) -> tuple[bytes, bytes] | None:
    """Read the next request's id and content; None when the other side has exited."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    size, request = HEADER.unpack(header)
    return request, stream.read(size)


def serve() -> None:
    """Answer the calls that come over the socket on stdin, until it closes."""
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(0), "wb")
    # Foreign code finds no socket where it expects stdin, and nobody to read what it prints.
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    if (first := read_message(calls)) is None:
        return
    sys.path[:] = pickle.loads(first[1])
    with asyncio.Runner() as runner:
        target: Any = None

        def build(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
            nonlocal target
            target = function(*args)

        def ask(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = (getattr(target, method) if method else target)(*args, **kwargs)
            return runner.run(result) if inspect.iscoroutine(result) else result

        handle: Callable[..., Any] = build
        while (message := read_message(calls)) is not None:
            request, question = message
            data = answer(handle, question)
            answers.write(HEADER.pack(len(data), request) + data)
            answers.flush()
            handle = ask


def answer(handle: Callable[..., Any], question: bytes) -> bytes:
    """Make a call. Return its result, or the exception as texts, because the parent may not have its class."""
    try:
        return encode(["ok", handle(*pickle.loads(question))])
    except BaseException as error:  # noqa: BLE001 - user code may raise anything; it belongs to the caller
        try:
            return encode(["error", *_described(error)])
        except BaseException as second:  # noqa: BLE001 - the exception is foreign code too
            problem = f"its message or traceback raised {type(second).__name__}"
            return encode(["error", type(error).__name__, problem, ""])


def _described(error: BaseException) -> tuple[str, str, str]:
    """Name, message and traceback, which are cut: they are for people and for the model."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    trace = "".join(traceback.format_exception(error.with_traceback(frames)))
    return type(error).__name__, str(error)[:MAX_TEXT], trace[-MAX_TEXT:]
