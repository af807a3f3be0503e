"""Checkpoints: written to a temporary name and renamed, so that those on disk are always complete.

The training processes write in the background; each hashes what it wrote, and the driver publishes what is whole.

checkpoints/step-000010/
  actor/            weights in Hugging Face layout, tokenizer
    training/       distributed checkpoint: weights, optimizer, schedule, random generators
      frozen/       the same of frozen weights; these and frozen-*.safetensors are hard links to the last checkpoint's
  critic/           the same, where there is a critic
  policies/NAME/    the same of each policy, in place of actor/, where a run has several
  trainer.json      step, best value so far, fingerprint of the data, metrics of the step
  config.yaml       resolved configuration
  plugins.lock.json the plugins that ran
  checksums.json    SHA-256 of these files
checkpoints/latest  link to the newest
checkpoints/best    link to the best by trainer.checkpoint.best_metric
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from agentrl_core.api import CheckpointError, ConfigError, PluginDriftError, PluginError, PluginRef
from agentrl_core.config import Config, ResolvedConfig
from agentrl_core.config.introspect import keys
from agentrl_core.config.nodes import dotted, read_file
from agentrl_core.config.slots import all_slots
from agentrl_core.config.writing import leaves, plain, written
from agentrl_core.controller.runtime import ActorDiedError
from agentrl_core.fsdp2.model_files import check_saved
from agentrl_core.plugins.boundary import boundary
from agentrl_core.plugins.lock import diff_lock, lock_of, read_lock
from agentrl_core.runs.atomic import flushed_checksum
from agentrl_core.runs.run_dir import CHECKPOINT, entries
from agentrl_core.trainer.health import Streak

STATE_FILE = "trainer.json"
CHECKSUM_FILE = "checksums.json"
_ORDER_OF_DATA = ("trainer.seed", "data.batch_size", "data.sampler", "data.streaming")
_ADAPTER_OF_POLICY = re.compile(r"policies\.\w+\.(adapter|copy_of|updates_ago|frozen)\b(?!\.dropout)")
_SHAPE = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "tie_word_embeddings", "num_experts", "num_local_experts", "n_routed_experts",
    "moe_intermediate_size",
)  # fmt: skip
"""Entries of ``config.json`` by which two models differ for certain."""
_REQUIRED = (CHECKSUM_FILE, "config.yaml", "plugins.lock.json")
_REMEDY = "take another one (to resume: trainer.resume=PATH, or trainer.resume=intact for the newest undamaged one)"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Position:
    """Which prompts a run has trained, where they are not those of its finished steps.

    Prompts are numbered from 0 in the order of the data: number p is prompt p % ``data.batch_size`` of the sampler's
    step p // ``data.batch_size`` + 1.

    Args:
        frontier: all below it are trained, or were replaced because they gave no signal.
        beyond: those above it that are, ascending.
        drawn: the rows of the sampler's steps that are not trained in whole, by step.
        rewards: of the prompts in ``beyond``, and of those below the frontier in a step that is not trained in whole.
    """

    frontier: int
    beyond: list[int] = field(default_factory=list)
    drawn: dict[str, list[int]] = field(default_factory=dict)
    rewards: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainerState:
    """What the trainer itself must restore; prompts and seeds follow from the step.

    Args:
        step: finished steps.
        best: best value of ``trainer.checkpoint.best_metric`` so far, None before the first.
        best_step: where it was reached.
        data_fingerprint: of the training prompts in their order.
        metrics: of that step; a run that is killed now has not logged them yet.
        sampler: of the sampler, after that step.
        algorithm: coefficients that adapt, after that step.
        streaks: signs that learning has stopped, up to that step.
        position: in the data, of a run that samples ahead; None: it has trained the prompts of its steps.
    """

    step: int
    best: float | None
    best_step: int | None
    data_fingerprint: str
    metrics: dict[str, float] = field(default_factory=dict)
    sampler: dict[str, Any] = field(default_factory=dict)
    algorithm: dict[str, float] = field(default_factory=dict)
    streaks: list[Streak] = field(default_factory=list)
    position: Position | None = None


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        directory: ``checkpoints`` of the run directory.
        keep: number of newest checkpoints to keep, in addition to the best.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory = directory
        self._keep = keep

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, ascending. It got its name when it was whole: what it lacks now is damage."""
        return sorted(int(match["step"]) for match, _ in entries(self.directory, CHECKPOINT))

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:06d}"

    def aside(self, step: int) -> Path:
        """Where a checkpoint is before it is whole."""
        return self.path(step).with_name(f".{self.path(step).name}.writing")

    def save(self, state: TrainerState, write: Callable[[Path], None]) -> Path:
        """Write a whole checkpoint with ``write(directory)`` and publish it."""
        self.begin(state, write)
        return self.publish(state, {})

    def begin(self, state: TrainerState, write: Callable[[Path], None]) -> None:
        """Let ``write(directory)`` write a checkpoint, or begin to.

        Raises:
            ActorDiedError, CheckpointError: as :meth:`reported`.
        """
        aside = self.aside(state.step)
        with self.reported(state):
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            write(aside)

    def publish(self, state: TrainerState, checksums: Mapping[str, str]) -> Path:
        """Make what is written a checkpoint, and the latest; delete older ones.

        Args:
            checksums: of files that are known, and flushed, by their path in it.

        Raises:
            ActorDiedError, CheckpointError: as :meth:`reported`.
        """
        path, aside = self.path(state.step), self.aside(state.step)
        with self.reported(state):
            (aside / STATE_FILE).write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")
            files = [file for file in sorted(aside.rglob("*")) if file.is_file()]
            names = {str(file.relative_to(aside)): file for file in files}
            known = {name: checksums.get(name) or flushed_checksum(file) for name, file in names.items()}
            (aside / CHECKSUM_FILE).write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
            flushed_checksum(aside / CHECKSUM_FILE)
            _remove(path)
            aside.rename(path)
        self.mark(state)
        self._prune(state.best_step)
        return path

    @contextmanager
    def reported(self, state: TrainerState) -> Iterator[None]:
        """Part of the work on a checkpoint that is not whole yet; where it fails nothing is left.

        Raises:
            ActorDiedError: a training process died meanwhile.
            CheckpointError: it could not be written, because of a full disk for example.
        """
        path = self.path(state.step)
        try:
            yield
        except BaseException as error:
            shutil.rmtree(self.aside(state.step), ignore_errors=True)
            if isinstance(error, KeyboardInterrupt | SystemExit | ActorDiedError):
                raise
            # A full disk is an OSError to Python, a RuntimeError to torch and a SafetensorError to safetensors.
            free = shutil.disk_usage(self.directory).free / 2**30 if self.directory.exists() else 0.0
            raise CheckpointError(
                f"{path} cannot be written: {_reason(error)}. Check space and rights there ({free:.1f} GiB are free)"
            ) from error

    def mark(self, state: TrainerState) -> None:
        """Point ``latest`` to the checkpoint of this state, and ``best`` to the best one up to there."""
        self._link("latest", self.path(state.step))
        if state.best_step is not None and self.path(state.best_step).is_dir():
            self._link("best", self.path(state.best_step))
        else:
            (self.directory / "best").unlink(missing_ok=True)

    def _link(self, name: str, target: Path) -> None:
        aside = self.directory / f".{name}.link"
        aside.unlink(missing_ok=True)
        aside.symlink_to(target.name)
        aside.replace(self.directory / name)

    def _prune(self, best_step: int | None) -> None:
        for step in self.steps()[: -self._keep]:
            if step != best_step:
                _remove(self.path(step))

    def find(self, resume: str) -> Path | None:
        """Return the checkpoint that ``trainer.resume`` names; None to start at step 1.

        Raises:
            CheckpointError: a path that is no checkpoint, or a damaged one; with ``intact``, all are damaged.
        """
        if resume == "never":
            return None
        if resume not in ("auto", "intact"):
            return checkpoint_path(Path(resume))
        steps = self.steps()
        for step in reversed(steps):
            try:
                return checkpoint_path(self.path(step))
            except CheckpointError as error:
                if resume == "auto" or step == steps[0]:
                    raise
                logger.warning("%s. Trying the checkpoint before it.", error)
        return None


