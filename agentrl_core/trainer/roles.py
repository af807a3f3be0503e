"""Starts the training workers, engines and agent-loop workers of a run."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import torch
from transformers import AutoConfig

from agentrl_core.api import Adapter, ConfigError, EngineContext, WeightUpdate
from agentrl_core.config.schema import POLICY, ResolvedConfig, ServedSlot
from agentrl_core.controller import ClassWithInitArgs, Runtime, make_runtime
from agentrl_core.controller.worker_group import WorkerGroup
from agentrl_core.engine_kit.media import MediaSource
from agentrl_core.fsdp2.adapters import adapter_slots
from agentrl_core.plugins.boundary import wait_reported
from agentrl_core.rollout.manager import AgentLoopManager
from agentrl_core.runs.media import RowUploads, start_media
from agentrl_core.serving.placement import (
    MOST_MEMORY,
    GpuAssignments,
    assign_anywhere,
    assign_own_gpus,
    assign_shared_gpus,
    assign_without_training,
    check_sleep,
    engine_memory_share,
)
from agentrl_core.serving.replicas import EngineReplicas
from agentrl_core.serving.weight_transport import ActorWeights, Weights, choose_transport
from agentrl_core.trainer.copies import Copy, Frozen, untrained
from agentrl_core.trainer.plan import max_model_len
from agentrl_core.trainer.preparation import Preparation
from agentrl_core.trainer.prompt_data import row_images
from agentrl_core.workers.actor import ActorWorker
from agentrl_core.workers.critic import CriticWorker
from agentrl_core.workers.devices import engine_dtype, resolve_device
from agentrl_core.workers.protocols import Actor, Critic, DeviceMemory, Reference
from agentrl_core.workers.reference import ReferenceWorker, TeacherWorker

logger = logging.getLogger(__name__)
SPARE_REPLICAS = 8
"""Engine replicas that can be added while a run runs, where it starts Ray itself."""


@dataclass(frozen=True)
class Roles:
    """Everything that computes. ``critic``, ``reference`` and ``teacher`` are None if the run needs none, or where the
    last two are the actor's own model without the adapter.

    ``actors`` has one for each policy that is trained, by name. ``weights`` sends their weights to ``engines``, and
    ``rollout`` samples with those. ``groups`` has all training workers by role.
    """

    actors: Mapping[str, Actor]
    critic: Critic | None
    reference: Reference | None
    teacher: Reference | None
    engines: EngineReplicas
    rollout: AgentLoopManager
    weights: ActorWeights
    groups: Mapping[str, Any]

    @property
    def actor(self) -> Actor:
        """That of the first policy."""
        return next(iter(self.actors.values()))

    def of_policy(self, name: str, config: ResolvedConfig) -> "Roles":
        """The roles as a policy sees them: its actor is the first, and stands for its reference and teacher where these
        are the actor's model without the adapter."""
        actor = self.actors[name]
        return replace(
            self,
            actors={name: actor},
            reference=None if not config.needs_reference else actor if config.reference_is_adapted else self.reference,
            teacher=actor if config.teacher_is_adapted else self.teacher,
        )


def assign_engines(config: ResolvedConfig, on_gpus: bool, training: WorkerGroup | None) -> GpuAssignments:
    """Return the GPUs of each engine replica.

    Args:
        on_gpus: see :func:`uses_gpus`.
        training: the processes whose GPUs colocated engines share; None where nothing is trained.

    Raises:
        ConfigError: the replicas do not fit there.
    """
    if not on_gpus:
        return assign_anywhere(config.rollout.engine, config.engine_replicas)
    engine = config.rollout.engine
    if engine.placement == "standalone":
        return assign_own_gpus(engine, config.engine_replicas)
    if training is None:
        return assign_without_training(config)
    return assign_shared_gpus(config, training.places())


def uses_gpus(config: ResolvedConfig, runtime: Runtime) -> bool:
    """Whether training processes and engines compute on GPUs. Where they run decides it, which may not be this machine.

    Raises:
        ConfigError: they are to, and there is none.
    """
    wanted, address = config.cluster.device, config.cluster.address
    if config.cluster.runtime == "local" or address is None:
        return resolve_device(wanted).type == "cuda"
    if wanted == "cuda" and not runtime.has_gpus:
        raise ConfigError(
            f"cluster.device: found cuda, but no node of the Ray cluster at {address} has a GPU that Ray knows (`ray "
            "status` lists what it has): start Ray on nodes with GPUs, or set cluster.device=cpu"
        )
    return wanted != "cpu" and runtime.has_gpus


def start_runtime(config: ResolvedConfig) -> Runtime:
    """Start the runtime that ``cluster`` asks for. A new Ray cluster gets a CPU for every worker and actor,
    and for replicas that are added later."""
    cluster, engine = config.cluster, config.rollout.engine
    actors = (config.engine_replicas + SPARE_REPLICAS) * engine.nodes + config.reward.num_workers + config.agent_workers
    actors += sum(slot.replicas * slot.nodes for slot in config.engines.values())
    runtime = make_runtime(
        cluster.runtime,
        num_cpus=cluster.processes + actors,
        address=cluster.address,
        cpu_threads=cluster.cpu_threads,
        start_timeout=engine.start_timeout,
    )
    if config.rollout.max_staleness:
        runtime.overlap()
    return runtime


