"""Whether a run fits its GPUs, what takes the memory, and how long a step takes at least."""

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import nn

from agentrl_core.api.errors import SimulationError
from agentrl_core.config import ResolvedConfig
from agentrl_core.controller.worker_group import Place
from agentrl_core.fsdp2.adapters import add_adapter, peft_config
from agentrl_core.fsdp2.flops import multiplied_parameters, routed_experts
from agentrl_core.fsdp2.log_probs import MOST_LOGITS
from agentrl_core.fsdp2.models import check_architecture, empty_causal_lm
from agentrl_core.serving.placement import assign_shared_gpus
from agentrl_core.workers.devices import resolve_device
from agentrl_core.workers.micro_batching import columns_of, micro_batches
from agentrl_plan.batches import MICRO_BATCHES, Shape, batch_of, full_micro_batch
from agentrl_plan.devices import GIB, NETWORK, Device, device_called
from agentrl_plan.engines import EngineShare, engine_share
from agentrl_plan.ledger import GRADIENTS, MOMENTS, PARTS, START, WEIGHTS, Phase
from agentrl_plan.operations import BETWEEN, WAITED_FOR
from agentrl_plan.workers import Simulated, simulate

CONTEXT = int(0.8 * GIB)
"""CUDA's context, libraries and their workspaces, for each process on the GPU; an estimate."""
USABLE = 0.95
"""Share of the memory that allocators can use: the rest is lost between blocks of different sizes; an estimate."""
_MOST_LOGITS_ON_CPU = 2**28
NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8
"""Of a weight in 4 bits, with a scale of 8 bits for 64 of them and one of 32 bits for 256 scales (QLoRA)."""
_CRITIC = ("values", "critic update")
_TRIED_TOKENS = 2**20
RESERVED, KV_CACHE, ENGINE = "CUDA contexts", "KV cache", "engine weights"


@dataclass(frozen=True)
class PhaseFigures:
    """A phase of a step on one GPU.

    Args:
        memory: bytes by part at the moment with the most.
        seconds: lower bound, for a step whose rows all have their full length.
        operations: of a step, on one GPU.
        collectives: bytes of a step by collective, on one GPU.
        seconds_of: what the seconds are for, where that is known: see :func:`_seconds_of`.
    """

    memory: Mapping[str, int]
    seconds: float
    operations: float = 0.0
    collectives: Mapping[str, float] = field(default_factory=dict)
    seconds_of: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.memory.values())


@dataclass(frozen=True)
class Prediction:
    """See the module.

    Args:
        device: of each process.
        processes: training processes.
        parameters: of the actor's model.
        phases: by name, in the order of a step.
        shape: rows, prompt and response tokens of the micro-batch that was simulated.
        logits: shape of the largest tensor over the vocabulary by dtype.
        engine: the engines' share of a GPU, if they share it.
        estimated: why the figures are an estimate from sizes, "" where the workers ran.
    """

    device: Device
    processes: int
    parameters: int
    phases: Mapping[str, PhaseFigures]
    shape: str
    logits: Mapping[str, tuple[int, ...]]
    engine: EngineShare | None
    estimated: str = ""

    @property
    def usable(self) -> int:
        return int(self.device.memory * USABLE)

    @property
    def peak(self) -> int:
        return max(phase.total for phase in self.phases.values())

    @property
    def worst(self) -> str:
        """The phase with the highest peak."""
        return max(self.phases, key=lambda name: self.phases[name].total)

    @property
    def fits(self) -> bool:
        return self.peak <= self.usable

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases.values())

    @property
    def line(self) -> str:
        """The result in one line."""
        usable = f"{self.usable / GIB:.1f} GiB usable on {self.device.name}"
        what = f"{self.peak / GIB:.1f} GiB in the phase {self.worst!r}, of {usable}"
        verdict = "fits" if self.fits else "does not fit"
        how = f" (estimated from sizes: {self.estimated})" if self.estimated else ""
        time = f"; a step takes at least {self.seconds:.1f} s" if self.seconds else ""
        return f"{verdict}: {what}{time}{how}"

    def to_dict(self) -> dict[str, Any]:
        """For scripts: bytes and seconds."""
        return {
            "fits": self.fits,
            "device": asdict(self.device),
            "usable": self.usable,
            "processes": self.processes,
            "parameters": self.parameters,
            "micro_batch": self.shape,
            "estimated": self.estimated,
            "phases": {name: {**asdict(phase), "total": phase.total} for name, phase in self.phases.items()},
            "step_seconds": self.seconds,
            "largest_logits": {name: list(shape) for name, shape in self.logits.items()},
            "engine": None if self.engine is None else {**asdict(self.engine), "kv_cache": self.engine.kv_cache},
        }


