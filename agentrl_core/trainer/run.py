"""A run on disk and in the trackers: directory, records, checkpoints, hooks, and how it ended."""

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from logging.handlers import MemoryHandler
from pathlib import Path

import rich

from agentrl_core.api import (
    CheckpointError,
    ConfigError,
    HookContext,
    PluginDriftError,
    PluginError,
    PluginRef,
    TrackerContext,
)
from agentrl_core.api.dataset import Split
from agentrl_core.config import ResolvedConfig, to_dict, to_yaml
from agentrl_core.config.nodes import dotted, read_file
from agentrl_core.config.slots import all_slots
from agentrl_core.config.writing import leaves, written
from agentrl_core.plugins.hooks import HookCaller
from agentrl_core.plugins.lock import diff_lock, lock_of, read_lock, write_lock
from agentrl_core.runs.atomic import replace_file
from agentrl_core.runs.records import RolloutRecord, RolloutWriter
from agentrl_core.runs.run_dir import RunDir, RunState, RunStatus
from agentrl_core.runs.trajectory_view import show_trajectory
from agentrl_core.trainer.checkpoint import CheckpointStore, TrainerState, read_state
from agentrl_core.trainer.plan import RunPlan
from agentrl_core.trainer.trackers import Trackers
from agentrl_core.workers.protocols import Actor, Critic

logger = logging.getLogger(__name__)
_ORDER_OF_DATA = ("trainer.seed", "data.batch_size", "data.shuffle")
_TOKENIZER_FILES = ("*token*", "*.jinja", "vocab.*", "merges.txt", "spiece.model", "generation_config.json")


