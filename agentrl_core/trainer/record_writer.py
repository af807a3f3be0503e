"""Writes a run's rollout files while the run goes on: on Ray in a separate process."""

import asyncio
import logging
import textwrap
from collections.abc import Coroutine, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from agentrl_core.api import WorkerError
from agentrl_core.api.dataset import Split
from agentrl_core.config.schema import Records
from agentrl_core.controller.runtime import ActorDiedError, ActorHandle, ActorOptions, Runtime
from agentrl_core.protocol import DataProto
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.rollout.summaries import Handed, handed, whole
from agentrl_core.runs.records import RolloutWriter
from agentrl_core.trainer.outcomes import Credit, make_records

logger = logging.getLogger(__name__)
SHOWN_CHARACTERS = 500
"""Of the names of lost trajectories."""
SAMPLED_PROMPTS = 16
"""Of a file, with ``rollout.records=sample``: the first one, and others at equal distances."""
MOST_WAITING = 2
"""Files that are handed over and not on the disk; the run waits before it hands over another."""


class RecordProcess:
    """Makes lines of trajectories and writes them.

    Args:
        rollouts_dir: on this host.
        config: of the run. Unpickled, it makes the modules of files importable: trajectories hold objects of theirs.
    """

    def __init__(self, rollouts_dir: Path, config: Any) -> None:
        self._writer = RolloutWriter(rollouts_dir)

    def write(self, step: int, split: Split, results: Sequence[Handed], credits: Sequence[Credit]) -> list[str]:
        """Write the file of a step; return the ids of trajectories that are lost, and have no line."""
        lost: list[str] = []
        self._writer.write(step, split, make_records(step, split, whole(results, lost), credits))
        return lost


class RecordWriter:
    """The run's side of it.

    Args:
        runtime: where the process is.
        rollouts_dir: on this host.
        records: what is kept.
        config: as of :class:`RecordProcess`.
    """

    def __init__(self, runtime: Runtime, rollouts_dir: Path, records: Records, config: Any = None) -> None:
        self._runtime = runtime
        self._config = config
        self._rollouts_dir = rollouts_dir
        self._records = records
        self._waiting: list[asyncio.Task[None]] = []

    @cached_property
    def _process(self) -> ActorHandle:
        options = ActorOptions(num_cpus=0, node=self._runtime.here)
        arguments = self._rollouts_dir, self._config
        return self._runtime.actor(RecordProcess, *arguments, name="records", options=options)

    def write(
        self, step: int, split: Split, results: Sequence[TrajectoryResult], batches: Sequence[DataProto] = ()
    ) -> None:
        """Hand over the trajectories of a step, with the batches that were trained.

        Raises:
            OSError, WorkerError: an earlier file, or on the local runtime this one, could not be written.
        """
        if self._records == "none":
            return
        if self._records == "sample":
            results, batches = sampled(results, batches)
        self.wait(MOST_WAITING - 1)
        call = self._process.call("write", step, split, handed(results), [*map(Credit.of, batches)])
        self._waiting.append(self._runtime.run(_begun(_reported(step, split, call))))
        self.wait(MOST_WAITING)

    def wait(self, most: int = 0) -> None:
        """Return when at most so many files wait; raises as :meth:`write`."""
        while len(self._waiting) > most or (self._waiting and self._waiting[0].done()):
            try:
                self._runtime.run(_ended(self._waiting.pop(0)))
            except ActorDiedError as error:
                raise WorkerError(
                    f"rollout.records: {error}. It wrote the rollout files; `agentrl train … --resume` continues from "
                    "the newest checkpoint, before which no record is missing"
                ) from error
            except WorkerError as error:
                raise error.__cause__ if isinstance(error.__cause__, OSError) else error from None


async def _reported(step: int, split: Split, call: Coroutine[Any, Any, list[str]]) -> None:
    if lost := await call:
        logger.warning(
            "%d trajectories of step %d (%s) have no record, because the node that kept them has died: %s",
            len(lost), step, split, textwrap.shorten(", ".join(lost), SHOWN_CHARACTERS, placeholder=" …"),
        )  # fmt: skip


async def _begun(call: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    task = asyncio.ensure_future(call)
    # So far that another process has it.
    await asyncio.sleep(0)
    return task


async def _ended(task: "asyncio.Task[None]") -> None:
    # A second signal cancels all tasks.
    if not task.cancelled():
        await task


def sampled(
    results: Sequence[TrajectoryResult], batches: Sequence[DataProto] = ()
) -> tuple[Sequence[TrajectoryResult], Sequence[DataProto]]:
    """All samples of :data:`SAMPLED_PROMPTS` prompts, and their rows of the batches."""
    prompts = list(dict.fromkeys(result.prompt for result in results))
    count = min(SAMPLED_PROMPTS, len(prompts))
    chosen = {prompts[number * len(prompts) // count] for number in range(count)}
    kept = [result for result in results if result.prompt in chosen]
    names = {result.trajectory_id for result in kept}

    def rows_of(batch: DataProto) -> DataProto:
        found = batch.non_tensor_batch["trajectory_id"].tolist()
        return batch.select_idxs([row for row, name in enumerate(found) if name in names])

    return kept, [rows_of(batch) if len(batch) else batch for batch in batches]
