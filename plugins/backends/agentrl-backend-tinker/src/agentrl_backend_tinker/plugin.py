"""The entry points of the backend, the engine and the limits."""

from agentrl_backend_tinker.config import LimitsConfig, TinkerBackendConfig, TinkerEngineConfig
from agentrl_core.api.plugin import PluginSpec

REQUIRES = ("httpx>=0.27", "protobuf>=5")

BACKEND = PluginSpec(
    kind="training_backend",
    name="tinker",
    api_version=1,
    summary="a server of the Tinker API computes and trains: no GPU of your own",
    factory="agentrl_backend_tinker.backend:TinkerBackend",
    config=TinkerBackendConfig,
    requires=(*REQUIRES, "torch>=2.11"),
    capabilities=frozenset({"adapters", "policies", "remote_weights"}),
)

ENGINE = PluginSpec(
    kind="engine",
    name="tinker",
    api_version=1,
    summary="samples at the server of the training backend tinker",
    factory="agentrl_backend_tinker.engine:TinkerEngine",
    config=TinkerEngineConfig,
    requires=REQUIRES,
    capabilities=frozenset(
        {"logprobs", "seeds", "abort", "weight_update", "live_update", "adapters", "remote_weights"}
    ),
)

LIMITS = PluginSpec(
    kind="hook",
    name="tinker_limits",
    api_version=1,
    summary="ends a run after a number of tokens, or at a cost, with a checkpoint",
    factory="agentrl_backend_tinker.limits:Limits",
    config=LimitsConfig,
)
