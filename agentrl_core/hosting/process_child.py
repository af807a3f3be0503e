"""The child side of :mod:`agentrl_core.hosting.process_host`: builds one plugin and answers calls to it.

Messages are pickles with a length of eight bytes before them, on stdin and stdout; what the plugin prints goes to
stderr.
"""

import asyncio
import inspect
import os
import pickle
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

HEADER = struct.Struct("!Q")


def read_message(stream: BinaryIO) -> Any:
    """The next message; EOFError when the other side has gone."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    return pickle.loads(stream.read(HEADER.unpack(header)[0]))


def write_message(stream: BinaryIO, message: Any) -> None:
    """Write one message and flush it."""
    data = pickle.dumps(message, protocol=5)
    stream.write(HEADER.pack(len(data)) + data)
    stream.flush()


def main() -> None:
    """Serve until stdin closes."""
    requests = sys.stdin.buffer
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.path[:] = read_message(requests)
    with asyncio.Runner() as runner:
        try:
            build, args = read_message(requests)
            target = build(*args)
        except BaseException as error:  # noqa: BLE001 - the parent must learn of whatever goes wrong here
            write_message(replies, failure(error))
            return
        write_message(replies, ("ok", None))
        while True:
            try:
                method, args, kwargs = read_message(requests)
            except EOFError:
                return
            write_message(replies, answer(runner, target, method, args, kwargs))


def answer(
    runner: asyncio.Runner, target: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Call a method (or, with an empty name, the target itself) and say what came of it."""
    try:
        call: Callable[..., Any] = getattr(target, method) if method else target
        result = call(*args, **kwargs)
        if inspect.iscoroutine(result):
            result = runner.run(result)
        pickle.dumps(result, protocol=5)
        return ("ok", result)
    except BaseException as error:  # noqa: BLE001 - user code may raise anything; it belongs to the caller
        return failure(error)


def failure(error: BaseException) -> tuple[str, str, str, str]:
    """An exception as plain strings, because its class may not exist on the other side."""
    return ("error", type(error).__name__, str(error), "".join(traceback.format_exception(error)))


if __name__ == "__main__":
    main()
