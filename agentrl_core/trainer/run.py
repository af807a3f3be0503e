"""One run on disk, in trackers and in hooks: directory, records, checkpoints, status."""

import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import cast

import rich

from agentrl_core.api import (
    AgentRLError,
    CheckpointError,
    ConfigError,
    HookContext,
    PromptSampler,
    TrackerContext,
)
from agentrl_core.api.dataset import Split
from agentrl_core.api.training_backend import TRAINING_FOLDER
from agentrl_core.config import ResolvedConfig, to_dict, to_yaml
from agentrl_core.controller.runtime import Runtime
from agentrl_core.fsdp2.model_files import check_saved
from agentrl_core.plugins.hooks import HookCaller
from agentrl_core.plugins.lock import write_lock
from agentrl_core.protocol import DataProto
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.rollout.summaries import handed, whole
from agentrl_core.runs.atomic import replace_file
from agentrl_core.runs.records import records_of, to_json
from agentrl_core.runs.run_dir import RunDir, RunState, RunStatus
from agentrl_core.runs.trajectory_view import show_trajectory
from agentrl_core.trainer.algorithm import Algorithms
from agentrl_core.trainer.checkpoint import (
    CheckpointStore,
    Position,
    TrainerState,
    actor_folders,
    file_stats,
    options_of,
    plugin_refs,
    read_state,
    resumed_state,
    share_files,
    unchanged_files,
)
from agentrl_core.trainer.copies import Copy
from agentrl_core.trainer.disks import Disks
from agentrl_core.trainer.health import Health
from agentrl_core.trainer.outcomes import Credit, ended_trajectory, make_records
from agentrl_core.trainer.record_writer import RecordWriter
from agentrl_core.trainer.trackers import Trackers
from agentrl_core.workers.protocols import Actor, Critic

logger = logging.getLogger(__name__)
_TOKENIZER_FILES = ("*token*", "*.jinja", "vocab.*", "merges.txt", "spiece.model", "generation_config.json")


