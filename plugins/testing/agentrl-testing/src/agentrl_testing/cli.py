"""The commands for authors of tasks and plugins: ``init``, ``config schema``, ``try``, ``plugins new``,
``plugins check``, ``replay`` and ``reward replay``."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from agentrl_core.api.dataset import Split
from agentrl_core.api.errors import ConfigError
from agentrl_core.cli._shared import (
    ConfigFile,
    Json,
    Overrides,
    command_group,
    console_of_stdout,
    reading_input,
    say,
    set_up_logging,
    warn,
)
from agentrl_core.cli.plugins import Kind, kinds_named
from agentrl_core.cli.rollouts import found_step
from agentrl_core.config import load_config
from agentrl_core.runs.run_dir import RunDir

Several = list[str] | None

new = typer.Typer(add_completion=False)
check = typer.Typer(add_completion=False)
init = typer.Typer(add_completion=False)
replay = typer.Typer(add_completion=False)
reward = command_group("Debug reward functions.")
schema = typer.Typer(add_completion=False)
trial = typer.Typer(add_completion=False)


@new.command()
def new_plugin(
    kind: Annotated[str, typer.Argument(help="A kind, such as tool or agent_loop.", show_default=False)],
    name: Annotated[str, typer.Argument(help="Name of the plugin, its package and its folder.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", help="Folder to create the package's folder in.")] = Path("."),
) -> None:
    """Create the package of a new plugin, which installs and passes its own tests."""
    from agentrl_testing.devtools.scaffold import scaffold

    folder = scaffold(kind, name, output)
    typer.echo(f"{folder}: README.md says what to fill in")
    typer.echo(f"next: pip install -e '{folder}[test]' && pytest {folder}")


@check.command()
def check_plugins(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...", help="Names, package:name, or packages. By default: all.", show_default=False
        ),
    ] = None,
    kind: Kind = None,
    no_ray: Annotated[bool, typer.Option("--no-ray", help="Do not check in a Ray worker.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="Maximum seconds per plugin.")] = 60.0,
    as_json: Json = False,
) -> None:
    """Import plugins and check what they build, each in its own process and in a Ray worker."""
    from agentrl_testing.devtools.check_command import run

    raise typer.Exit(run(names or [], kinds=kinds_named(kind), on_ray=not no_ray, time_limit=timeout, as_json=as_json))


@init.command()
def write_start_files(
    folder: Annotated[Path, typer.Argument(help="New folder for the task, or an existing one.")] = Path("."),
    model: Annotated[
        str | None, typer.Option(help="A directory, or a name on the Hugging Face hub.", show_default=False)
    ] = None,
    data: Annotated[Several, typer.Option(help="A file of rows; may be repeated. By default: an example.")] = None,
    tool: Annotated[Several, typer.Option(help="./file.py:function, or a tool's name; may be repeated.")] = None,
    reward: Annotated[
        Several, typer.Option(help="./file.py:function, or a reward's name; may be repeated. By default: an example.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="hf, vllm or sglang.", show_default="hf")] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="Name of an advantage estimator or a policy loss.", show_default="grpo")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Write a commented config.yaml for your model, data, tool and reward; on a terminal, ask for what is missing."""
    from agentrl_testing.devtools.starter import Start, write_start

    if model is None and not sys.stdin.isatty():
        raise ConfigError("--model is missing: give a directory, or a hub name such as Qwen/Qwen3-0.6B")
    if model is None:
        model = typer.prompt("Model (a directory, or a name on the Hugging Face hub)", err=True)
        data = data or _asked("File of rows (empty: write an example)")
        tool = tool or _asked("Tool (./file.py:function or a name; empty: none, or the example's)")
        reward = reward or _asked("Reward (./file.py:function or a name; empty: write an example)")
        engine = engine or typer.prompt("Engine", default="hf", err=True)
        algorithm = algorithm or typer.prompt("Algorithm", default="grpo", err=True)
    start = Start(model, data or (), tool or (), reward or (), engine or "hf", algorithm or "grpo")
    written = write_start(start, folder, force)
    typer.echo(f"wrote {', '.join(map(str, written))}. Next:")
    typer.echo(f"  agentrl train {written[0]} --dry-run")


def _asked(question: str) -> list[str]:
    return str(typer.prompt(question, default="", show_default=False, err=True)).split()


@schema.command()
def print_schema() -> None:
    """Print the JSON Schema of all configurations with the options of all installed plugins, for editors."""
    from agentrl_testing.devtools.json_schema import config_schema

    typer.echo(json.dumps(config_schema(), indent=2, ensure_ascii=False))


@trial.command()
def try_config(config: ConfigFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Check a configuration as `agentrl train --dry-run` does, and call each tool and reward function once.

    Tools get made-up arguments, rewards an empty answer to the first prompt.
    """
    from agentrl_core.trainer.preparation import Preparation
    from agentrl_testing.devtools.trial import trial_lines

    set_up_logging(stderr=as_json)
    loaded = load_config(config, overrides or [])
    with reading_input():
        row = Preparation.of(loaded).data.train[0]
    lines = asyncio.run(trial_lines(loaded, row))
    if as_json:
        typer.echo(json.dumps({"schema_version": 1, "tried": lines}, indent=2, ensure_ascii=False))
        return
    for line in lines:
        say(line)


@reward.command("replay")
def replay_file(
    rollouts: Annotated[Path, typer.Argument(help="A run's file rollouts/step-….jsonl.", show_default=False)],
    function: Annotated[
        str, typer.Option("--reward", help="A reward function: its name, or ./file.py:function.", show_default=False)
    ],
    config: Annotated[
        Path | None, typer.Option(help="Configuration that lists the function in reward.functions, with its options.")
    ] = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="Print every trajectory, not only the first 20 whose score changed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every trajectory.")] = False,
) -> None:
    """Score the trajectories of a file again in this process: `agentrl replay RUN --reward` for a file."""
    from agentrl_testing.devtools.replay import replay_reward, show_rewards

    if as_json:
        set_up_logging(stderr=True)
    found = replay_reward(rollouts, function, config)
    if as_json:
        typer.echo(found.to_json())
    else:
        show_rewards(found, console_of_stdout(), show_all)


@replay.command()
def replay_run(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run.", show_default=False)],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A value to replace, rollout.tool_parser=hermes; repeatable."),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Step. By default: the newest.")] = None,
    validation: Annotated[bool, typer.Option("--validation", help="Replay validation trajectories.")] = False,
    reward: Annotated[
        str | None, typer.Option(help="Only score again, with this function: its name, or ./file.py:function.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="With --reward: configuration that lists the function, with its options.")
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Print every trajectory that differs, not only 20.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every trajectory.")] = False,
) -> None:
    """Run recorded trajectories again: the policy's tokens are the recorded ones, everything else runs again."""
    from agentrl_testing.devtools import replay as replaying

    split: Split = "validation" if validation else "train"
    run = RunDir(run_dir)
    if changes and reward:
        raise typer.BadParameter("set reward.functions with --set, or leave out --set", param_hint="--reward")
    if config and not reward:
        raise typer.BadParameter("goes with --reward; otherwise the run's own is used", param_hint="--config")
    if as_json:
        set_up_logging(stderr=True)
    step = found_step(run, step, split)
    if reward:
        found, show = replaying.replay_reward(run.rollout_file(step, split), reward, config), replaying.show_rewards
    else:
        for problem in run.changed_config():
            warn(problem)
        found, show = replaying.replay(run, step, split, changes or []), replaying.show_replay
    if as_json:
        typer.echo(found.to_json())
    else:
        show(found, console_of_stdout(), show_all)