def checkpoint_path(path: Path) -> Path:
    """Return the directory of a complete checkpoint, links resolved; of a run directory, the latest checkpoint's.

    Raises:
        CheckpointError: there is none, or a file of it is missing or not as it was written.
    """
    for candidate in (path, path / "checkpoints" / "latest"):
        if (candidate / STATE_FILE).is_file():
            _verify(candidate.resolve())
            return candidate.resolve()
        if (candidate / CHECKSUM_FILE).is_file():
            raise _damaged(candidate / STATE_FILE, "it is missing")
    raise CheckpointError(
        f"{path} is no checkpoint: it has no {STATE_FILE}. Expected a directory such as runs/NAME/checkpoints/latest"
    )


def _verify(path: Path) -> None:
    """Raise CheckpointError for a file that is missing or differs from its checksum."""
    for name in _REQUIRED:
        if not (path / name).is_file():
            raise _damaged(path / name, "it is missing")
    for name, expected in read_checksums(path).items():
        file = path / name
        try:
            found = _checksum(file) if file.is_file() else None
        except OSError as error:
            raise _damaged(file, error.strerror or str(error)) from error
        if found != expected:
            raise _damaged(file, "it differs from its checksum" if found else "it is missing")
    for folder in actor_folders(path).values():
        try:
            check_saved(folder)
        except ConfigError as error:
            raise _damaged(folder, str(error)) from error


