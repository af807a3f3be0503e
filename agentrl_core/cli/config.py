"""``agentrl config show``."""

import json
from typing import Annotated

import typer

from agentrl_core.cli._shared import ConfigFile, Overrides, command_group

SCHEMA_VERSION = 1

app = command_group()


@app.command()
def show(
    config: ConfigFile,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: key, value and origin of each value.")] = False,
) -> None:
    """Print the whole resolved configuration, each value with its origin. Model and data need not exist."""
    from agentrl_core.config import load_with_origins, to_commented_yaml, to_dict
    from agentrl_core.config.nodes import dotted
    from agentrl_core.config.writing import leaves

    loaded, origins = load_with_origins(config, overrides or [])
    if not as_json:
        typer.echo(to_commented_yaml(loaded, origins), nl=False)
        return
    values = {dotted(path): value for path, value in leaves(to_dict(loaded))}
    shown = [{"key": key, "value": value, "origin": origins[key]} for key, value in values.items()]
    typer.echo(json.dumps({"schema_version": SCHEMA_VERSION, "values": shown}, indent=2, ensure_ascii=False))
