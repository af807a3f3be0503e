"""How the bytes of new weights come to lie in files that vLLM's workers can map."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl_core.api.weights import WeightUpdate, write_safetensors

MEMORY_FOLDER = Path("/dev/shm")


@contextmanager
def weight_files(update: WeightUpdate) -> Iterator[Iterator[str]]:
    """Paths of safetensors files with all tensors of an update: its own, and one for each of its buckets.

    A bucket's file is written when it is asked for. They are gone when the context ends.
    """
    with memory_folder() as folder:
        yield _paths(update, folder)


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder of its own, in memory where the host has such a place, that is gone when the context ends."""
    place = MEMORY_FOLDER if os.access(MEMORY_FOLDER, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="agentrl-vllm-weights-", dir=place) as folder:
        yield Path(folder)


def _paths(update: WeightUpdate, folder: Path) -> Iterator[str]:
    yield from map(os.path.abspath, update.files)
    for number, bucket in enumerate(update.buckets):
        path = folder / f"bucket-{number:05d}.safetensors"
        write_safetensors(path, bucket)
        yield str(path)
        # Whoever has mapped it keeps it.
        path.unlink()
