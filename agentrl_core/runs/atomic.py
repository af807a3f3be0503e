"""Writes whole files, so that no reader ever sees half of one, even after a kill; and reads nothing but files."""

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading. What else may lie there could keep the reader waiting, or never end.

    Raises:
        OSError: there is none, or it is something else.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(mode := os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    error = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise OSError(error, os.strerror(error) if error == errno.EISDIR else "no regular file", str(path))


def read_file(path: Path) -> bytes:
    """The content of a regular file; raises as :func:`open_file`."""
    with open_file(path) as file:
        return file.read()


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace the content of ``path`` atomically and flush it to disk. Text is written as UTF-8.

    Raises:
        OSError: the file cannot be written; its earlier content is untouched.
    """
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` at the end of the block, as :func:`replace_file` does it."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError):
            # Python names no file where writing or flushing failed.
            error.filename, error.filename2 = str(path), None
        with suppress(OSError):
            temporary.unlink()
        raise


def flushed_checksum(path: Path) -> str:
    """SHA-256 of a file, whose content is on the disk now."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
