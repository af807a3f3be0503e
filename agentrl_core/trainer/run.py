"""A run on disk and in the trackers: directory, records, checkpoints, hooks, and how it ended."""

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import rich

from agentrl_core.api import (
    CheckpointError,
    ConfigError,
    HookContext,
    PluginDriftError,
    PluginError,
    PluginRef,
    Tracker,
    TrackerContext,
)
from agentrl_core.config import ResolvedConfig, to_dict, to_yaml
from agentrl_core.config.slots import all_slots
from agentrl_core.plugins import HookCaller, diff_lock, lock_of, read_lock, write_lock
from agentrl_core.runs.records import RolloutRecord, RolloutWriter
from agentrl_core.runs.run_dir import RunDir, RunStatus, Split
from agentrl_core.runs.trajectory_view import show_trajectory
from agentrl_core.trainer.checkpoint import CheckpointStore, TrainerState, read_state
from agentrl_core.trainer.plan import RunPlan
from agentrl_core.workers.protocols import Actor, Critic

logger = logging.getLogger(__name__)
_TOKENIZER_FILES = ("*token*", "*.jinja", "vocab.*", "merges.txt", "spiece.model", "generation_config.json")


class Run:
    """One run. Made with :meth:`open`, which decides between a fresh start and a resumption."""

    def __init__(
        self,
        config: ResolvedConfig,
        directory: RunDir,
        store: CheckpointStore,
        checkpoint: Path | None,
        data_fingerprint: str,
    ) -> None:
        self.path = directory.path
        self._config = config
        self._directory = directory
        self._store = store
        self._checkpoint = checkpoint
        self._state = TrainerState(0, None, None, data_fingerprint)
        if checkpoint is not None:
            self._state = self._resumed_state(checkpoint)
        self.first_step = self._state.step + 1
        """The first step that this process runs."""
        self._writer = RolloutWriter(directory.rollouts_dir)
        self._trackers: list[Tracker] = []
        self._saved_step = self._finished = self.first_step - 1
        self._total_steps = 0
        self.hooks = HookCaller([])

    @classmethod
    def open(cls, config: ResolvedConfig, plan: RunPlan, data_fingerprint: str) -> "Run":
        """Take the run's directory: an earlier run there is resumed, or moved to ``superseded/``.

        Raises:
            ConfigError: no step is left.
            CheckpointError: the checkpoint to resume from is damaged.
            PluginDriftError: it was made with other plugin versions.
        """
        directory = RunDir.create(Path(config.trainer.output_dir).resolve(), config.trainer.name)
        store = CheckpointStore(directory.checkpoints_dir, config.trainer.checkpoint.keep)
        checkpoint = store.find(config.trainer.resume)
        run = cls(config, directory, store, checkpoint, data_fingerprint)
        if run.first_step > plan.steps:
            raise ConfigError(
                f"trainer.steps: 0 steps would run: {checkpoint} is at step {run.first_step - 1} of {plan.steps}. "
                "Raise trainer.steps, or start afresh with trainer.resume=never or another trainer.name"
            )
        if checkpoint is None or checkpoint.parent.resolve() != directory.checkpoints_dir.resolve():
            run._make_room()
        else:
            moved = directory.supersede_after(run.first_step - 1)
            store.mark(run._state)
            if moved is not None:
                logger.info("records after step %d were moved to %s", run.first_step - 1, moved)
        directory.config_file.write_text(to_yaml(config), encoding="utf-8")
        write_lock(directory.lock_file, run._refs())
        run._build_listeners(plan)
        return run

    def _make_room(self) -> None:
        previous = self._directory.read_state()
        moved = self._directory.archive()
        if moved is not None and previous is not None and not previous.finished:
            logger.warning(
                "an unfinished run (step %d) was in %s; it was moved to %s. To continue a run instead: --resume",
                previous.step, self.path, moved,
            )  # fmt: skip
        elif moved is not None:
            logger.info("the earlier run in %s was moved to %s", self.path, moved)

    def _refs(self) -> list[PluginRef]:
        return [slot.ref for slot in all_slots(self._config)]

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
        if state.data_fingerprint != self._state.data_fingerprint:
            logger.warning("the training data differs from that of %s: the prompts to come will differ too", checkpoint)
        return TrainerState(state.step, state.best, state.best_step, self._state.data_fingerprint)

    def _build_listeners(self, plan: RunPlan) -> None:
        config = self._config
        self._total_steps = plan.steps
        context = TrackerContext(config.trainer.name, self.path, plan.steps, to_dict(config), self.first_step)
        self._trackers += [slot.build(context) for slot in config.trainer.trackers]
        names = [hook.registered_name for hook in config.hooks]
        self.hooks = HookCaller(
            [(name, hook.build(HookContext(name, self.path))) for name, hook in zip(names, config.hooks, strict=True)]
        )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep ``state.json`` and ``log.txt``, and tell trackers and hooks how the run ended."""
        handler = logging.FileHandler(self._directory.log_file, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(handler)
        self._directory.write_state("running", self._finished)
        status: RunStatus = "failed"
        try:
            yield
            status = "completed" if self._finished >= self._total_steps else "stopped"
        except KeyboardInterrupt:
            status = "stopped"
            raise
        except BaseException as error:
            logger.error("the run failed at step %d: %s", self._finished + 1, error)
            raise
        finally:
            self._directory.write_state(status, self._finished)
            for tracker in self._trackers:
                tracker.finish(status)
            logging.getLogger().removeHandler(handler)
            handler.close()
            self.hooks.on_run_end(status=status)

    def resume(self, actor: Actor, critic: Critic | None) -> int:
        """Load the checkpoint, if the run resumes; returns the last finished step."""
        if self._checkpoint is not None:
            logger.info("resuming from %s", self._checkpoint)
            actor.load_checkpoint(str(self._checkpoint / "actor"))
            if critic is not None:
                if not (self._checkpoint / "critic").is_dir():
                    raise CheckpointError(f"{self._checkpoint} has no critic, but the run's estimator needs one")
                critic.load_checkpoint(str(self._checkpoint / "critic"))
        return self._state.step

    def has_checkpoint(self, step: int) -> bool:
        """This step's checkpoint is on disk."""
        return self._saved_step == step

    def save_checkpoint(self, step: int, actor: Actor, critic: Critic | None) -> None:
        """Write a whole checkpoint of ``step``."""

        def write(directory: Path) -> None:
            actor.save_checkpoint(str(directory / "actor"))
            copy_tokenizer(Path(self._config.model.path), directory / "actor")
            if critic is not None:
                critic.save_checkpoint(str(directory / "critic"))
            shutil.copy(self._directory.config_file, directory / "config.yaml")
            shutil.copy(self._directory.lock_file, directory / "plugins.lock.json")

        self._state = TrainerState(step, self._state.best, self._state.best_step, self._state.data_fingerprint)
        path = self._store.save(self._state, write)
        self._saved_step = step
        self.hooks.on_checkpoint_saved(step=step, path=path)

    def note_best(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether ``trainer.checkpoint.best_metric`` is better than ever before."""
        name = self._config.trainer.checkpoint.best_metric
        value = metrics.get(name) if name is not None else None
        if value is None or (self._state.best is not None and value <= self._state.best):
            return False
        self._state = TrainerState(self._state.step, value, step, self._state.data_fingerprint)
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
        for tracker in self._trackers:
            tracker.log(metrics, step)
        self._finished = step
        self._directory.write_state("running", step)
        self.hooks.on_step_end(step=step, metrics=metrics)


def copy_tokenizer(model: Path, directory: Path) -> None:
    """Copy the files that make a directory of weights loadable as a model with its tokenizer."""
    for pattern in _TOKENIZER_FILES:
        for file in model.glob(pattern):
            if file.is_file() and not (directory / file.name).exists():
                shutil.copy(file, directory / file.name)