def predict_here(config: ResolvedConfig) -> Prediction:
    """:func:`predict` for the devices of this machine; on the CPU processes share its memory, and no time is known."""
    if resolve_device(config.cluster.device).type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        return predict(config, device_called(properties.name, properties.total_memory))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / config.cluster.processes_per_node
    return predict(config, Device("this machine", memory, math.inf, math.inf, math.inf, math.inf, ""), "cpu")


def predict(config: ResolvedConfig, device: Device, kind: Literal["cuda", "cpu"] = "cuda") -> Prediction:
    """Simulate a step of a run, or estimate it from sizes where its model cannot be simulated.

    Args:
        config: of the run.
        device: of each training process.
        kind: type of the device for torch.

    Raises:
        ConfigError: transformers cannot build one of the models.
    """
    if kind == "cuda":
        _check_placement(config)
    model = check_architecture(config.model.path, config.model)
    text = model.config.get_text_config()
    for path in (config.critic.path, config.reference.path, config.teacher.path):
        if path not in (None, config.model.path):
            check_architecture(str(path), config.model)
    reason = ""
    try:
        if kind == "cpu" and config.actor.micro_batch_tokens * text.vocab_size > _MOST_LOGITS_ON_CPU:
            raise SimulationError("log-probs of so many tokens are computed in too many blocks on a CPU")
        found = simulate(config, kind)
    except SimulationError as error:
        reason, found = str(error), _from_sizes(config)
    found = _quantized(config, model, found)
    engine = engine_share(config, text, found.parameters)
    phases = _phases(config, device, found, engine, model, CONTEXT if kind == "cuda" else 0)
    shape = f"{found.shape.rows} rows of {found.shape.prompt} + {found.shape.response} tokens"
    return Prediction(device, config.cluster.processes, found.parameters, phases, shape, found.logits, engine, reason)


def _quantized(config: ResolvedConfig, model: Any, found: Simulated) -> Simulated:
    """With the linear layers in fewer bits: those of the actor, and of a critic of the same model."""
    bytes_of = {None: 0.0, "8bit": 1.0, "4bit": NF4_BYTES}[config.model.quantize]
    if not bytes_of:
        return found
    head = model.get_output_embeddings()
    weights = [each.weight for each in model.modules() if isinstance(each, nn.Linear) and each is not head]
    saved = int(sum(each.numel() * (each.element_size() - bytes_of) for each in weights)) * (1 + config.needs_critic)

    def less(parts: Mapping[str, int]) -> Mapping[str, int]:
        return {**parts, WEIGHTS: max(parts.get(WEIGHTS, 0) - saved, 0)}

    phases = {
        name: replace(phase, parts_at={place: less(parts) for place, parts in phase.parts_at.items()})
        for name, phase in found.phases.items()
    }
    return replace(found, phases=phases, resting=max(found.resting - saved, 0))


def _check_placement(config: ResolvedConfig) -> None:
    """Engines that share GPUs with training processes find theirs among those, as in a run.

    Raises:
        ConfigError: they are too many, or cannot be spread like that.
    """
    cluster = config.cluster
    if cluster.runtime == "ray" and config.rollout.engine.placement == "colocated":
        ranks = ((node, place) for node in range(cluster.nodes) for place in range(cluster.processes_per_node))
        assign_shared_gpus(config, [Place(f"node {node}", (str(place),)) for node, place in ranks])


