"""``agentrl doctor``: what is installed against what was tested, and whether a model can serve."""

import json
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from packaging.version import Version

from agentrl_core.api.errors import ConfigError
from agentrl_core.api.tool_parser import ToolParserContext
from agentrl_core.cli._shared import Json, console_of_stdout, new_table, say
from agentrl_core.runs.run_dir import CHECKPOINT

if TYPE_CHECKING:
    from agentrl_core.api.renderer import Renderer

TESTED = {"torch": "2.13.0", "transformers": "5.19.0", "tensordict": "0.15.3", "ray": "2.60.0"}
"""The versions of constraints.txt."""
OLDEST = {"torch": "2.11", "transformers": "5.16", "tensordict": "0.12", "ray": "2.49"}
EXTRA = {"ray": "ray"}


def run(
    model: Annotated[
        Path | None, typer.Option(help="Directory of a model: also check its chat template and memory.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file: check its model with its renderer, as a run would.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare installed packages with the tested versions, and check whether a model can serve.

    Raises:
        ConfigError: ``model`` is no directory with a model.
        CheckpointError: it is a checkpoint's, and damaged.
    """
    if model is not None and config is not None:
        raise typer.BadParameter("names a model too; leave out one of the two", param_hint="--config")
    if model is not None and not (model / "config.json").is_file():
        raise ConfigError(f"--model {model}: expected a directory with config.json, weights and tokenizer")
    if model is not None and CHECKPOINT.match(model.resolve().parent.name):
        from agentrl_core.trainer.checkpoint import checkpoint_path

        checkpoint_path(model.resolve().parent)
    found = None if model is None and config is None else _model(model, config)
    if as_json:
        keys = "package", "found", "tested", "verdict"
        packages = [dict(zip(keys, row, strict=True)) for row in _versions()]
        content = {"schema_version": 1, "packages": packages, **({} if found is None else {"model": found})}
        typer.echo(json.dumps(content, indent=2, ensure_ascii=False))
        return
    _print_versions()
    if found is not None:
        _print_model(found)


def _versions() -> Iterator[tuple[str, str, str, str]]:
    """Name, version found, version tested and verdict of Python and of each package."""
    python = platform.python_version()
    supported = (3, 11) <= tuple(map(int, python.split(".")[:2])) <= (3, 13)
    yield "python", python, "3.11", "ok" if supported else "use Python 3.11, 3.12 or 3.13"
    for package, tested in TESTED.items():
        found, verdict = _verdict(package, tested)
        yield package, found, tested, verdict


def _print_versions() -> None:
    table = new_table("PACKAGE", "FOUND", "TESTED", "VERDICT")
    for row in _versions():
        table.add_row(*row)
    console_of_stdout().print(table)
    try:
        import torch
    except ModuleNotFoundError:
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none, models run on the CPU"
    threads = torch.get_num_threads()
    say(f"GPU: {device}. CPU threads of torch: {threads} (1 suits tiny models: cluster.cpu_threads)")


def _verdict(package: str, tested: str) -> tuple[str, str]:
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-", f"missing: pip install 'agentrl-core[{EXTRA.get(package, 'train')}]'"
    if Version(found) < Version(OLDEST[package]):
        return found, f"too old: pip install '{package}=={tested}'"
    if Version(found).release[:2] == Version(tested).release[:2]:
        return found, "ok"
    return found, "not tested, should work"


def _model(model: Path | None, config: Path | None) -> dict[str, Any]:
    """What the model, or the model and renderer of a configuration, can do."""
    from agentrl_core.config import ModelConfig, load_config
    from agentrl_core.data.call_format import call_format, installed_parsers, renderer_of
    from agentrl_core.data.chat_template import ChatTemplateRenderer, build_renderer
    from agentrl_core.data.renderer import HFChatRenderer
    from agentrl_core.data.template_check import RenderedText, check_template
    from agentrl_core.fsdp2.models import check_architecture

    name, reads_text = "chat_template", True
    if config is None:
        settings = ModelConfig(path=str(model))
        renderer: Renderer = ChatTemplateRenderer.of(HFChatRenderer.from_config(settings))
    else:
        loaded = load_config(config, check_files=False)
        settings, slot = loaded.model, loaded.rollout.renderer
        name, reads_text = slot.registered_name, slot.has("tool_parser")
        renderer = build_renderer(slot, settings, loaded.rollout.tool_parser.build(ToolParserContext()))
    report = check_template(RenderedText(renderer))
    written = call_format(RenderedText(renderer), list(renderer.stop_texts.values()))
    readers = written.readers(installed_parsers()) if reads_text else []
    parameters = check_architecture(settings.path, settings).parameters()
    nbytes = sum(each.numel() * each.element_size() for each in parameters)
    return {
        "path": str(settings.path),
        "renderer": name,
        "system_message": report.system,
        "tool_schemas": report.tools,
        "tool_role": report.tool_role,
        "call": written.one,
        "reads_text": reads_text,
        "tool_parsers": readers,
        "better_renderer": renderer_of(readers[0]) if readers else "",
        "append_only": report.append_only,
        "breaks": list(report.breaks),
        "errors": list(report.errors),
        "weights": _weights_problem(Path(settings.path)),
        # Together, on however many devices; AdamW has two moments.
        "memory_bytes": {"weights": nbytes, "gradients": nbytes, "moments": 2 * nbytes},
    }


def _weights_problem(model: Path) -> str:
    from agentrl_core.fsdp2.model_files import check_weights

    try:
        check_weights(model)
    except ConfigError as error:
        return str(error)
    return ""


def _print_model(found: dict[str, Any]) -> None:
    say(f"\n{found['path']}")
    say(f"  renderer        {found['renderer']}")
    say(f"  system message  {'yes' if found['system_message'] else 'no'}")
    say(f"  tool schemas    {'yes' if found['tool_schemas'] else 'no: the template does not show them to the model'}")
    say(f"  tool role       {'yes' if found['tool_role'] else 'no: runs with tools are rejected'}")
    say(f"  tool parser     {_parser_line(found)}")
    if found["better_renderer"]:
        say(f"  hint            set rollout.renderer to {found['better_renderer']}: it reads calls by their tokens")
    say(f"  append-only     {'yes' if found['append_only'] else 'no: rollout.template_break decides'}")
    for line in (*found["breaks"], *found["errors"]):
        say(f"    {line}")
    say(f"  weights         {found['weights'] or 'complete'}")
    memory = ", ".join(f"{name} {_gib(size)}" for name, size in found["memory_bytes"].items())
    say(f"  memory          {memory}; `agentrl plan` says what a run needs on a GPU")


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"


def _parser_line(found: dict[str, Any]) -> str:
    if not found["reads_text"]:
        return "not needed: the renderer reads the calls"
    if found["tool_parsers"]:
        return f"{found['tool_parsers'][0]}: set rollout.tool_parser to it"
    if found["call"]:
        return f"none: no installed parser reads {found['call'][:200]!r}"
    return "unknown: the template writes no tool calls"
