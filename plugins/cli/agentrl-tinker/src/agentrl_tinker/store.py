"""Checkpoints on disk: whole after a kill, and seen by the key that saved them alone.

    STATE/<owner>/<training run>/weights/step-10.json       what it is, and the folder that has it
    STATE/<owner>/<training run>/weights/step-10-3f9a…/     adapter_model.safetensors, adapter_config.json, optimizer…

A checkpoint exists once its JSON file does, which is replaced atomically. ``tinker://<run>/weights/step-10`` names it.
"""

import fcntl
import hashlib
import json
import logging
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from agentrl_core.api.errors import ConfigError
from agentrl_core.runs.atomic import replace_file
from agentrl_tinker.adapters import Shape
from agentrl_tinker.refusals import Refusal

logger = logging.getLogger(__name__)

Kind = Literal["weights", "sampler_weights", "external_weights"]
SCHEME = "tinker://"
_KINDS = ("weights", "sampler_weights", "external_weights")
_OWNER = "[0-9a-f]" * 24
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:=+-]{0,199}")


def owner_of(key: str) -> str:
    """The folder of an API key, from which nobody can tell the key."""
    return hashlib.sha256(key.encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Checkpoint:
    """A saved adapter; times are seconds since 1970."""

    run: str
    kind: str
    name: str
    base_model: str
    shape: Mapping[str, Any]
    folder: str
    bytes: int
    time: float
    expires: float | None = None
    user_metadata: Mapping[str, str] | None = None

    @property
    def path(self) -> str:
        return f"{SCHEME}{self.run}/{self.kind}/{self.name}"

    @property
    def adapter_shape(self) -> Shape:
        return Shape(**self.shape)


class Store:
    """The checkpoints below a folder, which is this server's until ``close``. Other files there are left alone.

    Raises:
        ConfigError: another server uses the folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = (root / ".tinker-lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"--state: another server uses {root}. Stop it, or name another folder") from error
        except OSError as error:
            logger.warning("%s has no locks (%s): start no second server on this folder", root, error)
        self.scratch = root / ".tinker-samplers"
        """Weights of samplers without a name, which live as long as the server."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir()
        self._remove_leftovers()

    def close(self) -> None:
        self._lock.close()

    def save(
        self,
        owner: str,
        checkpoint: Checkpoint,
        files: Mapping[str, bytes],
        overwrite: bool = False,
    ) -> Checkpoint:
        """Write a checkpoint; its ``folder``, ``bytes`` and ``time`` are set here.

        Raises:
            Refusal: there is one of this name, and ``overwrite`` is not set.
        """
        check_name(checkpoint.name)
        entry = self._entry(owner, checkpoint.run, checkpoint.kind, checkpoint.name)
        before = self._read(entry)
        if before is not None and not overwrite:
            raise Refusal(f"path: {checkpoint.path} exists already. Choose another name, or set overwrite=True")
        folder = write_files(entry.parent / f"{checkpoint.name}-{uuid.uuid4().hex}", files)
        size = sum(len(content) for content in files.values())
        saved = replace(checkpoint, folder=folder.name, bytes=size, time=time.time())
        replace_file(entry, json.dumps(asdict(saved)))
        if before is not None:
            shutil.rmtree(entry.parent / before.folder, ignore_errors=True)
        return saved

    def find(self, owner: str, path: str) -> tuple[Checkpoint, Path]:
        """A checkpoint and its folder.

        Raises:
            Refusal: the key has none of this name.
        """
        found = self._read(self._entry(owner, *self.parse(path)))
        if found is None:
            raise Refusal(
                f"path: there is no checkpoint {path} of this API key; it may have expired or been deleted", 404
            )
        return found, self.root / owner / found.run / found.kind / found.folder

    def parse(self, path: str) -> tuple[str, str, str]:
        parts = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in _KINDS:
            raise Refusal(
                f"path: {path!r} is not of the form tinker://RUN/KIND/NAME with a KIND of {', '.join(_KINDS)}"
            )
        run, kind, name = parts
        check_name(run)
        check_name(name)
        return run, kind, name

    def all(self, owner: str, run: str | None = None) -> list[Checkpoint]:
        """Those of a key, the oldest first."""
        if run is not None:
            check_name(run)
        pattern = f"{run or '*'}/*/*.json"
        found = (self._read(entry) for entry in (self.root / owner).glob(pattern))
        return sorted((each for each in found if each is not None), key=lambda each: each.time)

    def delete(self, owner: str, path: str) -> None:
        checkpoint, folder = self.find(owner, path)
        self._entry(owner, checkpoint.run, checkpoint.kind, checkpoint.name).unlink()
        shutil.rmtree(folder, ignore_errors=True)

    def _entry(self, owner: str, run: str, kind: str, name: str) -> Path:
        return self.root / owner / run / kind / f"{name}.json"

    def _read(self, entry: Path) -> Checkpoint | None:
        try:
            checkpoint = Checkpoint(**json.loads(entry.read_text()))
        except FileNotFoundError:
            return None
        if checkpoint.expires is not None and checkpoint.expires < time.time():
            entry.unlink(missing_ok=True)
            shutil.rmtree(entry.parent / checkpoint.folder, ignore_errors=True)
            return None
        return checkpoint

    def _remove_leftovers(self) -> None:
        """Folders that a killed server began to write, and those that it had replaced; and what has expired."""
        for kind in self._kinds():
            kept = {found.folder for entry in kind.glob("*.json") if (found := self._read(entry)) is not None}
            for folder in kind.iterdir():
                if folder.is_dir() and folder.name not in kept:
                    shutil.rmtree(folder, ignore_errors=True)

    def _kinds(self) -> Iterator[Path]:
        for kind in _KINDS:
            yield from self.root.glob(f"{_OWNER}/*/{kind}")


def check_name(name: str) -> None:
    """Raises Refusal for what is no safe name of a file."""
    if not _NAME.fullmatch(name):
        raise Refusal(
            f"path: {name!r} is no name of a checkpoint; allowed are letters, digits and . _ - : = +, at most 200"
        )


def write_files(folder: Path, files: Mapping[str, bytes]) -> Path:
    """A new folder with these files, on the disk when this returns."""
    folder.mkdir(parents=True)
    for name, content in files.items():
        replace_file(folder / name, content)
    return folder