def _phases(
    config: ResolvedConfig, device: Device, found: Simulated, engine: EngineShare | None, model: Any, context: int
) -> dict[str, PhaseFigures]:
    contexts = context * (2 if engine is not None and config.cluster.runtime == "ray" else 1)
    resident = {RESERVED: contexts}
    phases: dict[str, PhaseFigures] = {}
    if engine is not None:
        # At least one request; what is left of the GPU is for more of them.
        left = int(device.memory * USABLE) - contexts - found.resting - engine.weights
        cache = min(engine.kv_cache, max(left, engine.request))
        memory = {"trainer": found.resting, ENGINE: engine.weights, KV_CACHE: cache, **resident}
        phases["rollout"] = PhaseFigures(memory, _rollout_seconds(config, device, found, engine, model))
        if engine.while_training is None:
            resident |= {ENGINE: engine.weights, KV_CACHE: cache}
    factor = _times_by_tokens(config, found)
    for name, phase in found.phases.items():
        memory = {part: phase.parts.get(part, 0) for part in PARTS} | resident
        if name == "send weights" and engine is not None:
            memory[ENGINE] = engine.weights
        epochs = _section(config, name).epochs if "update" in name else 1
        times = 1 if name == "send weights" else factor * epochs
        operations = {dtype: count * times for dtype, count in phase.operations.items()}
        collectives: dict[str, float] = dict(phase.collectives)
        if name != "send weights":
            runs = 1 + found.packs
            more = _micro_batches(config, name, found) - phase.passes / runs
            collectives = {
                key: epochs * (nbytes / runs + more * phase.each_pass[key]) for key, nbytes in phase.collectives.items()
            }
        seconds_of = _seconds_of(config, device, operations, collectives, phase if "update" in name else None)
        phases[name] = PhaseFigures(
            memory, sum(seconds_of.values()), float(sum(operations.values())), collectives, seconds_of
        )
    return phases


def _section(config: ResolvedConfig, phase: str) -> Any:
    """Of the worker that runs a phase."""
    return getattr(config, "critic" if phase in _CRITIC else phase if phase in ("reference", "teacher") else "actor")


def _times_by_tokens(config: ResolvedConfig, found: Simulated) -> float:
    """How often a rank computes what was simulated, by tokens of its share of the rows."""
    length = config.data.max_prompt_length + config.rollout.max_response_length
    rows = config.data.batch_size * config.rollout.n
    # A row is not divided among shares.
    tokens = max(rows / found.shares, 1) * length
    return tokens / max(found.tokens, 1)


def _micro_batches(config: ResolvedConfig, phase: str, found: Simulated) -> int:
    """Micro-batches of a rank in one pass over a step's rows, which all have their full length: each of them gathers
    parameters and sends gradients, however few tokens it has."""
    section, samples = _section(config, phase), config.rollout.n
    mini_batches = section.mini_batches if "update" in phase else 1
    rows = math.ceil(config.data.batch_size * samples / mini_batches / found.shares)
    lengths = config.data.max_prompt_length, config.rollout.max_response_length
    return int(mini_batches * _cut(rows, samples, *lengths, section.micro_batch_tokens, found.packs))


