"""Writes a new task from ``agentrl_testing/templates/start``: a commented configuration, and rows, tool and reward if
the user has none yet."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

import yaml

from agentrl_core.api.errors import ConfigError, PluginNotFoundError
from agentrl_core.config.hub import is_hub_name
from agentrl_core.plugins.discovery import is_external
from agentrl_core.plugins.file_plugin import is_file_name
from agentrl_core.plugins.resolution import ResolvedPlugin, resolve

_TEMPLATES = files("agentrl_testing") / "templates" / "start"
_NAMES = "./file.py:function, or a name of: agentrl plugins list --kind"
_CRITIC = """
critic:
  optimizer: {lr: 1.0e-5}    # the estimator needs a critic; it starts from the policy's weights
"""


@dataclass(frozen=True)
class Start:
    """What the user has.

    Args:
        model: a directory, or a name on the Hugging Face hub.
        data: files of rows; empty: write examples, which need the example tool.
        tools, rewards: ``file.py:function`` or registered names; rewards empty: write an example.
        engine: name of an inference engine.
        algorithm: name of an advantage estimator or of a policy loss; ``ppo``: with a critic.
    """

    model: str
    data: Sequence[str] = ()
    tools: Sequence[str] = ()
    rewards: Sequence[str] = ()
    engine: str = "hf"
    algorithm: str = "grpo"


def write_start(start: Start, folder: Path, overwrite: bool = False) -> list[Path]:
    """Write the files, and return their paths, the configuration first. Paths of ``start`` are relative to the working
    directory.

    Raises:
        ConfigError: the model or a file of rows is missing, or a file exists and ``overwrite`` is False.
        PluginError: a tool, reward, engine or algorithm doesn't exist.
    """
    contents = {folder / name: text for name, text in _contents(start, folder)}
    existing = [str(path) for path in contents if path.exists()]
    if existing and not overwrite:
        raise ConfigError(f"{', '.join(existing)}: exists already. Choose another folder, or overwrite it with --force")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in contents.items():
        path.write_text(text, encoding="utf-8")
    return list(contents)


def _contents(start: Start, folder: Path) -> Iterator[tuple[str, str]]:
    data = [_from(folder, path, "--data") for path in start.data] or ["rows.jsonl"]
    tools = [_slot("tool", name, folder) for name in start.tools]
    tools = tools or ([] if start.data else ["./tool.py:count_letter"])
    rewards = [_slot("reward_function", name, folder) for name in start.rewards] or ["./reward.py:right_answer"]
    name = re.sub(r"[^\w.-]+", "-", folder.resolve().name) or "run"
    advantage, loss = _algorithm(start.algorithm)
    engine = resolve("engine", start.engine)
    separate = is_external(engine.spec) and bool(engine.spec.requires)
    values = {
        "shown": folder / "config.yaml",
        "model": _yaml(_model(start.model, folder)),
        "data": ", ".join(map(_yaml, data)),
        "engine": _engine(engine, folder) if separate else f"  engine: {start.engine}    # in the trainer's process",
        "cluster": "\ncluster:\n  runtime: ray    # servers of engines are Ray actors\n" if separate else "",
        "loop": "tool_agent" if tools else "single_turn",
        "loop_help": "generate, call tools, repeat" if tools else "one answer to each prompt",
        "parser": f"  tool_parser: {_parser(start.model)}    # agentrl doctor --model PATH names it\n" if tools else "",
        "tools": f"\ntools: [{', '.join(map(_yaml, tools))}]    # {_NAMES} tool\n" if tools else "",
        "reward": ", ".join(map(_yaml, rewards)),
        "advantage": advantage.ref.name,
        "loss": loss,
        "critic": _CRITIC if "values" in advantage.spec.capabilities else "",
        "name": _yaml(name),
    }
    yield "config.yaml", _filled("config.yaml", values)
    if not start.data:
        yield "rows.jsonl", _filled("rows.jsonl")
        if not start.tools:
            yield "tool.py", _filled("tool.py")
    if not start.rewards:
        yield "reward.py", _filled("reward.py")


def _filled(name: str, values: dict[str, object] | None = None) -> str:
    text = (_TEMPLATES / f"{name}.tmpl").read_text(encoding="utf-8")
    return Template(text).substitute(values).rstrip() + "\n" if values else text


def _from(folder: Path, path: str, option: str) -> str:
    """A path as the configuration in ``folder`` writes it.

    Raises:
        ConfigError: there is no such file.
    """
    if not Path(path).exists():
        raise ConfigError(f"{option}: no such file: {path}. Give a file of rows: JSON lines, JSON, parquet or CSV")
    return Path(path if Path(path).is_absolute() else os.path.relpath(path, folder)).as_posix()


def _yaml(text: str) -> str:
    """The text as a scalar, quoted where a plain one would be something else."""
    plain = re.fullmatch(r"[\w./][\w./:@-]*", text) is not None and yaml.safe_load(text) == text
    return text if plain else json.dumps(text, ensure_ascii=False)


def _model(model: str, folder: Path) -> str:
    if Path(model).is_dir() and not (Path(model) / "config.json").is_file():
        raise ConfigError(f"--model: {model} has no config.json; give a directory that transformers can load")
    if Path(model).is_dir():
        return _from(folder, model, "--model")
    if not is_hub_name(model):
        raise ConfigError(
            f"--model: no such directory: {model}. Give a directory, or a hub name such as Qwen/Qwen3-0.6B"
        )
    return model


def _slot(kind: str, name: str, folder: Path) -> str:
    resolve(kind, name)
    if not is_file_name(name):
        return name
    path, _, function = name.rpartition(":")
    path = _from(folder, path, kind)
    return f"{path}:{function}" if path.startswith(("/", "../")) else f"./{path}:{function}"


def _algorithm(name: str) -> tuple[ResolvedPlugin, str]:
    """The advantage estimator, and the name of the loss."""
    if name == "ppo":
        return resolve("advantage_estimator", "gae"), name
    try:
        return resolve("advantage_estimator", name), "ppo"
    except PluginNotFoundError as not_found:
        try:
            return resolve("advantage_estimator", "grpo"), resolve("policy_loss", name).ref.name
        except PluginNotFoundError:
            raise not_found from None


def _engine(engine: ResolvedPlugin, folder: Path) -> str:
    python = Path(os.path.relpath(Path(".engines") / engine.ref.name / "bin" / "python", folder)).as_posix()
    return (
        f"  engine:\n    name: {engine.ref.name}\n"
        f"    python: {python}    # made by: agentrl engines setup {engine.ref.name}"
    )


def _parser(model: str) -> str:
    """The parser that reads what the model's chat template writes; hermes if that isn't known."""
    if not Path(model).is_dir():
        return "hermes"
    from agentrl_core.config import ModelConfig
    from agentrl_core.data.call_format import call_format, installed_parsers
    from agentrl_core.data.renderer import HFChatRenderer

    renderer = HFChatRenderer.from_config(ModelConfig(path=model))
    written = call_format(renderer, [renderer.decode([stop]) for stop in renderer.stop_token_ids])
    return next(iter(written.readers(installed_parsers())), "hermes")
