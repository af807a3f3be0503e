"""The arithmetic of a run, before it starts: steps, batches, lengths, memory."""

from typing import Any, Protocol

from agentrl_core.api.plugin import PREDICTION_GROUP
from agentrl_core.config.schema import ResolvedConfig
from agentrl_core.plugins.registration import registered_in
from agentrl_core.plugins.spec import imported
from agentrl_core.workers.devices import resolve_device

NOT_PREDICTED = "not predicted; pip install agentrl-plan tells whether the run fits its GPUs"


class Prediction(Protocol):
    """See :data:`agentrl_core.api.plugin.PREDICTION_GROUP`."""

    @property
    def line(self) -> str: ...

    def to_dict(self) -> dict[str, Any]: ...


def predicted(config: ResolvedConfig) -> Prediction | None:
    """What the first installed prediction says of the run on this machine; None where there is none."""
    for found in registered_in(PREDICTION_GROUP, config.plugins.block):
        predict = imported(found.package, f"importing {found.entry_point.value}", found.entry_point.load)
        prediction: Prediction = predict(config)
        return prediction
    return None


def total_steps(config: ResolvedConfig, train_rows: int) -> int:
    """Steps of the whole run over ``train_rows`` prompts."""
    return config.trainer.steps or max(1, config.trainer.epochs * train_rows // config.data.batch_size)


def max_model_len(config: ResolvedConfig) -> int:
    """Maximum tokens of prompt and response together."""
    return config.data.max_prompt_length + config.rollout.max_response_length


def devices(config: ResolvedConfig) -> int:
    """Devices of training processes and engines together; without GPUs, processes."""
    engine = config.rollout.engine
    own = config.engine_replicas * engine.devices if engine.placement == "standalone" else 0
    named = sum(slot.replicas * slot.devices for slot in config.engines.values()) * (config.cluster.runtime == "ray")
    return config.cluster.processes + own + named


def memory_line(config: ResolvedConfig) -> str:
    """Whether the run fits its GPUs; "" on a CPU, where memory is no limit for what it can train."""
    return f"memory: {_memory(config)}" if resolve_device(config.cluster.device).type == "cuda" else ""


def _memory(config: ResolvedConfig) -> str:
    found = predicted(config)
    return NOT_PREDICTED if found is None else found.line


def describe(
    config: ResolvedConfig, steps: int, train_rows: int, validation_rows: int, longest_prompt: int
) -> list[str]:
    """Batch arithmetic and an estimate of the memory, in lines for a person."""
    rollout, actor, cluster = config.rollout, config.actor, config.cluster
    trajectories = config.data.batch_size * rollout.n
    samples = config.trainer.validation.n + int(config.trainer.validation.greedy)
    lines = [
        f"data        {train_rows} training prompts, {validation_rows} for validation; longest {longest_prompt} of "
        f"{config.data.max_prompt_length} tokens",
        f"step        {config.data.batch_size} prompts x {rollout.n} samples = {trajectories} trajectories, "
        f"each of up to {rollout.max_response_length} response tokens",
        f"run         {steps} steps = {steps * config.data.batch_size / train_rows:.2f} epochs",
        f"update      {actor.epochs} epoch(s) x {actor.mini_batches} mini-batch(es) of "
        f"~{trajectories / actor.mini_batches:.0f} trajectories, "
        f"micro-batches of up to {actor.micro_batch_tokens} padded tokens",
        f"validation  {validation_rows} prompts x {samples} = {validation_rows * samples} trajectories each time",
        _engine_line(config),
        *_overlap(config),
        *(
            f"{name:<11} {slot.replicas} x {slot.registered_name}, {slot.devices} device(s) each, frozen {slot.model}"
            for name, slot in config.engines.items()
        ),
        f"memory      {_memory(config)}",
    ]
    if cluster.processes > 1:
        shape = f"{cluster.nodes} node(s) x {cluster.processes_per_node} = {cluster.processes}"
        lines.append(f"processes   {shape}, each with 1/{cluster.processes} of weights, gradients and moments")
    return lines


def arithmetic(
    config: ResolvedConfig, steps: int, train_rows: int, validation_rows: int, longest_prompt: int
) -> dict[str, Any]:
    """What :func:`describe` says, for scripts."""
    validation = config.trainer.validation
    found = predicted(config)
    prediction = None if found is None else found.to_dict()
    return {
        "training_prompts": train_rows,
        "validation_prompts": validation_rows,
        "longest_prompt": longest_prompt,
        "max_prompt_length": config.data.max_prompt_length,
        "max_response_length": config.rollout.max_response_length,
        "trajectories_per_step": config.data.batch_size * config.rollout.n,
        "trajectories_per_validation": validation_rows * (validation.n + int(validation.greedy)),
        "steps": steps,
        "epochs": steps * config.data.batch_size / train_rows,
        "processes": config.cluster.processes,
        "devices": devices(config),
        "engine_replicas": config.engine_replicas,
        "prediction": prediction,
    }


def _overlap(config: ResolvedConfig) -> list[str]:
    most, depth = config.rollout.max_staleness, config.pipeline_depth
    if not most:
        return []
    waits = "; each update waits for the batch that is sampled meanwhile" if config.rollout.deterministic else ""
    return [f"overlap     samples {depth} batch(es) ahead; tokens are at most {most} version(s) old{waits}"]


def _engine_line(config: ResolvedConfig) -> str:
    engine = config.rollout.engine
    line = f"engines     {config.engine_replicas} x {engine.registered_name}"
    if engine.devices > 1:
        hosts = f" on {engine.nodes} hosts" if engine.nodes > 1 else ""
        line += (
            f", each with {engine.devices} devices{hosts} (tensor {engine.tensor_parallel} x pipeline "
            f"{engine.pipeline_parallel} x data {engine.data_parallel} parallel)"
        )
    return f"{line}, {'in this process' if config.cluster.runtime == 'local' else engine.placement}"
