"""Starts the training workers, engines and agent-loop workers of a run."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig

from agentrl_core.api import Adapter, ConfigError, EngineContext, WeightUpdate
from agentrl_core.config.schema import AdapterConfig, ResolvedConfig, ServedSlot
from agentrl_core.controller import ClassWithInitArgs, Runtime, make_runtime
from agentrl_core.controller.worker_group import WorkerGroup
from agentrl_core.plugins.boundary import wait_reported
from agentrl_core.rollout.manager import AgentLoopManager
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
from agentrl_core.trainer.plan import max_model_len
from agentrl_core.trainer.preparation import Preparation
from agentrl_core.workers.actor import ActorWorker
from agentrl_core.workers.adapters import WEIGHTS_FILE, adapter_slots, stored_adapter
from agentrl_core.workers.critic import CriticWorker
from agentrl_core.workers.models import engine_dtype, resolve_device
from agentrl_core.workers.protocols import Actor, Critic, DeviceMemory, Reference
from agentrl_core.workers.reference import ReferenceWorker, TeacherWorker

logger = logging.getLogger(__name__)
SPARE_REPLICAS = 8
"""Engine replicas that can be added while a run runs, where it starts Ray itself."""


@dataclass(frozen=True)
class Roles:
    """Everything that computes. ``critic``, ``reference`` and ``teacher`` are None if the run needs none; the last two
    are the actor where they are its model without the adapter.

    ``weights`` sends the actor's weights to ``engines``, and ``rollout`` samples with those.
    """

    actor: Actor
    critic: Critic | None
    reference: Reference | None
    teacher: Reference | None
    engines: EngineReplicas
    rollout: AgentLoopManager
    weights: ActorWeights


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
    config: ResolvedConfig, runtime: Runtime, steps: int, *, actor_only: bool = False
) -> Mapping[str, Any]:
    """Start the training processes with the actor, and the critic, reference and teacher that the run needs; load
    their models.

    Args:
        steps: of the whole run.
        actor_only: without the others.
    """
    optimizer_steps = steps * config.actor.epochs * config.actor.mini_batches
    classes = {"actor": ClassWithInitArgs(ActorWorker, config, optimizer_steps)}
    if config.needs_critic and not actor_only:
        optimizer_steps = steps * config.critic.epochs * config.critic.mini_batches
        classes["critic"] = ClassWithInitArgs(CriticWorker, config, optimizer_steps)
    if config.needs_reference and not config.reference_is_adapted and not actor_only:
        classes["reference"] = ClassWithInitArgs(ReferenceWorker, config)
    if config.teacher.path is not None and not config.teacher_is_adapted and not actor_only:
        classes["teacher"] = ClassWithInitArgs(TeacherWorker, config)
    cluster = config.cluster
    with wait_reported("the training processes to start"):
        groups: Mapping[str, Any] = runtime.colocated_worker_groups(
            classes, cluster.nodes, cluster.processes_per_node, num_gpus=float(uses_gpus(config, runtime))
        )
    for role, group in groups.items():
        with wait_reported(f"the training processes: the {role} to load its model"):
            group.init_model()
    return groups


def build_roles(
    config: ResolvedConfig,
    runtime: Runtime,
    preparation: Preparation,
    load: Callable[[Actor, Critic | None], None] = lambda actor, critic: None,
) -> Roles:
    """Start the training workers and the engines of a run. ``runtime.started`` closes them.

    Args:
        load: brings a checkpoint into the models, before engines take memory of their GPUs.
    """
    on_gpus = uses_gpus(config, runtime)
    check_sleep(config, on_gpus)
    groups = start_workers(config, runtime, preparation.steps)
    actor, critic = cast(Actor, groups["actor"]), cast("Critic | None", groups.get("critic"))
    reference = actor if config.needs_reference and config.reference_is_adapted else groups.get("reference")
    teacher = actor if config.teacher_is_adapted else groups.get("teacher")
    load(actor, critic)
    logger.info("the model is loaded for training; starting %s", config.rollout.engine.name)
    engines = start_engines(config, runtime, preparation, groups)
    shares_module = engines.context.shared_module is not None
    transport = choose_transport(config, shares_module, on_gpus, runtime.nodes)
    return Roles(
        actor=actor,
        critic=critic,
        reference=reference,
        teacher=teacher,
        engines=engines,
        rollout=AgentLoopManager(config, runtime, engines, start_named_engines(config, runtime)),
        weights=ActorWeights(transport, actor, config, on_gpus),
    )


def start_engines(
    config: ResolvedConfig, runtime: Runtime, preparation: Preparation, training: Mapping[str, Any] | None = None
) -> EngineReplicas:
    """Start the engine replicas. ``runtime.started`` closes them.

    Args:
        training: the training workers by role, whose GPUs colocated engines share. An engine in the actor's process
            that can generate with the actor's own module does so: no copy, no transport. None: nothing is trained.
    """
    slot, on_gpus = config.rollout.engine, uses_gpus(config, runtime)
    actor = training["actor"] if training else None
    workers = getattr(actor, "workers", None)
    dtype = engine_dtype(config, torch.device("cuda" if on_gpus else "cpu"))
    adapter = _served_adapter(config, actor)
    context = replace(
        _context(config, slot, config.model.path, dtype, on_gpus),
        max_model_len=max_model_len(config),
        deterministic=config.rollout.deterministic,
        vocab_size=preparation.vocab_size,
        adapters=None if adapter is None else adapter_slots(adapter, config.rollout.max_staleness + 1),
        shared_module=workers[0].module if workers and slot.has("shared_module") else None,
        **(_gpu_memory(config, training or {}) if on_gpus else {}),
    )
    engines = EngineReplicas(runtime, config, context, assign_engines(config, on_gpus, actor))
    engines.start()
    if adapter is not None and actor is None:
        files = (str(Path(cast(str, cast(AdapterConfig, config.model.adapter).path)) / WEIGHTS_FILE),)
        engines.update_weights(Weights(0, WeightUpdate(files=files, adapter=adapter)))
    return engines


def _served_adapter(config: ResolvedConfig, actor: Any) -> Adapter | None:
    """What engines serve besides the model: the actor's adapter, or where nothing is trained that of a directory."""
    if actor is not None:
        return cast("Adapter | None", actor.adapter())
    path = None if config.model.adapter is None or not config.serves_adapters else config.model.adapter.path
    return None if path is None else stored_adapter(path)


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
