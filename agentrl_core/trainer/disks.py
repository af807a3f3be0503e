"""Checkpoints where nodes of the training processes do not share the driver's disk: files go over the network."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl_core.workers.far_files import pieces
from agentrl_core.workers.protocols import Actor

logger = logging.getLogger(__name__)


class Disks:
    """Knows which nodes do not see what this process writes into the run's directory.

    Args:
        actor: whose processes are asked. One of each such node hands files over.
        directory: of the run; exists.

    Raises:
        CheckpointError: a node cannot have the directory.
    """

    def __init__(self, actor: Actor, directory: Path) -> None:
        self._actor = actor
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".shared-") as marker:
            found = actor.sees(marker.name)
        far: dict[str, int] = {}
        for rank, (node, is_seen) in enumerate(found):
            if not is_seen:
                far.setdefault(node, rank)
        self._far = list(far.values())
        if far:
            logger.info(
                "%s: not shared with %s; checkpoints go over the network", directory, " and ".join(far)
            )  # fmt: skip

    def clear(self, folder: Path) -> None:
        """Remove what an earlier run has left there on other nodes."""
        if self._far:
            self._actor.remove_folder(self._far, str(folder))

    def collect(self, folder: Path) -> set[str]:
        """Move the files that other nodes have in this folder into that of this process; their relative paths."""
        waiting, names = self._far, set[str]()
        while waiting:
            sent = dict(zip(waiting, self._actor.send_piece(waiting, str(folder)), strict=True))
            for piece in sent.values():
                if piece is not None:
                    piece.write(folder)
                    names.add(piece.name)
            waiting = [rank for rank, piece in sent.items() if piece is not None]
        return names

    @contextmanager
    def lent(self, checkpoint: Path, scratch: Path, folders: tuple[str, ...]) -> Iterator[Path]:
        """The path under which all nodes have these folders of a checkpoint, until the end of the block.

        Args:
            scratch: a path in the run's directory that is not used, for nodes without the checkpoint.
        """
        if not self._far:
            yield checkpoint
            return
        scratch.parent.mkdir(exist_ok=True)
        scratch.unlink(missing_ok=True)
        scratch.symlink_to(checkpoint)
        try:
            for folder in folders:
                for piece in pieces(checkpoint / folder):
                    self._actor.take_piece(self._far, str(scratch / folder), piece)
            yield scratch
        finally:
            scratch.unlink(missing_ok=True)
            self.clear(scratch)
