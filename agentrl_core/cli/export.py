"""``agentrl export``."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from agentrl_core.api.errors import CheckpointError
from agentrl_core.cli._shared import say


def run(
    checkpoint: Annotated[Path, typer.Argument(help="Directory of a checkpoint.", show_default=False)],
    output: Annotated[Path, typer.Argument(help="Directory to write.", show_default=False)],
) -> None:
    """Copy the actor of a checkpoint without its training state: weights, config, tokenizer.

    Raises:
        CheckpointError: no checkpoint, or the output directory is not empty.
    """
    from agentrl_core.trainer.checkpoint import checkpoint_path
    from agentrl_core.workers.checkpoints import STATE_FOLDER

    source = checkpoint_path(checkpoint) / "actor"
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"{output} is not an empty directory. Choose a new one, so that nothing is overwritten")
    shutil.copytree(source, output, ignore=shutil.ignore_patterns(STATE_FOLDER), dirs_exist_ok=True)
    say(f"{output}: load it with transformers.AutoModelForCausalLM.from_pretrained({str(output)!r})")
