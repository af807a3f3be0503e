"""``agentrl plan``."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl_core.api.errors import ConfigError
from agentrl_core.cli._shared import ConfigFile, Json, Overrides, console_of_stdout, new_table, say, set_up_logging
from agentrl_core.config import ResolvedConfig, load_config
from agentrl_core.config.hub import fetched, is_hub_name

if TYPE_CHECKING:
    from agentrl_plan.prediction import Prediction

_GIB = 2**30
_BAR = 40


app = typer.Typer(add_completion=False)


@app.command()
def run(
    config: ConfigFile,
    overrides: Overrides = None,
    gpu: Annotated[
        str, typer.Option("--gpu", help="GPU of each process, by name; an unknown name lists those that are known.")
    ] = "h100-80g",
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Instead of cluster.nodes.")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option("--gpus-per-node", min=1, help="Instead of cluster.processes_per_node.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Instead of model.path: a directory with config.json, or org/name.")
    ] = None,
    advise: Annotated[
        bool, typer.Option("--advise/--no-advise", help="Try changes too: what would fit, or what more would.")
    ] = True,
    mesh: Annotated[
        bool, typer.Option("--mesh", help="Try meshes of training processes too: the cheapest that fits, and why.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Simulate a step of a run without a GPU: does it fit, what takes the memory, how long is a step.

    Only the model's config.json is needed, no weights.
    """
    from agentrl_core.fsdp2.models import check_architecture, check_lengths
    from agentrl_core.trainer.checks import check_context
    from agentrl_core.trainer.plan import max_model_len
    from agentrl_plan.changes import changes, largest_model, spare
    from agentrl_plan.devices import device_of
    from agentrl_plan.meshes import Tried, best_mesh, with_options
    from agentrl_plan.prediction import Prediction, predict

    set_up_logging(stderr=as_json)
    device = device_of(gpu)
    given = [*(overrides or []), *_given(nodes, gpus_per_node, model)]
    loaded = _loaded(config, given)
    built = check_architecture(loaded.model.path, loaded.model)
    check_context(loaded, built.config.get_text_config())
    check_lengths(built.config, max_model_len(loaded), "model.path")
    prediction = predict(loaded, device)

    def attempt(more: Sequence[str]) -> Prediction:
        return predict(_loaded(config, [*given, *more]), device)

    advice, tried = list[str](), list[Tried]()
    if mesh:
        given_mesh = loaded.trainer.backend.config
        tried, reason = best_mesh(
            loaded,
            lambda options: prediction if options == given_mesh else predict(with_options(loaded, options), device),
        )
        advice = [reason]
    elif advise and prediction.fits:
        advice = [spare(loaded, prediction, attempt)]
    elif advise:
        advice = [f"fits with {change}" for change in changes(loaded, attempt)]
        advice = advice or [f"no change of the configuration makes it fit; {largest_model(prediction)}"]
    if as_json:
        meshes = [{"options": vars(each.options), "bytes": each.peak, "seconds": each.seconds,
                   "fits": each.prediction.fits, "estimated": each.prediction.estimated} for each in tried]  # fmt: skip
        content = {**prediction.to_dict(), "advice": advice, **({"meshes": meshes} if mesh else {})}
        typer.echo(json.dumps({"schema_version": 1, **content}, indent=2))
    else:
        _print(prediction, [*(["\nMeshes, the best one first:"] if mesh else []), *map(str, tried), *advice])
    if not (prediction.fits or any(each.prediction.fits for each in tried)):
        raise typer.Exit(1)


def _given(nodes: int | None, gpus_per_node: int | None, model: str | None) -> list[str]:
    given = [] if nodes is None else [f"cluster.nodes={nodes}"]
    given += [] if gpus_per_node is None else [f"cluster.processes_per_node={gpus_per_node}"]
    if (nodes or 1) * (gpus_per_node or 1) > 1:
        given.append("cluster.runtime=ray")
    return [*given, *([] if model is None else [f"model.path={json.dumps(model)}"])]


def _loaded(config: Path, overrides: Sequence[str]) -> ResolvedConfig:
    """The configuration, whose model may lack its weights."""
    loaded = load_config(config, list(overrides), check_files=False)
    problems: list[str] = []
    for name in ("model", "critic", "reference", "teacher"):
        section = getattr(loaded, name)
        if section.path is not None:
            try:
                section.path = _config_directory(section.path)
            except ConfigError as error:
                problems += [f"{name}.path: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return loaded


def _print(prediction: "Prediction", advice: Sequence[str]) -> None:
    device, count = prediction.device, prediction.processes
    say(
        f"{prediction.parameters / 1e9:.2f} billion parameters on {count} x {device.name} "
        f"({device.memory / _GIB:.1f} GiB each); micro-batches of {prediction.shape}"
    )
    if prediction.estimated:
        say(f"ESTIMATE from sizes, because the model cannot be simulated: {prediction.estimated}")
    parts = list(dict.fromkeys(part for phase in prediction.phases.values() for part in phase.memory))
    table = new_table("GiB", *prediction.phases, right=tuple(prediction.phases))
    for part in parts:
        values = [phase.memory.get(part, 0) / _GIB for phase in prediction.phases.values()]
        table.add_row(part, *(f"{value:.2f}" if value else "-" for value in values))
    table.add_row("together", *(f"{phase.total / _GIB:.2f}" for phase in prediction.phases.values()))
    for name in sorted({name for phase in prediction.phases.values() for name in phase.collectives}):
        sent = [phase.collectives.get(name, 0.0) / _GIB for phase in prediction.phases.values()]
        table.add_row(f"{name}, a step", *(f"{value:.1f}" if value else "-" for value in sent))
    table.add_row("TFLOP, a step", *(f"{phase.operations / 1e12:.0f}" for phase in prediction.phases.values()))
    table.add_row("seconds, at least", *(f"{phase.seconds:.1f}" for phase in prediction.phases.values()))
    console_of_stdout().print(table)
    say("")
    width = max(map(len, prediction.phases))
    for name, phase in prediction.phases.items():
        filled = min(round(_BAR * phase.total / device.memory), _BAR)
        bar = "#" * filled + "." * (_BAR - filled)
        say(f"{name:<{width}} |{bar}| {phase.total / device.memory:4.0%}")
    say(f"\n{prediction.line}")
    for line in advice:
        say(line)


def _config_directory(path: str) -> str:
    """The directory with the config of a model, which may lack weights; of the hub only ``config.json`` is fetched.

    Raises:
        ConfigError: there is none.
    """
    if (Path(path) / "config.json").is_file():
        return path
    if not is_hub_name(path):
        found = f"{path} has no config.json" if Path(path).is_dir() else f"no such directory: {path}"
        raise ConfigError(f"{found}; name a directory with the model's config.json, or a model of the hub as org/name")
    from huggingface_hub import hf_hub_download

    return str(Path(fetched(path, lambda name, **of: hf_hub_download(name, "config.json", **of))).parent)
