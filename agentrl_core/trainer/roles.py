"""The model workers and the rollout of a run, built where the runtime puts them."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from transformers import AutoConfig

from agentrl_core.api import ConfigError, EngineContext
from agentrl_core.config.schema import ResolvedConfig
from agentrl_core.controller import ClassWithInitArgs
from agentrl_core.controller.runtime import Runtime, make_runtime
from agentrl_core.controller.worker_group import WorkerGroup
from agentrl_core.plugins.boundary import boundary
from agentrl_core.rollout.manager import AgentLoopManager
from agentrl_core.serving.placement import (
    GpuAssignments,
    assign_anywhere,
    assign_own_gpus,
    assign_shared_gpus,
    assign_without_training,
)
from agentrl_core.serving.replicas import EngineReplicas
from agentrl_core.serving.weight_transport import ActorWeights, choose_transport
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
    def read(cls, config: ResolvedConfig) -> "ModelFacts":
        """Read ``config.json`` of ``model.path``.

        Raises:
            ConfigError: transformers cannot make sense of it.
        """
        with boundary(ConfigError, f"model.path: {config.model.path} is not a model transformers can load:"):
            found = AutoConfig.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
        text = found.get_text_config()
        return cls(int(text.vocab_size), getattr(text, "max_position_embeddings", None))


@dataclass(frozen=True)
class Roles:
    """Everything that computes. ``critic`` and ``reference`` are None where the run needs none.

    ``weights`` are those of ``actor``, by the transport that ``engines`` take; ``rollout`` samples with them.
    """

    actor: Actor
    critic: Critic | None
    reference: Reference | None
    engines: EngineReplicas
    rollout: AgentLoopManager
    weights: ActorWeights


def needs_critic(config: ResolvedConfig) -> bool:
    """The advantage estimator has the capability ``values``."""
    return config.algorithm.advantage.has("values")


def needed_cpus(config: ResolvedConfig) -> int:
    """Logical CPUs of a Ray cluster: one for every worker and actor of the run."""
    return (
        config.cluster.processes
        + config.engine_replicas * config.rollout.engine.nodes
        + config.reward.num_workers
        + config.rollout.agent.num_workers
    )


def training_gpus(config: ResolvedConfig) -> float:
    """Of each training process; 0 on the CPU."""
    return 1.0 if _on_gpus(config) else 0.0


def assign_engines(config: ResolvedConfig, training: WorkerGroup | None) -> GpuAssignments:
    """Where the engine replicas go.

    Args:
        training: the processes whose GPUs colocated engines share; None where nothing is trained.

    Raises:
        ConfigError: they do not fit there.
    """
    if not _on_gpus(config):
        return assign_anywhere(config)
    engine = config.rollout.engine
    if engine.placement == "standalone":
        return assign_own_gpus(config)
    if training is None:
        return assign_without_training(config)
    return assign_shared_gpus(config, training.places())


def _on_gpus(config: ResolvedConfig) -> bool:
    return resolve_device(config.cluster.device).type == "cuda"


def start_runtime(config: ResolvedConfig) -> Runtime:
    """The runtime that ``cluster`` asks for; a Ray cluster started here is as large as the run needs."""
    cluster = config.cluster
    return make_runtime(
        cluster.runtime,
        num_cpus=needed_cpus(config),
        address=cluster.address,
        cpu_threads=cluster.cpu_threads,
    )


def build_roles(config: ResolvedConfig, runtime: Runtime, plan: RunPlan, facts: ModelFacts) -> Roles:
    """Build the worker groups, load their models, start the engines."""
    classes = {"actor": ClassWithInitArgs(ActorWorker, config, plan.optimizer_steps)}
    if needs_critic(config):
        steps = plan.steps * config.critic.epochs * config.critic.mini_batches
        classes["critic"] = ClassWithInitArgs(CriticWorker, config, steps)
    if config.algorithm.kl_coef > 0:
        classes["reference"] = ClassWithInitArgs(ReferenceWorker, config)
    cluster = config.cluster
    groups: Mapping[str, Any] = runtime.colocated_worker_groups(
        classes, cluster.nodes, cluster.processes_per_node, num_gpus=training_gpus(config)
    )
    for group in groups.values():
        group.init_model()
    actor = cast(Actor, groups["actor"])
    engines = start_engines(config, runtime, plan, facts, actor)
    return Roles(
        actor=actor,
        critic=cast("Critic | None", groups.get("critic")),
        reference=cast("Reference | None", groups.get("reference")),
        engines=engines,
        rollout=AgentLoopManager(config, runtime, engines),
        weights=ActorWeights(choose_transport(config, engines.context.shared_module is not None), actor, config),
    )


def start_engines(
    config: ResolvedConfig, runtime: Runtime, plan: RunPlan, facts: ModelFacts, actor: Any
) -> EngineReplicas:
    """Build the engines and start them."""
    # In one process with the actor an engine that can generates with the actor's own module: no copy, no transport.
    can_share = config.rollout.engine.has("shared_module")
    workers = getattr(actor, "workers", None)
    context = engine_context(config, plan, facts, workers[0].module if can_share and workers else None)
    engines = EngineReplicas(runtime, config, context, assign_engines(config, actor))
    engines.start()
    return engines


def engine_context(
    config: ResolvedConfig, plan: RunPlan, facts: ModelFacts, shared_module: Any = None
) -> EngineContext:
    """What the run tells replica 0 of its engine; with ``shared_module`` it generates with the actor's own module."""
    slot = config.rollout.engine
    return EngineContext(
        model_path=config.model.path,
        dtype=config.model.dtype,
        max_model_len=plan.max_model_len,
        device=str(resolve_device(config.cluster.device)),
        seed=config.trainer.seed,
        deterministic=config.rollout.deterministic,
        vocab_size=facts.vocab_size,
        tensor_parallel=slot.tensor_parallel,
        pipeline_parallel=slot.pipeline_parallel,
        data_parallel=slot.data_parallel,
        nodes=slot.nodes,
        shared_module=shared_module,
    )