def read_checksums(path: Path) -> dict[str, str]:
    """The files of a checkpoint, with the SHA-256 of each.

    Raises:
        CheckpointError: they cannot be read.
    """
    try:
        checksums = json.loads((path / CHECKSUM_FILE).read_text(encoding="utf-8"))
        if not isinstance(checksums, dict):
            raise ValueError("expected a mapping from files to checksums")
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path / CHECKSUM_FILE, str(error)) from error
    return checksums


def file_stats(path: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of each file of a checkpoint."""
    files = {str(file.relative_to(path)): file.stat() for file in path.rglob("*") if file.is_file()}
    return {name: (found.st_size, found.st_mtime_ns) for name, found in files.items()}


def unchanged_files(path: Path, stats: Mapping[str, tuple[int, int]]) -> dict[str, str]:
    """The files of a checkpoint with the SHA-256 of each; none if somebody has deleted or changed one of them since its
    ``stats``. Their content is not read."""
    try:
        checksums, now = read_checksums(path), file_stats(path)
    except (CheckpointError, OSError):
        return {}
    changed = [name for name in checksums if now.get(name) != stats.get(name)]
    if changed:
        shown = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
        logger.warning("%s: missing or changed: %s; the next checkpoint shares no file with it", path, shown)
    return {} if changed else checksums


def share_files(last: Path, directory: Path, names: Iterable[str]) -> None:
    """Give a checkpoint files of the last one: as hard links, so that either may be deleted, or as copies where the
    file system has no links."""
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(last / name, directory / name)
        except OSError:
            shutil.copy(last / name, directory / name)
            flushed_checksum(directory / name)


def actor_folders(checkpoint: Path) -> dict[str, Path]:
    """What a checkpoint has of each policy, by name; that of the only policy of a run has the name ``""``."""
    policies = {path.name: path for path in sorted(checkpoint.glob("policies/*")) if path.is_dir()}
    return policies or {"": checkpoint / "actor"}


def _damaged(file: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{file.parent}: cannot be read ({file.name} is damaged: {problem}); {_REMEDY}")


def _checksum(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def read_state(path: Path) -> TrainerState:
    """Read the trainer's state of a checkpoint.

    Raises:
        CheckpointError: the file is damaged.
    """
    file = path / STATE_FILE
    try:
        return TypeAdapter(TrainerState).validate_json(file.read_bytes(), strict=True)
    except (OSError, ValueError) as error:
        found = error.errors()[0] if isinstance(error, ValidationError) else None
        problem = f"{'.'.join(map(str, found['loc']))}: {found['msg']}" if found else str(error)
        raise CheckpointError(
            f"{file} is damaged: {problem}. Resume from another checkpoint: trainer.resume=PATH"
        ) from error


def plugin_refs(config: ResolvedConfig) -> list[PluginRef]:
    """The plugins that a run uses, those that options name included."""
    return [ref for slot in all_slots(config) for ref in (slot.ref, *slot.code.values())]


def resumed_state(config: ResolvedConfig, checkpoint: Path, data_fingerprint: str) -> TrainerState:
    """Read the state of a checkpoint that a run with this configuration and data continues.

    Raises:
        CheckpointError: the checkpoint is damaged.
        PluginDriftError: it was made with other plugin versions.
        ConfigError: the configuration gives another order of the data, or another model.
    """
    state = read_state(checkpoint)
    try:
        lock = read_lock(checkpoint / "plugins.lock.json")
    except PluginError as error:
        raise CheckpointError(f"{error}. Resume from another checkpoint: trainer.resume=PATH") from error
    changes = diff_lock(lock, lock_of(plugin_refs(config)))
    if changes and not config.plugins.allow_drift:
        raise PluginDriftError(
            f"{checkpoint} was made with other plugins:\n  " + "\n  ".join(changes) + "\n"
            "Install those versions again, or accept the change with --allow-plugin-drift "
            "(plugins.allow_drift=true)"
        )
    _compare_options(config, checkpoint)
    _compare_models(config, checkpoint)
    position = state.position
    done = state.step * config.data.batch_size
    if position and not config.rollout.max_staleness and (position.beyond or position.frontier != done):
        raise ConfigError(
            f"rollout.max_staleness: found 0, but {checkpoint} was made by a run that samples ahead, and has trained "
            "prompts of steps that are not finished; set rollout.max_staleness to 1 or more"
        )
    if state.data_fingerprint != data_fingerprint:
        logger.warning("the training data differs from that of %s, so the remaining prompts differ too", checkpoint)
        # The sampler's state and what it has drawn refer to rows of the old data.
        state = replace(state, sampler={}, position=position and replace(position, drawn={}, rewards={}))
    return replace(state, data_fingerprint=data_fingerprint)


def options_of(checkpoint: Path) -> dict[str, Any]:
    """The options with which a checkpoint was made, by dotted key."""
    content = read_file(checkpoint / "config.yaml", str(checkpoint / "config.yaml")).plain()
    return {dotted(key): value for key, value in leaves(content)}


def _compare_options(config: ResolvedConfig, checkpoint: Path) -> None:
    """Report options that changed; reject changes that give other prompts than the remaining ones."""
    before = options_of(checkpoint)
    now = {dotted(key): value for key, value in leaves(written(config))}
    for path, member in keys(Config):
        # An option added later had its default.
        if (key := dotted(path)) in now and member.default is not None:
            before.setdefault(key, plain(member.default()))
    changed = {
        key: f"{key}: {before.get(key)} -> {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and key != "trainer.resume"
    }
    if order := [changed[key] for key in changed if key.startswith(_ORDER_OF_DATA)]:
        raise ConfigError(
            f"{checkpoint} was made with another order of the data:\n  " + "\n  ".join(order) + "\n"
            "Set the old values again, or start a new run with trainer.resume=never"
        )
    frozen, left = ({values[key] for key in values if key.startswith("model.freeze.")} for values in (before, now))
    if frozen - left:
        raise ConfigError(
            f"model.freeze: found {sorted(left)}, but {checkpoint} was made with {sorted(frozen)}, and has no moments "
            f"of what trains now. Set it again, or start a new run with model.path={checkpoint / 'actor'}"
        )
    free, begun = ["model.adapter.dropout"], "model.adapter.path"
    # Without the adapter that the run began with its reference would be another policy.
    needed = any(own.needs_reference and own.reference_is_adapted for own in config.trained.values())
    if not needed or (before.get(begun) and now.get(begun)):
        free.append(begun)
    of_adapters = [key for key in changed if key.startswith("model.adapter") or _ADAPTER_OF_POLICY.match(key)]
    if adapter := [changed[key] for key in of_adapters if key not in free]:
        raise ConfigError(
            f"{checkpoint} was made with another adapter:\n  " + "\n  ".join(adapter) + "\n"
            "Set the old values again, or start a new run with trainer.resume=never"
        )
    if changed:
        logger.warning("changed since %s: %s", checkpoint, "; ".join(changed.values()))


def _compare_models(config: ResolvedConfig, checkpoint: Path) -> None:
    """Reject a model of another shape: a backend might take what fits. A checkpoint of an adapter has no model."""
    from transformers import AutoConfig

    folder = next(iter(actor_folders(checkpoint).values()))
    if config.model.trust_remote_code or not (folder / "config.json").is_file():
        return
    with boundary(CheckpointError, f"{folder}: config.json cannot be read:"):
        then, now = (
            AutoConfig.from_pretrained(path, local_files_only=True).get_text_config().to_dict()
            for path in (folder, config.model.path)
        )
    changed = [f"{key}: {then.get(key)} -> {now.get(key)}" for key in _SHAPE if then.get(key) != now.get(key)]
    if changed:
        raise ConfigError(
            f"model.path: {config.model.path} is another model than that of {checkpoint}:\n  "
            + "\n  ".join(changed)
            + "\nSet the old one again, or start a new run with trainer.resume=never"
        )


def _reason(error: BaseException) -> str:
    """One line: torch's exception holds one error for each rank, with its traceback."""
    failures = getattr(error, "failures", None) or {}
    lines = str(next((failure[0] for failure in failures.values()), error)).strip().splitlines()
    reasons = [line for line in lines if not line.startswith("Also failed: ")]
    return reasons[-1] if reasons else type(error).__name__


def _remove(checkpoint: Path) -> None:
    """Rename, then delete: a process killed in between leaves no incomplete checkpoint under a complete one's name."""
    if checkpoint.exists():
        aside = checkpoint.with_name(f".{checkpoint.name}.removing")
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
