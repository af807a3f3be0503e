"""Options of the backend, the engine and the limits."""

from dataclasses import dataclass

from agentrl_core.api.config import option


@dataclass
class ServerConfig:
    """Which server, and how long to wait for it."""

    url: str | None = option(
        None,
        help="address of the server, such as http://127.0.0.1:8000; null: the environment variable TINKER_BASE_URL",
    )
    key_variable: str = option("TINKER_API_KEY", help="environment variable that has the API key")
    base_model: str | None = option(
        None, help="name of the base model at the server; null: model.path, or the only model that the server has"
    )
    patience: float = option(
        600.0,
        gt=0,
        unit="seconds",
        help="how long to try again while the server cannot be reached, is restarting or is overloaded",
    )


@dataclass
class TinkerBackendConfig(ServerConfig):
    """``trainer.backend.config`` where ``trainer.backend.name`` is ``tinker``."""

    train_attn: bool = option(True, help="give adapters to the layers of attention")
    train_mlp: bool = option(True, help="give adapters to the layers of the MLPs")
    train_unembed: bool = option(False, help="give an adapter to the output layer")
    keep_samplers: int = option(
        8,
        ge=2,
        help="newest weights for sampling that stay at the server; older ones are deleted. More than "
        "rollout.max_staleness",
    )
    ttl: int = option(
        7 * 24 * 3600,
        ge=3600,
        unit="seconds",
        help="after which the server deletes what only a running run needs; checkpoints have no limit",
    )


@dataclass
class TinkerEngineConfig(ServerConfig):
    """``rollout.engine.config`` where ``rollout.engine.name`` is ``tinker``."""


@dataclass
class LimitsConfig:
    """``hooks[].config`` where ``name`` is ``tinker_limits``. Prices are per million tokens, in any currency."""

    max_tokens: int | None = option(
        None, ge=1, unit="tokens", help="end the run after this many, of all kinds together; null: no limit"
    )
    max_cost: float | None = option(
        None, gt=0, help="end the run at this cost, in the currency of the prices; null: no limit"
    )
    price_prompt: float = option(0.0, ge=0, help="price of a million tokens of prompts and of forward passes")
    price_sampled: float = option(0.0, ge=0, help="price of a million sampled tokens")
    price_trained: float = option(0.0, ge=0, help="price of a million tokens of forward and backward passes")
