"""How the trajectories of a step come to their file: which ones, in which process, and how many wait."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from agentrl_core.api import AgentLoopOutput, Termination, WorkerError
from agentrl_core.api.tree import Tree
from agentrl_core.config import load_config
from agentrl_core.config.schema import Records
from agentrl_core.controller import LocalRuntime, Runtime
from agentrl_core.plugins.file_plugin import load_file_object
from agentrl_core.rollout.batching import to_data_proto
from agentrl_core.rollout.loop_output import adopt
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.runs import records as records_module
from agentrl_core.runs.records import read_rollouts
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.trainer import record_writer
from agentrl_core.trainer.checkpoint import CheckpointStore
from agentrl_core.trainer.record_writer import RecordWriter, sampled

Fit = Callable[..., RunDir]


def results(prompts: int, samples: int = 2) -> list[TrajectoryResult]:
    made = []
    for number in range(prompts * samples):
        prompt, sample = divmod(number, samples)
        tree, name = Tree(), f"t{number}"
        row = AgentLoopOutput([prompt], [5, 6], [1, 1], [-0.5, -1.0], Termination.COMPLETED, name)
        rows = adopt("by hand", tree, row)
        made.append(
            TrajectoryResult({"uid": f"p{prompt}", "sample_index": sample}, name, row.termination, rows, tree=tree)
        )
        made[-1].pack()
    return made


def trained(found: list[TrajectoryResult]) -> Any:
    batch = to_data_proto(found, 0, {})
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"] * 2
    batch.batch["advantages"] = batch.batch["rollout_log_probs"] + 1
    return batch


def lines(folder: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"step-{step:06d}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("keeps", ["all", "sample", "none"])
def test_a_sample_is_whole_groups_at_equal_distances(tmp_path: Path, keeps: Records) -> None:
    found = results(prompts=40)
    with LocalRuntime() as runtime:
        RecordWriter(runtime, tmp_path, keeps).write(1, "train", found, [trained(found)])
    if keeps == "none":
        assert not list(tmp_path.iterdir())
        return
    written = lines(tmp_path, 1)
    uids = [line["agents"][0]["uid"] for line in written]
    expected = range(40) if keeps == "all" else [number * 40 // 16 for number in range(16)]
    assert uids == [f"p{number}" for number in expected for _ in range(2)]
    for line in written:
        turn = line["nodes"][1]
        assert (turn["advantages"], turn["old_log_probs"]) == ([0.5, 0.0], [-1.0, -2.0])


def test_a_sample_of_few_prompts_is_all_of_them() -> None:
    found = results(prompts=3)
    assert sampled(found) == (found, [])
    assert sampled([]) == ([], [])


class Slow:
    """Stands for a process that takes its time, and counts the files that it was given and has not written."""

    def __init__(self) -> None:
        self.waiting = self.most = self.written = 0
        self.error: BaseException | None = None

    async def call(self, method: str, *args: Any) -> None:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        for _ in range(50):
            await asyncio.sleep(0)
        self.waiting -= 1
        if self.error is not None:
            raise self.error
        self.written += 1


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[Slow, RecordWriter]]:
    with LocalRuntime() as runtime:
        writer, process = RecordWriter(runtime, tmp_path, "all"), Slow()
        writer.__dict__["_process"] = process
        yield process, writer


def test_the_run_waits_rather_than_let_files_pile_up(slow: tuple[Slow, RecordWriter]) -> None:
    process, writer = slow
    for step in range(1, 8):
        writer.write(step, "train", [])
    assert process.most == record_writer.MOST_WAITING and process.written >= 5
    writer.wait()
    assert process.written == 7


def test_an_error_of_the_process_is_that_of_the_file(slow: tuple[Slow, RecordWriter]) -> None:
    process, writer = slow
    process.error = WorkerError("actor 'records', in 'write': OSError")
    process.error.__cause__ = OSError(28, "No space left on device", "step-000001.jsonl")
    writer.write(1, "train", [])
    with pytest.raises(OSError, match="No space left on device: 'step-000001.jsonl'"):
        writer.wait()
    writer.wait()


def test_in_this_process_an_error_is_raised_at_once(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("a file")
    with LocalRuntime() as runtime, pytest.raises(OSError, match="rollouts"):
        RecordWriter(runtime, tmp_path / "rollouts", "all").write(1, "train", results(1))


def test_a_checkpoint_is_published_after_the_records_before_it(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written only when the run waits for all of them."""
    waiting: list[tuple[Any, ...]] = []
    missing: list[tuple[int, list[Any]]] = []

    def write(writer: RecordWriter, *args: Any) -> None:
        waiting.append(args)

    def wait(writer: RecordWriter, most: int = 0) -> None:
        waiting.clear()

    def publish(store: CheckpointStore, state: Any, checksums: Any) -> Any:
        missing.append((state.step, [each for each in waiting if each[0] <= state.step]))
        return original(store, state, checksums)

    original = CheckpointStore.publish
    monkeypatch.setattr(RecordWriter, "write", write)
    monkeypatch.setattr(RecordWriter, "wait", wait)
    monkeypatch.setattr(CheckpointStore, "publish", publish)
    fit({"trainer.steps": 3, "trainer.checkpoint.interval": 1, "rollout.engine": {"name": "scripted"}})
    assert missing == [(1, []), (2, []), (3, [])] and not waiting