@cache
def _cut(rows: int, samples: int, prompt: int, response: int, max_tokens: int, packs: bool) -> int:
    """Micro-batches of so many rows, as the workers cut them; of many rows some are cut."""
    tried = max(min(rows, _TRIED_TOKENS // (prompt + response)), 1)
    batch = batch_of(Shape(samples, prompt, response, shared=True), -(-tried // (MICRO_BATCHES * samples)))
    cut = micro_batches(columns_of(batch[:tried], (), "agentrl plan"), max_tokens, by_prefix=packs)
    return math.ceil(rows * len(cut) / tried)


def _seconds_of(
    config: ResolvedConfig,
    device: Device,
    operations: Mapping[str, float],
    collectives: Mapping[str, float],
    update: Phase | None,
) -> dict[str, float]:
    """At the peaks of the device: computing; sending, as far as it takes longer than that; what layers wait for; and
    the optimizer, which reads and writes memory."""
    computing = sum(
        count / (device.half if dtype in ("bfloat16", "float16") else device.single)
        for dtype, count in operations.items()
    )
    sending = waiting = 0.0
    for name, nbytes in collectives.items():
        seconds = nbytes / (NETWORK if name.endswith(BETWEEN) else device.link)
        if name.removesuffix(BETWEEN) in WAITED_FOR:
            waiting += seconds
        else:
            sending += seconds
    touched = 0
    if update is not None:
        # It reads weights, gradients and moments, and writes all but the gradients.
        parts = update.parts
        touched = 2 * parts.get(WEIGHTS, 0) + parts.get(GRADIENTS, 0) + 2 * parts.get(MOMENTS, 0)
    return {
        "computing": computing,
        "sending": max(sending - computing, 0.0),
        "waiting": waiting,
        "optimizer": touched * config.actor.mini_batches * config.actor.epochs / device.bandwidth,
    }


def _rollout_seconds(
    config: ResolvedConfig, device: Device, found: Simulated, engine: EngineShare, model: Any
) -> float:
    """Every token of the longest answer needs a pass over the weights, of routed experts over those that the requests
    in flight choose; all tokens together need their operations."""
    rows = config.data.batch_size * config.rollout.n / config.cluster.processes
    response = config.rollout.max_response_length
    experts, chosen = routed_experts(model)
    weights = float(engine.weights or found.parameters * 2)
    weights *= 1 - experts / found.parameters * (1 - min(engine.in_flight * chosen, 1.0))
    waves = max(rows / max(engine.in_flight, 1), 1.0)
    reading = waves * response * weights / device.bandwidth
    forward = sum(found.phases["log-probs"].operations.values()) if "log-probs" in found.phases else 0
    return max(reading, forward * _times_by_tokens(config, found) / device.half)


def _from_sizes(config: ResolvedConfig) -> Simulated:
    """Weights, gradients and moments of a model, and a guess at its activations."""
    model = empty_causal_lm(config.model.path, config.model)
    text, shape = model.config.get_text_config(), full_micro_batch(config, config.actor.micro_batch_tokens)
    ranks, actor = config.cluster.processes, config.actor
    trained: list[Any] = [actor, *([config.critic] if config.needs_critic else [])]
    frozen: list[Any] = [config.reference] if config.needs_reference and not config.reference_is_adapted else []
    frozen += [config.teacher] if config.teacher.path and not config.teacher_is_adapted else []
    if config.model.adapter is not None:
        add_adapter(model, peft_config(model, config.model.adapter), None, 0)
    parameters = list(model.parameters())
    count = sum(each.numel() for each in parameters)
    nbytes = sum(each.numel() * each.element_size() for each in parameters)
    moving = sum(each.numel() * each.element_size() for each in parameters if each.requires_grad)
    resting = nbytes * sum(not each.offload_parameters for each in (*trained, *frozen)) // ranks
    weights = resting + nbytes * actor.offload_parameters // ranks
    moments = 2 * moving * sum(not each.offload_optimizer for each in trained) // ranks
    width = 2 if config.model.gradient_checkpointing else 34
    activations = shape.tokens * text.hidden_size * 2 * width * text.num_hidden_layers // 2
    parts = {WEIGHTS: weights, GRADIENTS: moving // ranks, MOMENTS: moments, "activations": activations,
             "logits": 4 * min(shape.tokens * text.vocab_size, MOST_LOGITS)}  # fmt: skip
    update = Phase({START: parts})
    # A token is multiplied with the experts that it chooses; all of them take memory.
    multiplied = multiplied_parameters(model) or count
    update.operations["bfloat16"] = 6 * multiplied * shape.tokens
    forward = Phase({START: {WEIGHTS: weights, MOMENTS: moments}})
    forward.operations["bfloat16"] = 2 * multiplied * shape.tokens
    phases = {"log-probs": forward, "update": update}
    return Simulated(phases, resting + moments, count, nbytes, shape, ranks, shape.tokens, {}, False, 0)
