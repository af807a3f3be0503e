"""``agentrl export``."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from agentrl_core.api.errors import CheckpointError
from agentrl_core.cli._shared import say
from agentrl_core.engine_kit.media import has_processor

_ASIDE = ".exporting"


def run(
    checkpoint: Annotated[Path, typer.Argument(help="Directory of a checkpoint.", show_default=False)],
    output: Annotated[Path, typer.Argument(help="Directory to write.", show_default=False)],
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a LoRA adapter, write the whole model with the adapter in its weights.")
    ] = False,
    base: Annotated[
        Path | None, typer.Option(help="For --merge: the adapter's model. By default: where the run read it.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Of a run with several policies, the one to copy.", show_default=False)
    ] = None,
) -> None:
    """Copy the actor of a checkpoint without its training state: weights, config, tokenizer; or its LoRA adapter.

    Raises:
        CheckpointError: no checkpoint, no such policy in it, or the output directory is not empty.
    """
    from agentrl_core.api.training_backend import TRAINING_FOLDER
    from agentrl_core.fsdp2.adapters import CONFIG_FILE, read_config
    from agentrl_core.fsdp2.model_files import save_merged
    from agentrl_core.trainer.checkpoint import actor_folders, checkpoint_path

    folders = actor_folders(checkpoint_path(checkpoint))
    if (policy or "") not in folders:
        names = ", ".join(filter(None, folders))
        allowed = (
            f"this checkpoint has the policies {names}" if names else "it is of a run with one policy: leave it out"
        )
        raise CheckpointError(f"--policy: found {policy or 'none'}, but {allowed}")
    source = folders[policy or ""]
    if output.exists() and (not output.is_dir() or any(entry.name != _ASIDE for entry in output.iterdir())):
        raise CheckpointError(f"{output} is not an empty directory. Choose a new one, so that nothing is overwritten")
    is_adapter = (source / CONFIG_FILE).exists()
    if base is not None and not merge:
        raise CheckpointError("--base: names the model for --merge, which is not given; add it, or leave --base out")
    if merge and not is_adapter:
        raise CheckpointError(f"--merge: {source} is no adapter but a whole model; export it without --merge")
    if merge:
        named = Path(str(read_config(str(source)).get("base_model_name_or_path")))
        if not (base or named).is_dir():
            raise CheckpointError(
                f"--{'base' if base else 'merge'}: no such directory: {base or named}; name the directory of the model "
                "that the adapter was trained on with --base"
            )
    left_out = [TRAINING_FOLDER, "later-*", "versions.json", f"*{_ASIDE}", *(["adapter_*"] if merge else [])]
    with _aside(output) as folder:
        if merge:
            save_merged(str(source), str(folder), str(base or named))
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns(*left_out), dirs_exist_ok=True)
    if merge and base is not None and base.resolve() != named.resolve():
        say(f"merged into {base}; the run trained this adapter on {named}")
    shows = has_processor(output)
    auto = f"transformers.AutoModelFor{'ImageTextToText' if shows else 'CausalLM'}.from_pretrained"
    loads = f"{auto}({str(output)!r})"
    if is_adapter and not merge:
        # PEFT has no such class for models with images.
        below = read_config(str(output)).get("base_model_name_or_path")
        whole = f"peft.PeftModel.from_pretrained({auto}({str(below)!r}), {str(output)!r})"
        loads = whole if shows else f"peft.AutoPeftModelForCausalLM.from_pretrained({str(output)!r})"
    say(f"{output}: load it with {loads}")


@contextmanager
def _aside(output: Path) -> Iterator[Path]:
    """A directory whose content gets to ``output`` when it is whole: next to it, or in it where it exists."""
    from safetensors import SafetensorError

    target = output.resolve()
    is_there = target.is_dir()
    folder = target / _ASIDE if is_there else target.with_name(f".{target.name}{_ASIDE}")
    try:
        if folder.exists():  # of an export that was killed
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        if is_there:
            # A model loads when it has its config, which comes last.
            for entry in sorted(folder.iterdir(), key=lambda entry: entry.name.endswith("config.json")):
                entry.replace(target / entry.name)
            folder.rmdir()
        else:
            folder.replace(target)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, (OSError, SafetensorError)):
            raise
        first = error.args[0][0][2] if isinstance(error, shutil.Error) else error
        raise CheckpointError(f"{output} cannot be written: {first}") from error
