"""Writes whole files, so that no reader ever sees half of one, even after a kill."""

import hashlib
import os
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace the content of ``path`` atomically and flush it to disk. Text is written as UTF-8.

    Raises:
        OSError: the file cannot be written; its earlier content is untouched.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
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