def start_workers(
    config: ResolvedConfig, runtime: Runtime, steps: int, *, actor_only: bool = False, media: MediaSource | None = None
) -> Mapping[str, Any]:
    """Start the training processes with the actor, and the critic, reference and teacher that the run needs; load
    their models.

    Args:
        steps: of the whole run.
        actor_only: without the others.
        media: the images of the run.
    """
    classes, shared = {}, uuid4().hex if config.policies else ""
    for name, own in config.trained.items():
        optimizer_steps = steps * own.actor.epochs * own.actor.mini_batches
        classes[actor_role(config, name)] = ClassWithInitArgs(ActorWorker, config, optimizer_steps, name, shared, media)
    if config.needs_critic and not actor_only:
        optimizer_steps = steps * config.critic.epochs * config.critic.mini_batches
        classes["critic"] = ClassWithInitArgs(CriticWorker, config, optimizer_steps, media)
    own_ones = config.trained.values()
    if any(own.needs_reference and not own.reference_is_adapted for own in own_ones) and not actor_only:
        classes["reference"] = ClassWithInitArgs(ReferenceWorker, config, media)
    if config.teacher.path is not None and not all(own.teacher_is_adapted for own in own_ones) and not actor_only:
        classes["teacher"] = ClassWithInitArgs(TeacherWorker, config, media)
    cluster = config.cluster
    with wait_reported("the training processes to start"):
        groups: Mapping[str, Any] = runtime.colocated_worker_groups(
            classes, cluster.nodes, cluster.processes_per_node, num_gpus=float(uses_gpus(config, runtime)),
            python=config.trainer.backend.python,
        )  # fmt: skip
    for role, group in groups.items():
        with wait_reported(f"the training processes: the {role} to load its model"):
            group.init_model()
    return groups


def actor_role(config: ResolvedConfig, policy: str) -> str:
    """The role of a policy's actor among the workers."""
    return f"actor_{policy}" if config.policies else "actor"


def saved_as(config: ResolvedConfig, policy: str) -> str:
    """The folder of a policy in a checkpoint."""
    return f"policies/{policy}" if config.policies else "actor"


def build_roles(
    config: ResolvedConfig,
    runtime: Runtime,
    preparation: Preparation,
    load: Callable[[Mapping[str, Actor | Critic], Mapping[str, Copy]], None] = lambda workers, copies: None,
) -> Roles:
    """Start the training workers and the engines of a run. ``runtime.started`` closes them.

    Args:
        load: brings a checkpoint into the models, before engines take memory of their GPUs; gets who saves what, by the
            folder in a checkpoint.
    """
    on_gpus = uses_gpus(config, runtime)
    check_sleep(config, on_gpus)
    images = start_images(config, runtime, preparation)
    groups = start_workers(config, runtime, preparation.steps, media=None if images is None else images.media)
    actors = {name: cast(Actor, groups[actor_role(config, name)]) for name in config.trained}
    critic = cast("Critic | None", groups.get("critic"))
    others = untrained(config, actors)
    saved: dict[str, Actor | Critic] = {saved_as(config, name): actor for name, actor in actors.items()}
    copies = {saved_as(config, name): each for name, each in others.items() if isinstance(each, Copy)}
    load(saved | ({"critic": critic} if critic is not None else {}), copies)
    logger.info("the model is loaded for training; starting %s", config.rollout.engine.name)
    engines = start_engines(config, runtime, preparation, groups)
    shares_module = engines.context.shared_module is not None
    transport = choose_transport(config, shares_module, on_gpus, runtime.nodes)
    adapters = [each.weights for each in others.values()]
    return Roles(
        actors=actors,
        critic=critic,
        reference=groups.get("reference"),
        teacher=groups.get("teacher"),
        engines=engines,
        rollout=AgentLoopManager(config, runtime, engines, start_named_engines(config, runtime), images),
        weights=ActorWeights(transport, [*actors.values()], config, on_gpus, adapters),
        groups=groups,
    )


def start_images(
    config: ResolvedConfig, runtime: Runtime, preparation: Preparation, folder: Path | None = None
) -> RowUploads | None:
    """Start what keeps the images of a run; None where it can show none.

    Args:
        folder: for them, on this host; None: that of the run.
    """
    shows = config.rollout.engine.has("images") and config.trainer.backend.has("images")
    if preparation.chat.media is None or not shows:
        return None
    media = start_media(runtime, folder or Path(config.trainer.output_dir) / config.trainer.name)
    return RowUploads(media, row_images(config, preparation.renderer).read_again)


