"""``agentrl bench``."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

import agentrl_core
from agentrl_core.api import ConfigError
from agentrl_core.cli._shared import ConfigFile, Json, Overrides, console_of_stdout, new_table, say, set_up_logging

if TYPE_CHECKING:
    from agentrl_plan.step_bench import StepFigures

app = typer.Typer(add_completion=False)


@app.command()
def run(
    config: ConfigFile,
    overrides: Overrides = None,
    against: Annotated[
        str | None, typer.Option("--against", help="Another config, or a commit of agentrl, to compare with.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each run, after a first one.")] = 3,
    pairs: Annotated[int, typer.Option(min=1, help="Runs of each of the two, with --against.")] = 3,
    as_json: Json = False,
) -> None:
    """Train a few steps, and print where their time goes: medians, by phase. Nothing is kept.

    With a commit in --against, the code of the working tree is compared with that commit's, on the same config.
    """
    from agentrl_plan.step_bench import figures, measure

    set_up_logging(stderr=as_json)
    ratios: list[float] = []
    if against is None:
        found = {str(config): figures(measure(config, overrides or [], steps))}
    else:
        found, ratios = _compared(config, against, overrides or [], steps, pairs)
    if as_json:
        configs = {name: asdict(each) for name, each in found.items()}
        typer.echo(json.dumps({"schema_version": 1, "configs": configs, "ratios": ratios}, indent=2))
        return
    for name, each in found.items():
        _print(name, each)
    if ratios:
        shown = " ".join(f"{ratio:.2f}" for ratio in ratios)
        say(f"a step of {against} takes {median(ratios):.2f} times as long (median of {len(ratios)} pairs: {shown})")


def _compared(
    config: Path, against: str, overrides: Sequence[str], steps: int, pairs: int
) -> tuple[dict[str, "StepFigures"], list[float]]:
    from agentrl_plan.step_bench import checkout, compare, measure, measure_at

    if not Path(against).is_file():
        with checkout(against) as folder:
            # Both in a new process, as a comparison needs.
            here = Path(agentrl_core.__file__).parents[1]
            one, other, ratios = compare(
                lambda: measure_at(here, config, overrides, steps),
                lambda: measure_at(folder, config, overrides, steps),
                pairs,
            )
        return {str(config): one, f"{config} at {against}": other}, ratios
    if Path(against) == config:
        raise ConfigError("--against: this is the same file; name another config")
    one, other, ratios = compare(
        lambda: measure(config, overrides, steps), lambda: measure(Path(against), overrides, steps), pairs
    )
    return {str(config): one, against: other}, ratios


def _print(name: str, found: "StepFigures") -> None:
    table = new_table(name, "SECONDS", "SHARE", right=("SECONDS", "SHARE"))
    for phase, seconds in found.phases.items():
        table.add_row(phase, f"{seconds:.3f}", f"{seconds / found.seconds:.0%}")
    table.add_row("step", f"{found.seconds:.3f}", "100%")
    console_of_stdout().print(table)
    say(f"{found.tokens_per_second:,.0f} sampled tokens per second\n")
