"""Files of a node for a driver on another one that does not share its disk, in pieces that fit into memory."""

import os
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl_core.api.errors import CheckpointError
from agentrl_core.controller import Worker, register
from agentrl_core.controller.decorator import Dispatch
from agentrl_core.controller.dispatch import Call, DispatchMode, Plan, Ranks
from agentrl_core.engine_kit.ports import host_address

PIECE_BYTES = 64 << 20


def _plan_some(group: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    ranks, *rest = args
    calls: list[Call | None] = [(tuple(rest), kwargs) if rank in ranks else None for rank in range(group.world_size)]
    return Plan(calls, list(ranks), list)


SOME = DispatchMode("SOME", _plan_some)
"""Only the ranks that the first argument names run, with the other arguments."""


@dataclass(frozen=True)
class Piece:
    """Part of a file; the first one truncates it.

    Args:
        name: of the file, relative to its folder.
        offset: of ``data`` in it.
    """

    name: str
    offset: int
    data: bytes

    def write(self, folder: Path) -> None:
        """Write it into a folder."""
        file = folder / self.name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("r+b" if self.offset else "wb") as handle:
            handle.seek(self.offset)
            handle.write(self.data)


def pieces(folder: Path) -> Iterator[Piece]:
    """The files of a folder and its folders."""
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        with file.open("rb") as handle:
            offset, data = 0, handle.read(PIECE_BYTES)
            while data or not offset:
                yield Piece(str(file.relative_to(folder)), offset, data)
                offset += len(data)
                if not (data := handle.read(PIECE_BYTES)):
                    break


def _node() -> str:
    return f"{socket.gethostname()} ({host_address()})"


class FarFiles(Worker):
    """Hands files of its node over, and takes some."""

    _sent: Iterator[Piece] | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sees(self, file: str) -> tuple[str, bool]:
        """This node, and whether this file is there; if not, its folder must be possible.

        Raises:
            CheckpointError: this node cannot have it.
        """
        node = _node()
        if os.path.exists(file):
            return node, True
        folder = Path(file).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f".{os.getpid()}.probe").touch()
            (folder / f".{os.getpid()}.probe").unlink()
        except OSError as error:
            raise CheckpointError(
                f"node {node} does not share {folder} with the driver and cannot make it: {error.strerror}. Training "
                "processes write their part of a checkpoint there: choose another trainer.output_dir, or a shared one"
            ) from error
        return node, False

    @register(dispatch_mode=SOME)
    def send_piece(self, folder: str) -> Piece | None:
        """The next piece of a folder; None at its end, when it has been removed."""
        if self._sent is None:
            self._sent = pieces(Path(folder))
        piece = next(self._sent, None)
        if piece is None:
            self._sent = None
            shutil.rmtree(folder, ignore_errors=True)
        return piece

    @register(dispatch_mode=SOME)
    def take_piece(self, folder: str, piece: Piece) -> None:
        """Write a piece into a folder of this node.

        Raises:
            CheckpointError: the node cannot, because its disk is full for one.
        """
        try:
            piece.write(Path(folder))
        except OSError as error:
            raise CheckpointError(
                f"node {_node()} cannot write {Path(folder) / piece.name}: {error.strerror}. Training processes read "
                "their part of a checkpoint from there: free space, or choose another trainer.output_dir"
            ) from error

    @register(dispatch_mode=SOME)
    def remove_folder(self, folder: str) -> None:
        shutil.rmtree(folder, ignore_errors=True)
