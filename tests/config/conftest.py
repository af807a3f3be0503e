"""A configuration to break, and plugins to choose that need no installation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl_core.api import KINDS, PluginNotFoundError, PluginRef, PluginSpec, option
from agentrl_core.api.config import NoConfig
from agentrl_core.api.errors import ConfigError
from agentrl_core.config import Config
from agentrl_core.config.loading import bind as bind_tree
from agentrl_core.config.loading import load_config

VALID = """\
model:
  path: model
data:
  train_files: [train.jsonl]
rollout:
  agent:
    loops: [single_turn]
reward:
  functions: [exact]
"""


@dataclass
class Cache:
    size: int = option(1, ge=1, help="entries")


@dataclass
class EngineOptions:
    max_num_seqs: int = option(64, ge=1, help="rows of a batch")
    fraction: float | None = option(None, gt=0, le=1, help="of the memory")
    mode: str = option("fast", choices=("fast", "small"), help="what to save")
    stop: int | str = option(0, help="token or text")
    window: tuple[int, int] = option((0, 1), help="first and last")
    weights: str | None = option(None, path=True, help="file")
    limits: dict[str, int] = field(default_factory=dict)
    cache: Cache = field(default_factory=Cache)


@dataclass
class ToolOptions:
    secret: str = option(help="password of the tool")


@dataclass
class Fussy:
    low: int = 0
    high: int = 1

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) must not exceed high ({self.high})")


@dataclass
class Unreadable:
    x: "NoSuchType" = 0  # type: ignore[name-defined] # noqa: F821 - an annotation that cannot be evaluated


def _spec(kind: str, name: str, config: type = NoConfig, *capabilities: str) -> PluginSpec:
    return PluginSpec(kind, name, 1, name, "module:attribute", config, capabilities=frozenset(capabilities))


SPECS = [
    _spec("engine", "hf", EngineOptions, "deterministic", "shared_module"),
    _spec("engine", "fussy", Fussy, "logprobs"),
    _spec("engine", "unreadable", Unreadable),
    _spec("agent_loop", "single_turn"),
    _spec("agent_loop", "two_turns"),
    _spec("agent_loop", "scores_itself", NoConfig, "rewards"),
    _spec("agent_loop", "tool_agent", NoConfig, "tools", "interactions"),
    _spec("renderer", "chat_template", NoConfig, "tool_parser"),
    _spec("tool_parser", "hermes"),
    _spec("tool", "calculator"),
    _spec("tool", "search", ToolOptions),
    _spec("interaction", "tutor"),
    _spec("environment", "game"),
    _spec("reward_manager", "naive"),
    _spec("reward_manager", "tools_only", NoConfig, "tool_rewards"),
    _spec("reward_function", "exact"),
    _spec("advantage_estimator", "grpo", NoConfig, "groups"),
    _spec("advantage_estimator", "gae", NoConfig, "values"),
    _spec("policy_loss", "ppo"),
    _spec("rollout_correction", "truncated", Cache),
    _spec("rollout_correction", "masked"),
    _spec("dataset", "prompts"),
    _spec("sampler", "shuffle"),
    _spec("batch_policy", "deadline"),
    _spec("tracker", "console"),
    _spec("tracker", "jsonl"),
    _spec("tracker", "tensorboard"),
    _spec("tracker", "curve"),
    _spec("hook", "printer"),
    _spec("training_backend", "fsdp2", NoConfig, *KINDS["training_backend"].capabilities),
    _spec("training_backend", "small", NoConfig, "all_weights"),
]


def resolve(kind: str, name: str, *, base_dir: Path | None = None, block: Sequence[str] = ()) -> Any:
    if name in block:
        raise PluginNotFoundError(f"'{name}' is blocked")
    if ".py:" in name:
        file, attribute = name.split(":")
        path = (base_dir or Path()) / file
        if not path.is_file():
            raise PluginNotFoundError(f"no such file: {path}")
        ref = PluginRef(kind, f"{path.name}:{attribute}", "file", "0")
        return SimpleNamespace(spec=_spec(kind, "file"), ref=ref)
    for spec in SPECS:
        if (spec.kind, spec.name) == (kind, name):
            return SimpleNamespace(spec=spec, ref=PluginRef(kind, name, "fake", "1.0"))
    raise PluginNotFoundError(f"'{name}' is not an installed {kind}")


def installed_with(kind: str, capability: str, block: Sequence[str]) -> list[str]:
    able = [spec.name for spec in SPECS if spec.kind == kind and capability in spec.capabilities]
    return [name for name in able if name not in block]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write_file(text: str, name: str = "config.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


@pytest.fixture
def load(write: Callable[..., Path]) -> Callable[..., Config]:
    """``load(text, *overrides)``: the configuration of a file with this text."""

    def load_text(text: str = VALID, *overrides: str, check_files: bool = False) -> Config:
        return load_config(
            write(text), overrides, check_files=check_files, resolver=resolve, alternatives=installed_with
        )

    return load_text


@pytest.fixture
def problems(load: Callable[..., Config]) -> Callable[..., list[str]]:
    """``problems(text, *overrides)``: the messages that such a configuration gives."""

    def messages(text: str = VALID, *overrides: str, check_files: bool = False) -> list[str]:
        try:
            load(text, *overrides, check_files=check_files)
        except ConfigError as error:
            return list(error.problems)
        return []

    return messages


@pytest.fixture
def bind() -> Callable[..., Config]:
    def bind_config(config: Config) -> Config:
        return bind_tree(config, check_files=False, resolver=resolve)

    return bind_config


@pytest.fixture
def valid() -> str:
    return VALID