def start_engines(
    config: ResolvedConfig, runtime: Runtime, preparation: Preparation, training: Mapping[str, Any] | None = None
) -> EngineReplicas:
    """Start the engine replicas. ``runtime.started`` closes them.

    Args:
        training: the training workers by role, whose GPUs colocated engines share. An engine in the actor's process
            that can generate with the actor's own module does so: no copy, no transport. None: nothing is trained.
    """
    slot, on_gpus = config.rollout.engine, uses_gpus(config, runtime)
    actors = {name: training[actor_role(config, name)] for name in config.trained} if training else {}
    actor = next(iter(actors.values()), None)
    # Its module has the adapters of policies that are trained alone.
    workers = None if config.policies else getattr(actor, "workers", None)
    dtype = engine_dtype(config, torch.device("cuda" if on_gpus else "cpu"))
    adapters, stored = _served_adapters(config, actors)
    context = replace(
        _context(config, slot, config.model.path, dtype, on_gpus),
        max_model_len=max_model_len(config),
        deterministic=config.rollout.deterministic,
        vocab_size=preparation.vocab_size,
        reserved_ids=() if preparation.chat.media is None else preparation.chat.media.reserved,
        max_images=0 if preparation.chat.media is None else config.model.images.max_count,
        routed_experts=training is not None and any(own.actor.router_replay for own in config.trained.values()),
        adapters=adapter_slots(adapters, config.rollout.max_staleness + 1) if adapters else None,
        shared_module=workers[0].module if workers and config.shares_module else None,
        **(_gpu_memory(config, training or {}) if on_gpus else {}),
    )
    engines = EngineReplicas(runtime, config, context, assign_engines(config, on_gpus, actor))
    engines.start()
    if stored and not actors:
        engines.update_weights(Weights(0, stored))
    return engines


def _served_adapters(config: ResolvedConfig, actors: Mapping[str, Any]) -> tuple[list[Adapter], list[WeightUpdate]]:
    """The adapters that engines serve besides the model, and updates of those that lie in directories: of policies that
    are not trained, and where nothing is trained of all.

    Args:
        actors: of policies that are trained.
    """
    if not config.serves_adapters:
        return [], []
    if actors:
        others = untrained(config, actors).values()
        own = [actor.adapter() for actor in actors.values()]
        return [adapter for adapter in own if adapter is not None] + [each.adapter for each in others], []
    settings = {name: each.adapter for name, each in config.policies.items()} or {POLICY: config.model.adapter}
    paths = {name: each.path for name, each in settings.items() if each is not None}
    stored = [Frozen(name, path) for name, path in paths.items() if path is not None]
    return [each.adapter for each in stored], [each.weights(0) for each in stored]


def _gpu_memory(config: ResolvedConfig, training: Mapping[str, Any]) -> dict[str, Any]:
    """What engines on the GPUs of training processes, or several on one GPU, may take: fields of their context."""
    engine, processes = config.rollout.engine, config.cluster.processes
    per_gpu = math.ceil(config.engine_replicas * engine.devices / processes)
    if engine.placement == "standalone":
        return {}
    if not training:
        return {"memory_share": math.floor(1000 * MOST_MEMORY / per_gpu) / 1000} if per_gpu > 1 else {}
    # Roles share the processes, so each of them sees the same GPUs, but only its own moments.
    by_role = [group.device_memory() for group in training.values()]
    devices = [
        DeviceMemory(ranks[0].total, min(each.free for each in ranks), sum(each.coming for each in ranks))
        for ranks in zip(*by_role, strict=True)
    ]
    share, free = engine_memory_share(devices, per_gpu), min(each.free / each.total for each in devices)
    logger.info("each engine may take %.0f%% of its GPU's memory while it is awake", 100 * share)
    return {"memory_share": share, "memory_free": free}


def start_named_engines(config: ResolvedConfig, runtime: Runtime) -> dict[str, EngineReplicas]:
    """Start the engines of ``engines``, by name. On Ray with GPUs each replica has its own."""
    on_gpus = uses_gpus(config, runtime)
    assign = assign_own_gpus if on_gpus and config.cluster.runtime == "ray" else assign_anywhere
    started = {}
    for name, slot in config.engines.items():
        model = AutoConfig.from_pretrained(slot.model)
        dtype = getattr(model, "dtype", None)
        context = replace(
            _context(
                config, slot, slot.model, "float32" if dtype is None else str(dtype).removeprefix("torch."), on_gpus
            ),
            max_model_len=slot.max_model_len,
            vocab_size=int(model.get_text_config().vocab_size),
        )
        started[name] = EngineReplicas(runtime, config, context, assign(slot, slot.replicas), name)
        started[name].start()
    return started


def _context(config: ResolvedConfig, slot: ServedSlot, model_path: str, dtype: str, on_gpus: bool) -> EngineContext:
    return EngineContext(
        model_path=model_path,
        dtype=dtype,
        device="cuda" if on_gpus else "cpu",
        seed=config.trainer.seed,
        tensor_parallel=slot.tensor_parallel,
        pipeline_parallel=slot.pipeline_parallel,
        data_parallel=slot.data_parallel,
        nodes=slot.nodes,
    )
