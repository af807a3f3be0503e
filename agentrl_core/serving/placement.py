"""Which devices each engine replica computes on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl_core.api import ConfigError
from agentrl_core.config.schema import EngineSlot, ResolvedConfig, ServedSlot
from agentrl_core.controller.worker_group import Place
from agentrl_core.workers.protocols import DeviceMemory

HEADROOM = 2 << 30
"""Bytes of a GPU that nobody plans: CUDA contexts, NCCL, and the bucket of a weight update."""
MOST_MEMORY = 0.9
"""The largest share of a GPU that an engine is given."""


@dataclass(frozen=True)
class GpuAssignment:
    """The GPUs of one server of a replica. A replica has one server on each of its hosts.

    Args:
        num_gpus: number of GPUs that the runtime reserves for it.
        node: name of its host in the runtime; empty: any host.
        devices: the host's devices, as ``CUDA_VISIBLE_DEVICES`` names them; None: those that the runtime reserved.
    """

    num_gpus: float = 0.0
    node: str = ""
    devices: tuple[str, ...] | None = None


GpuAssignments = Sequence[Sequence[GpuAssignment]]
"""The assignments of each replica's servers. The first server takes requests."""


def sleep_level(config: ResolvedConfig, on_gpus: bool) -> int:
    """``rollout.engine.sleep``, or what null stands for."""
    engine = config.rollout.engine
    if engine.sleep is not None:
        return engine.sleep
    if not on_gpus or engine.placement == "standalone" or not engine.has("sleep"):
        return 0
    return 1 if _uses_actors_module(config) else 2


def check_sleep(config: ResolvedConfig, on_gpus: bool) -> None:
    """Reject engines that stay awake on the GPUs of the training processes.

    Raises:
        ConfigError: with the reason.
    """
    engine = config.rollout.engine
    stays_awake = engine.sleep == 0 and engine.has("sleep") and not _uses_actors_module(config)
    if on_gpus and engine.placement == "colocated" and stays_awake:
        raise ConfigError(
            "rollout.engine.sleep: found 0, but the engine shares its GPUs with the training processes: while it is "
            "awake it holds the memory that the update needs. Leave rollout.engine.sleep out, or give the engine GPUs "
            "of its own with rollout.engine.placement=standalone"
        )


def _uses_actors_module(config: ResolvedConfig) -> bool:
    return config.cluster.runtime == "local" and config.shares_module


def engine_memory_share(devices: Sequence[DeviceMemory], replicas: int = 1) -> float:
    """Share of a GPU's memory for one engine that is awake only while the trainer rests.

        share = (free - coming - HEADROOM) / total / replicas,    of the fullest GPU, at most MOST_MEMORY

    Args:
        devices: of the training processes, measured or planned.
        replicas: that share one GPU.

    Raises:
        ConfigError: nothing is left.
    """
    share = min((each.free - each.coming - HEADROOM) / each.total for each in devices)
    if share <= 0:
        fullest = min(devices, key=lambda each: each.free - each.coming)
        held, coming, total = (x / 2**30 for x in (fullest.total - fullest.free, fullest.coming, fullest.total))
        raise ConfigError(
            f"rollout.engine: no GPU memory is left for the engine: training processes hold {held:.1f} of {total:.1f} "
            f"GiB, AdamW's moments will take {coming:.1f} GiB more, and {HEADROOM / 2**30:.0f} GiB are kept free. Set "
            "actor.offload_optimizer=true or actor.offload_parameters=true, use more processes or a smaller model, or "
            "set rollout.engine.placement=standalone"
        )
    return math.floor(1000 * min(share, MOST_MEMORY) / replicas) / 1000


def assign_anywhere(slot: ServedSlot, replicas: int) -> GpuAssignments:
    """Assign each server to any host and all its devices: on the CPU, or in this process."""
    return [[GpuAssignment()] * slot.nodes] * replicas


def assign_own_gpus(slot: ServedSlot, replicas: int) -> GpuAssignments:
    """Assign GPUs that no training process has."""
    return [[GpuAssignment(slot.devices // slot.nodes)] * slot.nodes] * replicas


def assign_without_training(config: ResolvedConfig) -> GpuAssignments:
    """Assign the GPUs that training processes would have. Small replicas share a GPU if there are more replicas."""
    per_gpu = math.ceil(config.engine_replicas / config.cluster.processes)
    if config.rollout.engine.devices > 1 or per_gpu == 1:
        return assign_own_gpus(config.rollout.engine, config.engine_replicas)
    return [[GpuAssignment(math.floor(100 / per_gpu) / 100)]] * config.engine_replicas


def assign_shared_gpus(config: ResolvedConfig, places: Sequence[Place]) -> GpuAssignments:
    """Assign the GPUs of the training processes, in the order of their ranks.

    Several replicas of one device each may share a GPU; a replica of several devices has them to itself.

    Args:
        places: node and devices of each rank; without GPUs a replica may be anywhere.

    Raises:
        ConfigError: the replicas do not fit.
    """
    slot, replicas = config.rollout.engine, config.engine_replicas
    if not all(place.devices for place in places):
        return assign_anywhere(slot, replicas)
    if slot.devices > 1 and replicas * slot.devices > len(places):
        raise ConfigError(
            f"rollout.engine: {replicas} replica(s) of {_shape(slot)} need {replicas * slot.devices} GPUs, the "
            f"training processes have {len(places)} (cluster.nodes x cluster.processes_per_node); allowed are up to "
            f"{len(places)}: lower rollout.engine.replicas, tensor_parallel, pipeline_parallel or data_parallel, or "
            "give engines GPUs of their own with rollout.engine.placement=standalone"
        )
    return [_shared_gpus(slot, replica, places) for replica in range(replicas)]


def _shared_gpus(slot: EngineSlot, replica: int, places: Sequence[Place]) -> list[GpuAssignment]:
    first = replica * slot.devices % len(places)
    ranks = range(first, first + slot.devices)
    by_node: dict[str, list[str]] = {}
    for rank in ranks:
        by_node.setdefault(places[rank].node, []).extend(places[rank].devices)
    even = {len(devices) for devices in by_node.values()} == {slot.devices // slot.nodes}
    if len(by_node) != slot.nodes or not even:
        found = " and ".join(f"{len(devices)} on one node" for devices in by_node.values())
        raise ConfigError(
            f"rollout.engine: replica {replica} of {_shape(slot)} is to have the GPUs of training processes "
            f"{ranks.start} to {ranks.stop - 1}, which are {found}, not {slot.devices // slot.nodes} on each of "
            f"{slot.nodes} node(s); choose rollout.engine.nodes and the devices of a replica to fit "
            "cluster.processes_per_node"
        )
    return [GpuAssignment(0.0, node, tuple(devices)) for node, devices in by_node.items()]


def _shape(slot: EngineSlot) -> str:
    return (
        f"{slot.devices} device(s) (tensor_parallel {slot.tensor_parallel} x pipeline_parallel "
        f"{slot.pipeline_parallel} x data_parallel {slot.data_parallel})"
    )
