"""Where the images of a run are: files in its folder ``media``, which one process writes and all others read.

Only names travel with messages, requests and batches. The bytes of an image leave the host that has the files once for
each process of another host, and never on this one.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl_core.api.errors import ImageError
from agentrl_core.controller.event_loop import run_alone
from agentrl_core.controller.runtime import ActorHandle, ActorOptions, Runtime
from agentrl_core.data.rows import SOURCES, PromptBatch
from agentrl_core.engine_kit.images import Image
from agentrl_core.engine_kit.media import MediaCache, is_name

KEPT_BYTES = 256 << 20
"""Of images in a process of another host, and in one that reads an image again and again."""
FOLDER = "media"


class ImageStore:
    """Keeps images as files. An actor on the host of the run's folder.

    Args:
        folder: made when the first image comes.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._counts = {"new": 0.0, "new_bytes": 0.0, "other_hosts": 0.0, "other_hosts_bytes": 0.0}

    def put(self, images: Sequence[Image]) -> None:
        """Keep these images."""
        for name, data in images:
            if not is_name(name):
                raise ImageError(f"{name!r:.100} is no name of an image")
            path = self._folder / name
            # After a crash of the machine a file may have its name and not its bytes.
            if not path.is_file() or path.stat().st_size != len(data):
                self._folder.mkdir(parents=True, exist_ok=True)
                part = path.with_name(f".{name}.part")
                try:
                    part.write_bytes(data)
                    os.replace(part, path)
                except OSError:
                    # It would take what is left of a full disk.
                    part.unlink(missing_ok=True)
                    raise
                self._counts["new"] += 1
                self._counts["new_bytes"] += len(data)

    def get(self, name: str) -> bytes:
        """The file of an image, for another host.

        Raises:
            ImageError: there is none of this name.
        """
        data = image_file(self._folder, name)
        self._counts["other_hosts"] += 1
        self._counts["other_hosts_bytes"] += len(data)
        return data

    def metrics(self) -> dict[str, float]:
        """Images and bytes that were added as files, and that were sent to other hosts, since the last call."""
        counts = dict(self._counts)
        self._counts = dict.fromkeys(counts, 0.0)
        return counts


class RunImages:
    """The images of a run, for any of its processes. Can be passed to actors.

    Args:
        store: the actor with the files.
        folder: where they are on its host.
    """

    def __init__(self, store: ActorHandle, folder: str) -> None:
        self._store, self._folder = store, folder
        self._cache = MediaCache[bytes](KEPT_BYTES, len)
        self._put: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._store, self._folder)

    async def put(self, images: Sequence[Image]) -> None:
        """Keep these images, so that every process can read them by name."""
        new = [image for image in images if image.name not in self._put]
        if new:
            await self._store.call("put", new)
            self._put.update(image.name for image in new)

    def read(self, name: str) -> bytes:
        """See :class:`agentrl_core.engine_kit.media.MediaSource`."""
        found = self._cache.get(name)
        return self._cache.put(name, self._fetched(name)) if found is None else found

    async def get(self, names: Sequence[str]) -> dict[str, bytes]:
        """See :class:`agentrl_core.engine_kit.media.MediaSource`."""
        found: dict[str, bytes] = {}
        for name in dict.fromkeys(names):
            kept = self._cache.get(name)
            found[name] = await asyncio.to_thread(self.read, name) if kept is None else kept
        return found

    async def metrics(self) -> Mapping[str, float]:
        """See :meth:`ImageStore.metrics`."""
        counts: Mapping[str, float] = await self._store.call("metrics")
        return counts

    def _fetched(self, name: str) -> bytes:
        try:
            # On the host of the files; a path of another host names nothing here.
            return image_file(Path(self._folder), name)
        except ImageError:
            return run_alone(self._ask(name))

    async def _ask(self, name: str) -> bytes:
        data: bytes = await self._store.call("get", name)
        return data


class ShownImages(Mapping[str, bytes]):
    """Images by name, each read when it is asked for. In another process it is a dict.

    Args:
        read: the file of an image, by name.
        names: of the images.
    """

    def __init__(self, read: Callable[[str], bytes], names: Sequence[str]) -> None:
        self._read, self._names = read, dict.fromkeys(names)

    def __getitem__(self, name: str) -> bytes:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class RowUploads:
    """Brings the images of rows to where all processes of a run find them.

    Args:
        media: of the run.
        read: reads an image again: its name, what it is made of, and where it comes from, for errors.
    """

    def __init__(self, media: RunImages, read: Callable[[str, Any, str], Image]) -> None:
        self.media, self._read, self._known = media, read, set[str]()

    async def kept(self, prompts: PromptBatch) -> PromptBatch:
        """The prompts without what their images are made of, which are kept by name.

        Raises:
            DataError: an image has changed since the run started, or is gone.
        """
        found = {name: (source, row) for row in prompts.rows for name, source in (row.get(SOURCES) or {}).items()}
        new = {name: each for name, each in found.items() if name not in self._known}

        def read() -> list[Image]:
            where = "data: the row of index"
            return [
                self._read(name, source, f"{where} {(row.get('extra_info') or {}).get('index', '?')}")
                for name, (source, row) in new.items()
            ]

        if new:
            await self.media.put(await asyncio.to_thread(read))
            self._known.update(new)
        if not found:
            return prompts
        rows = [{key: value for key, value in row.items() if key != SOURCES} for row in prompts.rows]
        return replace(prompts, rows=rows)


def image_file(folder: Path, name: str) -> bytes:
    """The file of an image in the folder ``media`` of a run.

    Raises:
        ImageError: there is none of this name.
    """
    if not is_name(name):
        raise ImageError(f"{name!r:.100} is no name of an image")
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise ImageError(f"there is no image {name}: {error}") from error


def start_media(runtime: Runtime, run: Path) -> RunImages:
    """Start what keeps the images of a run, on this host.

    Args:
        run: its folder.
    """
    folder = str((run / FOLDER).absolute())
    options = ActorOptions(num_cpus=0, node=runtime.here, restarts=3)
    return RunImages(runtime.actor(ImageStore, folder, name="media", options=options), folder)
