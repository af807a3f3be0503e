"""``agentrl doctor``: what is installed against what was tested, and whether a model can serve."""

import json
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from packaging.version import Version

from agentrl_core.api.errors import ConfigError
from agentrl_core.cli._shared import Json, console_of_stdout, new_table, say

TESTED = {"torch": "2.13.0", "transformers": "5.19.0", "tensordict": "0.15.3", "ray": "2.60.0"}
"""The versions of constraints.txt."""
OLDEST = {"torch": "2.11", "transformers": "5.16", "tensordict": "0.12", "ray": "2.49"}
EXTRA = {"ray": "ray"}


def run(
    model: Annotated[
        Path | None, typer.Option(help="Directory of a model: also check its chat template and memory.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare installed packages with the tested versions, and check whether a model can serve.

    Raises:
        ConfigError: ``model`` is no directory with a model.
    """
    if model is not None and as_json:
        raise typer.BadParameter("cannot be printed as JSON together with --model", param_hint="--json")
    if as_json:
        keys = "package", "found", "tested", "verdict"
        packages = [dict(zip(keys, row, strict=True)) for row in _versions()]
        typer.echo(json.dumps({"schema_version": 1, "packages": packages}, indent=2))
        return
    _print_versions()
    if model is not None:
        if not (model / "config.json").is_file():
            raise ConfigError(f"--model {model}: expected a directory with config.json, weights and tokenizer")
        _print_model(model)


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


def _print_model(model: Path) -> None:
    from agentrl_core.config import ModelConfig
    from agentrl_core.data.call_format import call_format, installed_parsers
    from agentrl_core.data.renderer import HFChatRenderer
    from agentrl_core.data.template_check import check_template
    from agentrl_core.trainer.plan import weight_lines

    renderer = HFChatRenderer.from_config(ModelConfig(path=str(model)))
    report = check_template(renderer)
    written = call_format(renderer, [renderer.decode([stop]) for stop in renderer.stop_token_ids])
    readers = written.readers(installed_parsers())
    say(f"\n{model}")
    say(f"  system message  {'yes' if report.system else 'no'}")
    say(f"  tool schemas    {'yes' if report.tools else 'no: the template does not show them to the model'}")
    say(f"  tool role       {'yes' if report.tool_role else 'no: runs with tools are rejected'}")
    if readers:
        say(f"  tool parser     {readers[0]}: set rollout.tool_parser to it")
    elif written.one:
        say(f"  tool parser     none: no installed parser reads {written.one[:200]!r}")
    else:
        say("  tool parser     unknown: the template writes no tool calls")
    say(f"  append-only     {'yes' if report.append_only else 'no: rollout.template_break decides'}")
    for line in (*report.breaks, *report.errors):
        say(f"    {line}")
    for line in weight_lines(model):
        say(f"  {line}")