class LogFile(logging.FileHandler):
    """``log.txt``. A disk that is full shows in the run's own error, not in a traceback for every line."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        pass


class Run:
    """One run, in a directory that no other process may use meanwhile.

    Args:
        config: resolved.
        plan: its arithmetic.
        data_fingerprint: of the training prompts in their order.
    """

    def __init__(self, config: ResolvedConfig, plan: RunPlan, data_fingerprint: str) -> None:
        self._directory = RunDir(Path(config.trainer.output_dir).resolve() / config.trainer.name)
        self.path = self._directory.path
        self._config = config
        self._plan = plan
        self._store = CheckpointStore(self._directory.checkpoints_dir, config.trainer.checkpoint.keep)
        self._checkpoint: Path | None = None
        self._state = TrainerState(0, None, None, data_fingerprint)
        self._previous: RunState | None = None
        self.first_step = 1
        """The first step that this process runs; known once the run records."""
        self._writer = RolloutWriter(self._directory.rollouts_dir)
        self._trackers = Trackers()
        self._finished: int | None = None
        self._saved_step = 0
        self.hooks = HookCaller([])
        # It waits until begin(): only then is log.txt this run's own.
        file = LogFile(self._directory.log_file, encoding="utf-8", delay=True)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._log = MemoryHandler(10_000, flushLevel=logging.CRITICAL + 1, target=file)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Hold the directory, decide what to resume, and at the end tell trackers and hooks how the run ended.

        Only ``log.txt`` changes before :meth:`begin`, so that a run that could not start leaves an earlier one whole.

        Raises:
            ConfigError: another process runs there, or no step is left.
            CheckpointError: the checkpoint to resume from is damaged.
            PluginDriftError: it was made with other plugin versions.
        """
        self._directory = RunDir.create(self.path.parent, self.path.name)
        with self._directory.locked():
            self._decide()
            logging.getLogger().addHandler(self._log)
            status: RunStatus = "failed"
            try:
                yield
                status = "completed" if self._finished == self._plan.steps else "stopped"
            except KeyboardInterrupt:
                status = "stopped"
                raise
            except BaseException as error:
                logger.error("the run failed at step %d: %s", (self._finished or self.first_step - 1) + 1, error)
                raise
            finally:
                self._end(status)

    def _decide(self) -> None:
        """Whether to resume, and from where."""
        self._previous = self._directory.read_state()
        self._checkpoint = self._store.find(self._config.trainer.resume)
        if self._checkpoint is not None:
            self._state = self._resumed_state(self._checkpoint)
        elif self._config.trainer.resume == "auto":
            self._point_to_superseded()
        self._saved_step = self._state.step
        self.first_step = self._state.step + 1
        # A run that was killed after its last checkpoint has only to be closed.
        ended = self._previous is None or self._previous.finished or not self._resumes_in_place
        if self.first_step > self._plan.steps and ended:
            raise ConfigError(
                f"trainer.steps: 0 steps would run: {self._checkpoint} is at step {self._state.step} of "
                f"{self._plan.steps}. Raise trainer.steps, or start again with trainer.resume=never or another "
                "trainer.name"
            )

    def _point_to_superseded(self) -> None:
        """The last run here ended before its first checkpoint, but one that it moved away may have some."""
        archives = self._directory.superseded_dir.glob("*/checkpoints/latest")
        found = sorted(archives, key=lambda path: int(path.parts[-3]))
        if found:
            logger.warning(
                "%s has no checkpoint, so the run starts at step 1. An earlier run that was moved has one: "
                "trainer.resume=%s", self.path, found[-1].parents[1],
            )  # fmt: skip

    @property
    def _resumes_in_place(self) -> bool:
        own = self._directory.checkpoints_dir.resolve()
        return self._checkpoint is not None and self._checkpoint.parent.resolve() == own

    def _make_room(self) -> None:
        moved = self._directory.archive()
        if moved is not None and self._previous is not None and not self._previous.finished:
            logger.warning(
                "an unfinished run (step %d) was in %s; it was moved to %s. To continue a run instead: --resume; "
                "to continue the one that was moved: trainer.resume=%s",
                self._previous.step, self.path, moved, moved,
            )  # fmt: skip
        elif moved is not None:
            logger.info("the earlier run in %s was moved to %s", self.path, moved)

    def _refs(self) -> list[PluginRef]:
        return [ref for slot in all_slots(self._config) for ref in (slot.ref, *slot.code.values())]

    def _resumed_state(self, checkpoint: Path) -> TrainerState:
        state = read_state(checkpoint)
        try:
            lock = read_lock(checkpoint / "plugins.lock.json")
        except PluginError as error:
            raise CheckpointError(f"{error}; resume from another checkpoint: trainer.resume=PATH") from error
        changes = diff_lock(lock, lock_of(self._refs()))
        if changes and not self._config.plugins.allow_drift:
            raise PluginDriftError(
                f"{checkpoint} was made with other plugins:\n  " + "\n  ".join(changes) + "\n"
                "install those versions again, or accept the change with --allow-plugin-drift "
                "(plugins.allow_drift=true)"
            )
        self._compare_options(checkpoint)
        if state.data_fingerprint != self._state.data_fingerprint:
            logger.warning("the training data differs from that of %s: the prompts to come will differ too", checkpoint)
        return replace(state, data_fingerprint=self._state.data_fingerprint)

    def _compare_options(self, checkpoint: Path) -> None:
        """Report what the configuration changes; refuse what would give other prompts than those still to come."""
        before = {dotted(key): value for key, value in leaves(read_file(checkpoint / "config.yaml", "").plain())}
        now = {dotted(key): value for key, value in leaves(written(self._config))}
        changed = {
            key: f"{key}: {before.get(key)} -> {now.get(key)}"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key) and key != "trainer.resume"
        }
        if order := [changed[key] for key in _ORDER_OF_DATA if key in changed]:
            raise ConfigError(
                f"{checkpoint} was made with another order of the data:\n  " + "\n  ".join(order) + "\n"
                "set the old values again, or start a new run with trainer.resume=never"
            )
        if changed:
            logger.warning("changed since %s: %s", checkpoint, "; ".join(changed.values()))

    def _build_listeners(self) -> None:
        config = self._config
        context = TrackerContext(config.trainer.name, self.path, self._plan.steps, to_dict(config), self.first_step)
        self._trackers = Trackers((slot.name, slot.build(context)) for slot in config.trainer.trackers)
        names = [hook.registered_name for hook in config.hooks]
        self.hooks = HookCaller(
            [(name, hook.build(HookContext(name, self.path))) for name, hook in zip(names, config.hooks, strict=True)]
        )

    def begin(self, actor: Actor, critic: Critic | None) -> int:
        """Everything has started: make the directory this run's own, load the checkpoint.

        Returns the last finished step.
        """
        checkpoint = self._checkpoint
        if checkpoint is not None:
            logger.info("resuming from %s, after step %d of %d", checkpoint, self._state.step, self._plan.steps)
            actor.load_checkpoint(str(checkpoint / "actor"))
            if critic is not None:
                if not (checkpoint / "critic").is_dir():
                    raise CheckpointError(f"{checkpoint} has no critic, but the run's estimator needs one")
                critic.load_checkpoint(str(checkpoint / "critic"))
        self._directory.remove_leftovers()
        if self._resumes_in_place:
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
        write_lock(self._directory.lock_file, self._refs())
        self._finished = self._state.step
        self._directory.write_state("running", self._finished)
        self._build_listeners()
        self._log_again()
        return self._state.step

    def _log_again(self) -> None:
        """A run killed between its checkpoint and its metrics still owes the metrics."""
        step, metrics = self._state.step, self._state.metrics
        owed = self._resumes_in_place and metrics and (self._previous is None or self._previous.step < step)
        if owed and all(row["step"] != step for row in self._directory.read_metrics()):
            self.log(step, metrics)

    def _end(self, status: RunStatus) -> None:
        if self._finished is not None:
            with suppress(OSError):  # a full disk, which has ended the run, must not hide why it ended
                self._directory.write_state(status, self._finished)
            self._trackers.finish(status)
        logging.getLogger().removeHandler(self._log)
        file = self._log.target
        self._log.close()
        if file is not None:
            file.close()
        self.hooks.on_run_end(status=status)

    def has_checkpoint(self, step: int) -> bool:
        """This step's checkpoint is on disk."""
        return self._saved_step == step

    def save_checkpoint(self, step: int, actor: Actor, critic: Critic | None, metrics: Mapping[str, float]) -> Path:
        """Write a whole checkpoint of ``step``, with its metrics, which a killed run may not have logged yet."""

        def write(directory: Path) -> None:
            actor.save_checkpoint(str(directory / "actor"))
            copy_tokenizer(Path(self._config.model.path), directory / "actor")
            if critic is not None:
                critic.save_checkpoint(str(directory / "critic"))
            shutil.copy(self._directory.config_file, directory / "config.yaml")
            shutil.copy(self._directory.lock_file, directory / "plugins.lock.json")

        self._state = replace(self._state, step=step, metrics=dict(metrics))
        path = self._store.save(self._state, write)
        self._saved_step = step
        return path

    def note_best(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether ``trainer.checkpoint.best_metric`` is better than ever before."""
        name = self._config.trainer.checkpoint.best_metric
        value = metrics.get(name) if name is not None else None
        if value is None or (self._state.best is not None and value <= self._state.best):
            return False
        self._state = replace(self._state, best=value, best_step=step)
        return True

    def write_records(self, step: int, split: Split, records: Sequence[RolloutRecord]) -> None:
        """Keep a step's trajectories, and show the first one of the run."""
        if self._config.trainer.save_rollouts:
            self._writer.write(step, split, records)
        if split == "train" and step == self.first_step and records:
            console = rich.get_console()
            console.print(f"[bold]The first trajectory of step {step}[/bold], as the model was trained on it:")
            show_trajectory(records[0], console)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step is done: trackers, hooks, ``state.json``."""
        self._trackers.log(dict(sorted(metrics.items())), step)
        self._finished = step
        self._directory.write_state("running", step)
        self.hooks.on_step_end(step=step, metrics=metrics)


def copy_tokenizer(model: Path, directory: Path) -> None:
    """Copy the files that make a directory of weights loadable as a model with its tokenizer."""
    for pattern in _TOKENIZER_FILES:
        for file in model.glob(pattern):
            if file.is_file() and not (directory / file.name).exists():
                shutil.copy(file, directory / file.name)
