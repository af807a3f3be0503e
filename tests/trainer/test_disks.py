"""Checkpoints on nodes that do not share a disk. Here a node is a folder in the place of its root."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from agentrl_core.api import CheckpointError
from agentrl_core.trainer.disks import Disks
from agentrl_core.workers import far_files
from agentrl_core.workers.far_files import FarFiles, Piece
from agentrl_core.workers.protocols import Actor


class Ranks:
    """Rank 0 is on the driver's node; the others see paths under a root of their own.

    Args:
        roots: of the others.
    """

    def __init__(self, *roots: Path) -> None:
        self.roots = [Path("/"), *roots]
        self.workers = [FarFiles() for _ in self.roots]
        self.calls: list[str] = []

    def there(self, rank: int, path: str) -> Path:
        return self.roots[rank] / path.lstrip("/")

    def sees(self, file: str) -> list[tuple[str, bool]]:
        """A node has the name of its root: here all are on one host."""
        return [
            (str(self.roots[rank]), worker.sees(str(self.there(rank, file)))[1])
            for rank, worker in enumerate(self.workers)
        ]

    def _some(self, method: str, ranks: Sequence[int], folder: str, *args: Any) -> list[Any]:
        self.calls.append(method)
        return [getattr(self.workers[rank], method)(str(self.there(rank, folder)), *args) for rank in ranks]

    def send_piece(self, ranks: Sequence[int], folder: str) -> list[Piece | None]:
        return self._some("send_piece", ranks, folder)

    def take_piece(self, ranks: Sequence[int], folder: str, piece: Piece) -> None:
        self._some("take_piece", ranks, folder, piece)

    def remove_folder(self, ranks: Sequence[int], folder: str) -> None:
        self._some("remove_folder", ranks, folder)


FILES = {"actor/model.safetensors": bytes(range(256)) * 3, "actor/training/__1_0.distcp": b"shard", "actor/empty": b""}


def write(folder: Path, files: dict[str, bytes] = FILES) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Ranks], tuple[Disks, Path]]:
    monkeypatch.setattr(far_files, "PIECE_BYTES", 100)
    (tmp_path / "run").mkdir()
    return lambda ranks: (Disks(cast(Actor, ranks), tmp_path / "run"), tmp_path / "run")


def test_what_other_nodes_wrote_comes_here_whole_and_is_gone_there(make: Any, tmp_path: Path) -> None:
    # Two ranks of one node: it hands its files over once.
    ranks = Ranks(tmp_path / "a", tmp_path / "b", tmp_path / "b")
    disks, run = make(ranks)
    step = run / "step"
    write(step, {"actor/training/__0_0.distcp": b"first"})
    write(ranks.there(1, str(step)))
    write(ranks.there(2, str(step)), {"actor/training/__2_0.distcp": bytes(200)})
    assert disks.collect(step) == {*FILES, "actor/training/__2_0.distcp"}
    expected = {"actor/training/__0_0.distcp": b"first", "actor/training/__2_0.distcp": bytes(200)}
    assert content(step) == {**FILES, **expected}
    assert not ranks.there(1, str(step)).exists() and not ranks.there(2, str(step)).exists()


def test_what_a_killed_run_left_on_another_node_does_not_come_with_it(make: Any, tmp_path: Path) -> None:
    ranks = Ranks(tmp_path / "a")
    disks, run = make(ranks)
    write(ranks.there(1, str(run / "step")))
    disks.clear(run / "step")
    write(run / "step", {"own": b"1"})
    disks.collect(run / "step")
    assert content(run / "step") == {"own": b"1"}


def test_other_nodes_read_a_checkpoint_under_the_same_path_and_keep_what_they_had(make: Any, tmp_path: Path) -> None:
    ranks = Ranks(tmp_path / "a")
    disks, run = make(ranks)
    checkpoint = run / "checkpoints" / "step"
    write(checkpoint)
    # An earlier run of that node, which happens to have the same path.
    write(ranks.there(1, str(checkpoint)), {"theirs": b"1"})
    with disks.lent(checkpoint, run / "checkpoints" / ".step.link", ("actor/training",)) as everywhere:
        assert content(everywhere / "actor") == content(checkpoint / "actor")
        assert content(ranks.there(1, str(everywhere))) == {"actor/training/__1_0.distcp": b"shard"}
    assert not ranks.there(1, str(everywhere)).exists() and not everywhere.is_symlink()
    assert content(checkpoint) == FILES and content(ranks.there(1, str(checkpoint))) == {"theirs": b"1"}


def test_where_the_disk_is_shared_nothing_travels(make: Any) -> None:
    ranks = Ranks(Path("/"))
    disks, run = make(ranks)
    write(run / "step")
    disks.clear(run / "step")
    assert disks.collect(run / "step") == set()
    with disks.lent(run / "step", run / ".step.link", ("actor",)) as everywhere:
        assert everywhere == run / "step"
    assert content(run / "step") == FILES and ranks.calls == []


def test_a_node_that_cannot_have_the_directory_is_named_with_it(make: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("no directory")
    with pytest.raises(CheckpointError, match=r"^node \S+ \(\S+\) does not share /.*/run with the driver and cannot"):
        make(Ranks(tmp_path / "a"))


def test_a_node_without_space_for_a_piece_is_named_with_the_file(make: Any, tmp_path: Path) -> None:
    ranks = Ranks(tmp_path / "a")
    disks, run = make(ranks)
    write(run / "step")
    # A disk without space.
    (there := ranks.there(1, str(run / ".step.link")) / "actor").mkdir(parents=True)
    (there / "model.safetensors").symlink_to("/dev/full")
    with (
        pytest.raises(CheckpointError, match=r"^node \S+ \(\S+\) cannot write /.*model.safetensors: No space left"),
        disks.lent(run / "step", run / ".step.link", ("actor",)),
    ):
        pass
