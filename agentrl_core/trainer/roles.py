"""The model workers and the rollout of a run, built where the runtime puts them."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from transformers import AutoConfig

from agentrl_core.api import ConfigError, EngineContext
from agentrl_core.config.schema import Config
from agentrl_core.controller import ClassWithInitArgs
from agentrl_core.controller.runtime import Runtime, make_runtime
from agentrl_core.plugins import resolve_ref
from agentrl_core.rollout.manager import AgentLoopManager
from agentrl_core.trainer.plan import RunPlan
from agentrl_core.workers.actor import ActorWorker
from agentrl_core.workers.critic import CriticWorker
from agentrl_core.workers.models import resolve_device
from agentrl_core.workers.protocols import Actor, Critic, Reference
from agentrl_core.workers.reference import ReferenceWorker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelFacts:
    """What the model's config says."""

    vocab_size: int
    max_position_embeddings: int | None

    @classmethod
    def read(cls, config: Config) -> "ModelFacts":
        """Read ``config.json`` of ``model.path``.

        Raises:
            ConfigError: transformers cannot make sense of it.
        """
        try:
            found = AutoConfig.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
        except Exception as error:  # noqa: BLE001 - transformers raises many types here
            raise ConfigError(
                f"model.path: {config.model.path} is not a model transformers can load: {error}"
            ) from error
        text = found.get_text_config()
        return cls(int(text.vocab_size), getattr(text, "max_position_embeddings", None))


@dataclass(frozen=True)
class Roles:
    """Everything that computes. ``critic`` and ``reference`` are None where the run needs none."""

    actor: Actor
    critic: Critic | None
    reference: Reference | None
    rollout: AgentLoopManager


def needs_critic(config: Config) -> bool:
    """The advantage estimator has the capability ``values``."""
    ref = config.algorithm.advantage.ref
    return ref is not None and "values" in resolve_ref(ref).spec.capabilities


def training_processes(config: Config) -> int:
    """Processes that train together, each with a part of every model."""
    return config.cluster.nodes * config.cluster.processes_per_node


def needed_cpus(config: Config) -> int:
    """Logical CPUs of a Ray cluster: one for every worker and actor of the run."""
    return (
        training_processes(config)
        + config.rollout.engine.replicas
        + config.reward.num_workers
        + config.rollout.agent.num_workers
    )


def training_gpu_share(config: Config) -> float:
    """The part of a GPU for each training process; 0 on the CPU.

    More than half of one, so that no two of them share a GPU; what is left is the engines', who work in turns with it.
    """
    return 0.51 if resolve_device(config.cluster.device).type == "cuda" else 0.0


def engine_gpu_share(config: Config) -> float:
    """The part of a GPU for each engine replica; 0 on the CPU."""
    if resolve_device(config.cluster.device).type != "cuda":
        return 0.0
    per_gpu = math.ceil(config.rollout.engine.replicas / training_processes(config))
    return math.floor(49 / per_gpu) / 100


def start_runtime(config: Config) -> Runtime:
    """The runtime that ``cluster`` asks for; a Ray cluster started here is as large as the run needs."""
    cluster = config.cluster
    return make_runtime(
        cluster.runtime,
        num_cpus=cluster.num_cpus or needed_cpus(config),
        address=cluster.address,
        cpu_threads=cluster.cpu_threads,
        auto_padding=cluster.auto_padding,
    )


def build_roles(config: Config, runtime: Runtime, plan: RunPlan, facts: ModelFacts) -> Roles:
    """Build the worker groups, load their models, start the engines."""
    classes = {"actor": ClassWithInitArgs(ActorWorker, config, plan.optimizer_steps)}
    if needs_critic(config):
        steps = plan.steps * config.critic.epochs * config.critic.mini_batches
        classes["critic"] = ClassWithInitArgs(CriticWorker, config, steps)
    if config.algorithm.kl_coef > 0:
        classes["reference"] = ClassWithInitArgs(ReferenceWorker, config)
    cluster = config.cluster
    groups: Mapping[str, Any] = runtime.colocated_worker_groups(
        classes, cluster.nodes, cluster.processes_per_node, num_gpus=training_gpu_share(config)
    )
    for group in groups.values():
        group.init_model()
    actor = groups["actor"]
    return Roles(
        actor=cast(Actor, actor),
        critic=cast("Critic | None", groups.get("critic")),
        reference=cast("Reference | None", groups.get("reference")),
        rollout=build_rollout(config, runtime, plan, facts, actor),
    )


def build_rollout(config: Config, runtime: Runtime, plan: RunPlan, facts: ModelFacts, actor: Any) -> AgentLoopManager:
    """Build the rollout with its engines, and start them."""
    ref = config.rollout.engine.ref
    assert ref is not None, "load the configuration with load_config"
    # In one process with the actor an engine that can generates with the actor's own module: no copy, no transport.
    capabilities = resolve_ref(ref).spec.capabilities
    can_share = "shared_module" in capabilities
    workers = getattr(actor, "workers", None)
    context = engine_context(config, plan, facts, workers[0].module if can_share and workers else None)
    manager = AgentLoopManager(config, runtime, context, engine_gpus=engine_gpu_share(config))
    manager.start()
    return manager


def engine_context(config: Config, plan: RunPlan, facts: ModelFacts, shared_module: Any = None) -> EngineContext:
    """What the run tells replica 0 of its engine; with ``shared_module`` it generates with the actor's own module."""
    return EngineContext(
        model_path=config.model.path,
        dtype=config.model.dtype,
        max_model_len=plan.max_model_len,
        device=str(resolve_device(config.cluster.device)),
        seed=config.trainer.seed,
        deterministic=config.rollout.deterministic,
        vocab_size=facts.vocab_size,
        shared_module=shared_module,
    )
