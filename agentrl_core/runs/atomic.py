"""Writing whole files so that a reader, or a process killed in between, never meets half of one."""

import os
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, content: str | bytes) -> None:
    """Give ``path`` this content in one step. It is on disk when this returns; text is written as UTF-8.

    Raises:
        OSError: the file cannot be written; what was there before is untouched.
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
