"""Lifecycle hooks: observe a run, or replace a batch, without touching the loop.

**Contract.** A hook plugin's factory ``(config, HookContext) -> object`` returns an object with any of the methods of
:class:`HookSpecs`, each marked with :data:`hookimpl` and taking any of the arguments that the hook names. A method
``on_…`` that is no hook is rejected with a suggestion. Only hooks that the config lists are imported.

**Lifecycle.** Built once, after the run's directory is there; called in the order of the config; ``on_run_end`` is the
last call, however the run ends.

**Threads.** Everything runs in the trainer's process, in the thread that called ``Trainer.fit()``, between the phases
of a step: hooks never run concurrently, none needs a lock, and a slow one makes the step slower. Hooks are plain
methods, never coroutines.

**Errors.** An exception becomes a ``PluginBrokenError`` that names plugin and hook, and ends the run.

    class Solved:
        def __init__(self, config, context):
            self.solved = 0

        @hookimpl
        def on_trajectory_end(self, step, trajectory):
            self.solved += trajectory.reward == 1.0
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pluggy

PROJECT = "agentrl"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True)
class HookContext:
    """What a hook gets when it is built.

    Args:
        name: as it is configured.
        run_dir: the run's directory.
        stop: ends the run after the step that is being computed, with a checkpoint; called with the reason, which is
            logged. The run can be resumed.
    """

    name: str
    run_dir: Path
    stop: Callable[[str], None] = lambda reason: None


@dataclass(frozen=True)
class EndedTrajectory:
    """A trajectory that has ended, completed or failed.

    Args:
        trajectory_id: unique within the run.
        uid: of the prompt: its samples share it.
        split: ``train`` or ``validation``.
        data_source: of the dataset row.
        termination: a value of ``Termination``.
        reward: what is trained, revised by the whole group where the manager does that; None where there is none.
        reward_metrics: details of the reward.
        messages: the conversation; empty if it failed before there was one.
        num_turns: as in ``AgentLoopOutput``; 0 if it failed before there was one.
        sampled_tokens: of the policy, all turns.
        attempts: how often it was started, or scored again.
        timings: seconds by kind: generate, tools, interaction, reward, total.
        error: what went wrong, for the terminations that are errors.
        spans: when each of ``timings`` was: kind, start as Unix time, seconds; in the order of their ends.
        turn_tokens: of the prompt, and sampled, in the order of the ``generate`` spans.
        tool_calls: that were run: ``name``, ``arguments``, ``response``, ``failed``, ``start`` (Unix time) and
            ``seconds``.
    """

    trajectory_id: str
    uid: str
    split: str
    data_source: str
    termination: str
    reward: float | None
    reward_metrics: Mapping[str, float]
    messages: Sequence[Mapping[str, Any]]
    num_turns: int
    sampled_tokens: int
    attempts: int
    timings: Mapping[str, float]
    error: str | None
    spans: Sequence[tuple[str, float, float]] = ()
    turn_tokens: Sequence[tuple[int, int]] = ()
    tool_calls: Sequence[Mapping[str, Any]] = ()


class HookSpecs:
    """All hooks. Every one runs in the trainer's process, in the thread of ``Trainer.fit()``."""

    def on_run_start(self, config: Mapping[str, Any], run_dir: Path) -> None:
        """Everything is set up; no step has run."""

    def on_rollout_start(self, step: int) -> None:
        """Before the prompts of a step go out."""

    def on_trajectory_end(self, step: int, trajectory: EndedTrajectory) -> None:
        """Once for each trajectory, failed ones too, in the order of the prompts.

        Not at the moment when it ends in its worker, but when all of its rollout have ended and rewards are settled:
        in training before ``on_rollout_end``, in validation before ``on_validation_end``.
        """

    def on_rollout_end(self, step: int, batch: Any) -> None:
        """The step's trajectories as a ``DataProto``, scored, before advantages."""

    def on_batch_ready(self, step: int, batch: Any) -> Any:
        """The batch with advantages, before the update. Return a batch to replace it, None to keep it.

        Values are threaded: each hook sees what the one before it in the config returned.
        """

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """All metrics of the step; step 0 is the validation before training."""

    def on_validation_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """All metrics of a validation."""

    def on_checkpoint_saved(self, step: int, path: Path) -> None:
        """A checkpoint is complete on disk."""

    def on_run_end(self, status: str) -> None:
        """``completed``, ``stopped`` or ``failed``."""


for _name in [name for name in vars(HookSpecs) if name.startswith("on_")]:
    hookspec(getattr(HookSpecs, _name))
