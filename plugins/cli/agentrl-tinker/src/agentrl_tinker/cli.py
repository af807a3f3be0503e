"""``agentrl tinker``."""

import ipaddress
import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl_core.api.errors import ConfigError
from agentrl_core.cli._shared import command_group, say, set_up_logging

app = command_group("Serve the API of the Tinker SDK, or check a server of it.")


@app.command()
def serve(
    model: Annotated[Path, typer.Option("--model", help="Folder with weights, config and tokenizer.")],
    state: Annotated[Path, typer.Option("--state", help="Folder of the checkpoints.")] = Path("tinker-state"),
    name: Annotated[
        str | None, typer.Option("--name", help="What clients call the model; default: as in --model.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on.")] = 8000,
    keys: Annotated[
        Path | None, typer.Option("--keys", help="File with an API key (tml-…) on each line; default: all are let in.")
    ] = None,
    engine: Annotated[
        str, typer.Option("--engine", help="Inference engine, by the name of rollout.engine.name.")
    ] = "hf",
    engine_option: Annotated[
        list[str] | None,
        typer.Option("--engine-option", metavar="KEY=VALUE", help="Option of the engine; may be repeated."),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="Data type of the frozen weights; default: bfloat16 on CUDA, else float32."),
    ] = None,
    max_adapters: Annotated[
        int, typer.Option("--max-adapters", min=1, help="Adapters that are trained at the same time.")
    ] = 16,
    max_rank: Annotated[int, typer.Option("--max-rank", min=1, help="Highest rank of an adapter.")] = 64,
    max_slots: Annotated[
        int, typer.Option("--max-slots", min=1, help="Adapters that the engine serves at the same time.")
    ] = 8,
    unembed: Annotated[
        bool, typer.Option("--unembed/--no-unembed", help="Let adapters change the output layer, too.")
    ] = True,
    max_model_len: Annotated[
        int | None,
        typer.Option("--max-model-len", min=2, help="Tokens of a sequence; default: as the model, at most 8192."),
    ] = None,
    micro_batch_tokens: Annotated[
        int, typer.Option("--micro-batch-tokens", min=1, help="Tokens that are trained on at once, padding included.")
    ] = 8192,
    gradient_checkpointing: Annotated[
        bool,
        typer.Option("--gradient-checkpointing", help="Recompute activations in the backward pass to save memory."),
    ] = False,
    session_timeout: Annotated[
        float,
        typer.Option(
            "--session-timeout",
            min=1,
            help="Seconds without a word of a client, after which its adapters are released.",
        ),
    ] = 300.0,
) -> None:
    """Serve a model to clients of the Tinker SDK: they train LoRA adapters on it, and sample with them."""
    set_up_logging()
    logging.getLogger("agentrl_tinker").setLevel(logging.INFO)
    if keys is None and not _is_loopback(host):
        raise ConfigError(f"--keys: {host} can be reached from other machines. Name a file with the API keys to let in")
    let_in = None if keys is None else _keys(keys)
    # With torch, for which a wrong option should not wait.
    from agentrl_tinker.serving import Options, run

    options = Options(
        model=str(model), state=state, name=name, keys=let_in, engine=engine,
        engine_options=_options(engine_option or []), device=_one_of("--device", device, ("auto", "cpu", "cuda")),
        dtype=None if dtype is None else _one_of("--dtype", dtype, ("float32", "bfloat16")),
        max_adapters=max_adapters, max_rank=max_rank, max_slots=max_slots, unembed=unembed, max_model_len=max_model_len,
        micro_batch_tokens=micro_batch_tokens, gradient_checkpointing=gradient_checkpointing,
        session_timeout=session_timeout,
    )  # fmt: skip
    run(options, host, port)


@app.command()
def check(
    url: Annotated[str, typer.Argument(help="Address of a server, such as http://127.0.0.1:8000.")],
    key: Annotated[str, typer.Option("--key", envvar="TINKER_API_KEY", help="API key.")],
    other_key: Annotated[
        str | None, typer.Option("--other-key", help="Another API key, to check that keys are isolated.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Base model; default: the first that the server names.")
    ] = None,
    unembed: Annotated[
        bool, typer.Option("--unembed/--no-unembed", help="Train adapters that change the output layer, too.")
    ] = True,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="Run this check; may be repeated.")
    ] = None,
) -> None:
    """Check that a server does what clients of the Tinker SDK rely on; the exit code is 1 where it does not."""
    import asyncio

    from agentrl_tinker.check import CHECKS, Outcome, run_checks

    if unknown := set(only or ()) - CHECKS.keys():
        raise ConfigError(f"--only: there is no check {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    outcomes: list[Outcome] = asyncio.run(
        run_checks(url, key, other_key, model, only, report=lambda each: say(str(each)), unembed=unembed)
    )
    failures = sum(each.state == "failed" for each in outcomes)
    say(f"{sum(each.state == 'passed' for each in outcomes)} checks passed, {failures} failed")
    if failures:
        raise typer.Exit(1)


def _keys(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except OSError as error:
        raise ConfigError(f"--keys: {path} cannot be read: {error}") from error
    found = [line for line in lines if line and not line.startswith("#")]
    if wrong := [line for line in found if not line.startswith("tml-")]:
        raise ConfigError(
            f"--keys: {len(wrong)} keys in {path} do not begin with tml-, without which the SDK takes no key"
        )
    if not found:
        raise ConfigError(f"--keys: {path} has no key. Write one on each line, such as tml-{'x' * 8}")
    return found


def _options(given: list[str]) -> dict[str, Any]:
    import yaml

    pairs = [text.partition("=") for text in given]
    if wrong := [key for key, equals, _ in pairs if not equals]:
        raise ConfigError(f"--engine-option: {wrong[0]!r} is not of the form KEY=VALUE")
    return {key: yaml.safe_load(value) for key, _, value in pairs}


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise ConfigError(f"{option}: {value!r}; allowed: {', '.join(allowed)}")
    return value


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