class LogFile(logging.FileHandler):
    """``log.txt``. A full disk is reported by the run's own error, not by a traceback for every line."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        pass


class Run:
    """One run, in a directory that no other process may use meanwhile.

    Args:
        config: resolved.
        steps: of the whole run.
        data_fingerprint: of the training prompts in their order.
        sampler, algorithms: whose states checkpoints keep.
        stop: ends the run after this step, for hooks.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        steps: int,
        data_fingerprint: str,
        sampler: PromptSampler,
        algorithms: Algorithms,
        stop: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._directory = RunDir(Path(config.trainer.output_dir).resolve() / config.trainer.name)
        self.path = self._directory.path
        self._config = config
        self._steps = steps
        self._sampler = sampler
        self._algorithms = algorithms
        self._stop = stop
        self.health = Health(config, self.path, algorithms.loss_reads_advantages)
        self._store = CheckpointStore(self._directory.checkpoints_dir, config.trainer.checkpoint.keep)
        self._checkpoint: Path | None = None
        """The last one of this run, or the one that it resumes from."""
        self._stats: Mapping[str, tuple[int, int]] = {}
        self._shared: Mapping[str, str] = {}
        """What the checkpoint that is being written may share with that one: SHA-256 by file."""
        self._state = TrainerState(0, None, None, data_fingerprint)
        self._written: TrainerState | None = None
        """That of the checkpoint that is being written."""
        self._previous: RunState | None = None
        self.first_step = 1
        """The first step that this process runs; known once the run records."""
        self.records: RecordWriter
        self.trackers = Trackers()
        self._finished: int | None = None
        self._status: RunStatus = "running"
        self.hooks = HookCaller([])
        # Lines are kept until begin(), because log.txt belongs to an earlier run until then.
        file = LogFile(self._directory.log_file, encoding="utf-8", delay=True)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._log = MemoryHandler(10_000, flushLevel=logging.CRITICAL + 1, target=file)

    @property
    def is_complete(self) -> bool:
        """Whether ``trainer.resume`` asks to go on with a run of which all steps ran: there is nothing to do."""
        resume = self._config.trainer.resume
        if resume not in ("auto", "intact"):
            return False
        state = self._directory.read_state()
        if state is None or not state.finished or state.step != self._steps:
            return False
        # Its last steps run again where their checkpoint is damaged.
        return resume == "auto" or (last := self._store.find(resume)) is None or read_state(last).step == self._steps

    @property
    def began(self) -> bool:
        """Whether this process has taken over the directory: what is there now is of its run."""
        return self._finished is not None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Hold the directory, decide what to resume, and report to trackers and hooks how the run ended.

        Only ``log.txt`` changes before :meth:`begin`: a run that could not start leaves an earlier one intact.

        Raises:
            ConfigError: another process uses the directory, or no step is left.
            CheckpointError: the checkpoint to resume from is damaged.
            PluginDriftError: the checkpoint was made with other plugin versions.
        """
        self._directory = RunDir.create(self.path.parent, self.path.name)
        with self._directory.locked():
            logging.getLogger().addHandler(self._log)
            status: RunStatus = "failed"
            try:
                self._decide()
                yield
                status = "completed" if self._finished == self._steps else "stopped"
            except KeyboardInterrupt:
                status = "stopped"
                raise
            except BaseException as error:
                # To the file only: the caller reports what it raises.
                when = "did not start" if self._finished is None else f"failed at step {self._finished + 1}"
                text = f"the run {when}: {error}"
                self._log.handle(logger.makeRecord(logger.name, logging.ERROR, __file__, 0, text, (), None))
                raise
            finally:
                self._end(status)

    def _decide(self) -> None:
        """Decide whether to resume, and from which checkpoint."""
        self._previous = self._directory.read_state()
        self._checkpoint = self._store.find(self._config.trainer.resume)
        if self._checkpoint is not None:
            self._stats = file_stats(self._checkpoint)
            self._state = resumed_state(self._config, self._checkpoint, self._state.data_fingerprint)
        elif self._config.trainer.resume == "auto":
            self._point_to_superseded()
        self.first_step = self._state.step + 1
        # A run that was killed after its last checkpoint only needs its status.
        ended = self._previous is None or self._previous.finished or not self._resumes_in_place
        if self.first_step > self._steps and ended:
            raise ConfigError(
                f"trainer.steps: nothing left to run: {self._checkpoint} is at step {self._state.step} of "
                f"{self._steps}. Raise trainer.steps, or start again with trainer.resume=never or another "
                "trainer.name"
            )

    def _point_to_superseded(self) -> None:
        """Point to the checkpoint of a run that was moved, if the last run ended before its first checkpoint."""
        archives = self._directory.superseded_dir.glob("*/checkpoints/latest")
        found = sorted(archives, key=lambda path: int(path.parts[-3]))
        if found:
            logger.warning(
                "%s has no checkpoint, so the run starts at step 1. An earlier run that was moved has one: "
                "trainer.resume=%s", self.path, found[-1].parents[1],
            )  # fmt: skip

    @property
    def _resumes_in_place(self) -> bool:
        own = os.path.realpath(self._directory.checkpoints_dir)
        return self._checkpoint is not None and os.path.realpath(self._checkpoint.parent) == own

    def _make_room(self) -> None:
        moved = self._directory.archive()
        if moved is not None and self._previous is not None and not self._previous.finished:
            logger.warning(
                "moved an unfinished run (step %d) from %s to %s. To continue it: trainer.resume=%s. To continue a run "
                "instead of starting again: --resume",
                self._previous.step, self.path, moved, moved,
            )  # fmt: skip
        elif moved is not None:
            logger.info("moved the earlier run in %s to %s", self.path, moved)

    def _build_listeners(self) -> None:
        config = self._config
        context = TrackerContext(config.trainer.name, self.path, self._steps, to_dict(config), self.first_step)
        self.trackers = Trackers((slot.name, partial(slot.build, context)) for slot in config.trainer.trackers)
        contexts = [(hook, HookContext(hook.registered_name, self.path, self._stop)) for hook in config.hooks]
        self.hooks = HookCaller([(context.name, hook.build(context)) for hook, context in contexts])

    def load(self, workers: Mapping[str, Actor | Critic], copies: Mapping[str, Copy]) -> None:
        """Load the checkpoint that the run resumes from, if there is one. Nothing on disk changes.

        Args:
            workers: with a part of each checkpoint, by its folder there; the first one is an actor.
            copies: the same, of policies whose weights this process keeps.
        """
        checkpoint = self._checkpoint
        self._workers, self._copies = workers, copies
        self._disks = Disks(cast(Actor, next(iter(workers.values()))), self.path)
        if checkpoint is not None:
            logger.info("resuming from %s, after step %d of %d", checkpoint, self._state.step, self._steps)
            self._sampler.load_state_dict(self._state.sampler)
            self._algorithms.state = self._state.algorithm
            self.health.streaks = list(self._state.streaks)
            for role in (*workers, *copies):
                if not (checkpoint / role).is_dir():
                    raise CheckpointError(f"{checkpoint} has no {role}, which this run needs")
            scratch = self._directory.checkpoints_dir / f".{checkpoint.name}.link"
            states = tuple(f"{role}/{TRAINING_FOLDER}" for role in workers)
            with self._disks.lent(checkpoint, scratch, states) as everywhere, self._backend_named(checkpoint):
                for role, worker in workers.items():
                    worker.load_checkpoint(str(everywhere / role))
            for role, copy in copies.items():
                copy.load_checkpoint(checkpoint / role)

    @contextmanager
    def _backend_named(self, checkpoint: Path) -> Iterator[None]:
        """What cannot be loaded may be another training backend's."""
        try:
            yield
        except AgentRLError as error:
            now = self._config.trainer.backend.name
            then = options_of(checkpoint).get("trainer.backend.name", now)
            if then == now:
                raise
            raise CheckpointError(
                f"{error}\nThe training backend {then!r} wrote it, and this run has {now!r}. Set trainer.backend.name="
                f"{then} again, or start a new run from its weights: trainer.resume=never, model.path="
                f"{next(iter(actor_folders(checkpoint).values()))}"
            ) from error

    def begin(self, runtime: Runtime) -> int:
        """Take over the directory, once everything has started; returns the last finished step."""
        config = self._config
        self.records = RecordWriter(runtime, self._directory.rollouts_dir, config.rollout.records, config)
        self._directory.remove_leftovers()
        if self._resumes_in_place:
            for problem in self._directory.lost_records():
                logger.warning(problem)
            moved = self._directory.supersede_after(self._state.step)
            self._store.mark(self._state)
            if moved is not None:
                logger.info("records after step %d were moved to %s", self._state.step, moved)
        else:
            self._make_room()
        self._log.flushLevel = logging.NOTSET
        self._log.flush()
        replace_file(self._directory.config_file, to_yaml(self._config))
        self._directory.config_file.chmod(0o600)
        write_lock(self._directory.lock_file, plugin_refs(self._config))
        self._finished = self._state.step
        self._directory.write_state("running", self._finished, self.health.warnings)
        self._build_listeners()
        self._log_again()
        return self._state.step

    def _log_again(self) -> None:
        """Log the metrics of a step whose run was killed between checkpoint and metrics."""
        step, metrics = self._state.step, self._state.metrics
        owed = self._resumes_in_place and metrics and (self._previous is None or self._previous.step < step)
        if owed and all(row["step"] != step for row in self._directory.read_metrics()):
            self.log(step, metrics)

    def note_loss(self, reason: str) -> None:
        """Record that the run fails now; what died may end this process before :meth:`recording` can."""
        self._status = "failed"
        if self._finished is not None:
            with suppress(OSError):
                self._directory.write_state("failed", self._finished, self.health.warnings)
        logger.error("%s: the run ends here. `agentrl train … --resume` continues from the newest checkpoint", reason)

    def _end(self, status: RunStatus) -> None:
        if self._finished is not None:
            with suppress(OSError):  # a full disk, which may be why the run failed, must not hide the reason
                self._directory.write_state(status, self._finished, self.health.warnings)
            self.trackers.finish(status)
        logging.getLogger().removeHandler(self._log)
        file = self._log.target
        self._log.close()
        if file is not None:
            file.close()
        self.hooks.on_run_end(status=status)

    def has_checkpoint(self, step: int) -> bool:
        """Whether this step's checkpoint is on disk, or on its way there."""
        return self._state.step == step

    @property
    def position(self) -> Position | None:
        """That of the checkpoint which the run resumed from, or of the last one since."""
        return self._state.position

    def save_checkpoint(
        self,
        step: int,
        metrics: Mapping[str, float],
        position: Position | None,
    ) -> None:
        """Begin to write a checkpoint of ``step`` with its metrics, which a killed run may not have logged yet.

        The training processes write it in the background; :meth:`publish_checkpoint` makes it one.
        """
        self._shared = unchanged_files(self._checkpoint, self._stats) if self._checkpoint is not None else {}

        def write(directory: Path) -> None:
            self._disks.clear(directory)
            for role, worker in self._workers.items():
                own = [name.removeprefix(f"{role}/") for name in self._shared if name.startswith(f"{role}/")]
                worker.save_checkpoint(str(directory / role), background=True, last_files=own)
            for role, copy in self._copies.items():
                copy.save_checkpoint(directory / role)

        self._state = replace(
            self._state,
            step=step,
            metrics=dict(metrics),
            sampler=self._sampler.state_dict(),
            algorithm=self._algorithms.state,
            streaks=[replace(streak) for streak in self.health.streaks],
            position=position,
        )
        self._store.begin(self._state, write)
        self._written = self._state

    def publish_checkpoint(self, wait: bool) -> tuple[int, Path] | None:
        """Publish the checkpoint that is being written if it is whole, or wait for that; its step and path.

        Returns None where there is nothing to publish (yet).

        Raises:
            ActorDiedError, CheckpointError: it could not be written; nothing of it is left.
        """
        state = self._written
        if state is None:
            return None
        directory, checksums = self._store.aside(state.step), dict[str, str]()
        with self._store.reported(state):
            for role, worker in self._workers.items():
                for files in worker.checkpoint_written(wait):
                    if files is None:
                        return None
                    checksums |= {f"{role}/{name}": checksum for name, checksum in files.items()}
            self._written = None
            reported = list(checksums)
            # What nobody wrote again comes from the last checkpoint, with its checksum there.
            kept = {name: self._shared[name] for name in reported if not checksums[name] and name in self._shared}
            if self._checkpoint is not None:
                share_files(self._checkpoint, directory, kept)
            checksums |= kept
            # What came from other nodes is flushed here, and has its checksum from here.
            for name in self._disks.collect(directory):
                checksums.pop(name, None)
            _check_written(directory, reported)
            for folder in actor_folders(directory).values():
                copy_tokenizer(Path(self._config.model.path), folder)
            shutil.copy(self._directory.config_file, directory / "config.yaml")
            shutil.copy(self._directory.lock_file, directory / "plugins.lock.json")
        # A run that is killed goes on from here: what it recorded before must be there.
        try:
            self.records.wait()
        except KeyboardInterrupt:
            # A second signal waits for no records; the checkpoint, which may be the only one, is whole.
            self._store.publish(state, checksums)
            raise
        self._checkpoint = self._store.publish(state, checksums)
        self._stats = file_stats(self._checkpoint)
        return state.step, self._checkpoint

    def note_best(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Remember the best value of ``trainer.checkpoint.best_metric``; return whether this step has it."""
        name = self._config.trainer.checkpoint.best_metric
        value = metrics.get(name) if name is not None else None
        if value is None or (self._state.best is not None and value <= self._state.best):
            return False
        self._state = replace(self._state, best=value, best_step=step)
        return True

    def write_records(
        self, step: int, split: Split, results: Sequence[TrajectoryResult], batches: Sequence[DataProto] = ()
    ) -> None:
        """Write the line of each trajectory of a step, and show the first one of the run."""
        self.records.write(step, split, results, batches)
        if split == "train" and step == self.first_step and results:
            console = rich.get_console()
            console.print(f"[bold]The first trajectory of step {step}[/bold], as the model was trained on it:")
            for line in islice(make_records(step, split, whole(handed(results), []), [*map(Credit.of, batches)]), 1):
                show_trajectory(records_of(to_json(line))[0], console)

    def log_trajectories(self, step: int, split: Split, results: Sequence[TrajectoryResult]) -> None:
        """Report the trajectories of a rollout to hooks and trackers, if one wants them. Lost ones are left out."""
        if not self.trackers.want_trajectories and not self.hooks.implements("on_trajectory_end"):
            return
        trajectories = [ended_trajectory(split, result) for result in whole(handed(results), [])]
        for trajectory in trajectories:
            self.hooks.on_trajectory_end(step=step, trajectory=trajectory)
        self.trackers.log_trajectories(trajectories, step)

    def log(
        self, step: int, metrics: Mapping[str, float], phases: list[tuple[str, float, float]] | None = None
    ) -> None:
        """Report a finished step to trackers, ``phases.jsonl``, ``state.json`` and hooks; clears ``phases``."""
        self.trackers.log(dict(sorted(metrics.items())), step)
        if phases:
            self._directory.append_phases(step, phases)
            phases.clear()
        self._finished = step
        self._directory.write_state(self._status, step, self.health.warnings)
        self.hooks.on_step_end(step=step, metrics=metrics)


def _check_written(checkpoint: Path, names: Iterable[str]) -> None:
    """Raise CheckpointError where this process does not see what the ranks wrote: checksums would seal the gap."""
    incomplete = "what the training processes wrote is not complete here"
    for name in names:
        if not (checkpoint / name).is_file():
            raise CheckpointError(f"{checkpoint / name}, which a rank wrote, is missing: {incomplete}")
    try:
        for folder in actor_folders(checkpoint).values():
            check_saved(folder)
    except ConfigError as error:
        raise CheckpointError(f"{error}: {incomplete}") from error


def copy_tokenizer(model: Path, directory: Path) -> None:
    """Copy the files that make a directory of weights loadable as a model with its tokenizer."""
    for pattern in _TOKENIZER_FILES:
        for file in model.glob(pattern):
            if file.is_file() and not (directory / file.name).exists():
                shutil.copy(file, directory / file.name)
