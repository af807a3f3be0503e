"""``agentrl export``."""

import shutil
from pathlib import Path

import rich

from agentrl_core.api import CheckpointError
from agentrl_core.trainer.checkpoint import checkpoint_path
from agentrl_core.workers.checkpoints import STATE_FOLDER


def run(checkpoint: Path, output: Path) -> None:
    """Copy the actor of a checkpoint without its training state: weights, config, tokenizer.

    Raises:
        CheckpointError: no checkpoint, or the output directory is not empty.
    """
    source = checkpoint_path(checkpoint) / "actor"
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"{output} is not an empty directory; name a new one, so that nothing is overwritten")
    shutil.copytree(source, output, ignore=shutil.ignore_patterns(STATE_FOLDER), dirs_exist_ok=True)
    line = f"{output}: load it with transformers.AutoModelForCausalLM.from_pretrained({str(output)!r})"
    rich.get_console().print(line, markup=False, highlight=False, soft_wrap=True)
