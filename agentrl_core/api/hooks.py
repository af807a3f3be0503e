"""Lifecycle hooks: observe a run, or replace a batch, without touching the loop.

A hook plugin's factory ``(config, HookContext) -> object`` returns an object with any of the methods of
:class:`HookSpecs`, marked with :data:`hookimpl`. Only hooks that the config lists are imported; they are called in
the order of the config. An exception names plugin and hook, and ends the run.

    class Bell:
        def __init__(self, config, context): ...
        @hookimpl
        def on_run_end(self, status): ...
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pluggy

PROJECT = "agentrl"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True)
class HookContext:
    """What a hook gets when it is built: its configured name and the run's directory."""

    name: str
    run_dir: Path


class HookSpecs:
    """All hooks. Every one runs in the trainer's process unless it says otherwise."""

    @hookspec
    def on_run_start(self, config: Mapping[str, Any], run_dir: Path) -> None:
        """Everything is set up; no step has run."""

    @hookspec
    def on_rollout_start(self, step: int) -> None:
        """Before the prompts of a step go out."""

    @hookspec
    def on_rollout_end(self, step: int, batch: Any) -> None:
        """The step's trajectories as a ``DataProto``, scored, before advantages."""

    @hookspec
    def on_batch_ready(self, step: int, batch: Any) -> Any:
        """The batch with advantages, before the update. Return a batch to replace it, None to keep it.

        Values are threaded: each hook sees what the one before it in the config returned.
        """

    @hookspec
    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """All metrics of the step; step 0 is the validation before training."""

    @hookspec
    def on_validation_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """All metrics of a validation."""

    @hookspec
    def on_checkpoint_saved(self, step: int, path: Path) -> None:
        """A checkpoint is complete on disk."""

    @hookspec
    def on_run_end(self, status: str) -> None:
        """``completed``, ``stopped`` or ``failed``."""