def test_a_large_file_is_compressed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "PLAIN_BYTES", 2000)
    with LocalRuntime() as runtime:
        writer = RecordWriter(runtime, tmp_path, "all")
        for step, prompts in ((1, 1), (2, 20)):
            writer.write(step, "train", results(prompts))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step-000001.jsonl", "step-000002.jsonl.gz"]
    assert len(list(read_rollouts(tmp_path / "step-000002.jsonl.gz"))) == 40


LOOP = """
from dataclasses import dataclass
from agentrl_core.api import AgentLoopBase

@dataclass
class Board:
    move: int

class Plays(AgentLoopBase):
    async def run(self, sampling_params, *, session, **row): ...
"""


@pytest.mark.ray
def test_on_ray_another_process_writes_and_its_death_ends_the_run(
    ray_runtime: Runtime, tmp_path: Path, tiny_run: Any
) -> None:
    found = results(prompts=3)
    (tiny_run.folder / "loop.py").write_text(LOOP)
    config = load_config(tiny_run({"rollout.agent.loops": ["./loop.py:Plays"]}))
    # An object of a file that only the run's configuration makes importable.
    board = sys.modules[load_file_object(config.rollout.agent.loops[0].ref).__module__].Board(3)
    found[0].outputs[0].extra_fields = {"board": board}
    tmp_path = tmp_path / "rollouts"
    writer = RecordWriter(ray_runtime, tmp_path, "all", config)
    writer.write(1, "train", found, [trained(found)])
    writer.wait()
    with LocalRuntime() as runtime:
        RecordWriter(runtime, tmp_path / "local", "all").write(1, "train", found, [trained(found)])
    assert lines(tmp_path, 1) == lines(tmp_path / "local", 1)
    assert lines(tmp_path, 1)[0]["agents"][0]["rows"][0]["extra_fields"] == {"board": {"move": 3}}
    (tmp_path / "step-000002.jsonl").mkdir()
    writer.write(2, "train", found)
    with pytest.raises(OSError, match="step-000002.jsonl"):
        writer.wait()
    os.kill(process_of(writer), signal.SIGKILL)
    writer.write(3, "train", found)
    with pytest.raises(WorkerError, match="(?s)rollout.records: .*died.*continues from the newest checkpoint"):
        writer.wait()
    assert not list(tmp_path.glob(".*"))


def process_of(writer: RecordWriter) -> int:
    import ray

    actor = cast(Any, writer._process)._actor
    return int(ray.get(actor.__ray_call__.remote(lambda self: os.getpid())))
