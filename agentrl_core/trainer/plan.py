"""The arithmetic of a run, before it starts: steps, batches, lengths, memory."""

from dataclasses import dataclass
from pathlib import Path

from agentrl_core.api import ConfigError
from agentrl_core.config.schema import ResolvedConfig


@dataclass(frozen=True)
class RunPlan:
    """Numbers that follow from the configuration and the data.

    Args:
        steps: of the whole run.
        trajectories: of one step.
        max_model_len: tokens of prompt and response together.
        optimizer_steps: of the whole run, per trained model.
    """

    steps: int
    trajectories: int
    max_model_len: int
    optimizer_steps: int

    @classmethod
    def of(cls, config: ResolvedConfig, train_rows: int) -> "RunPlan":
        """The plan of a configuration over ``train_rows`` prompts."""
        batch = config.data.batch_size
        steps = config.trainer.steps or max(1, config.trainer.epochs * train_rows // batch)
        update = config.actor
        return cls(
            steps=steps,
            trajectories=batch * config.rollout.n,
            max_model_len=config.data.max_prompt_length + config.rollout.max_response_length,
            optimizer_steps=steps * update.epochs * update.mini_batches,
        )

    def check_context(self, max_position_embeddings: int | None) -> None:
        """Refuse lengths that the model cannot take.

        Raises:
            ConfigError: with both numbers.
        """
        if max_position_embeddings is not None and self.max_model_len > max_position_embeddings:
            raise ConfigError(
                f"data.max_prompt_length + rollout.max_response_length = {self.max_model_len} tokens, but the model in "
                f"model.path has a context of {max_position_embeddings}; lower one of the two"
            )


def describe(
    config: ResolvedConfig, plan: RunPlan, train_rows: int, validation_rows: int, longest_prompt: int
) -> list[str]:
    """The batch arithmetic in lines for a person."""
    rollout, actor = config.rollout, config.actor
    mini = plan.trajectories / actor.mini_batches
    validation = config.trainer.validation
    samples = validation.n + int(validation.greedy)
    lines = [
        f"data        {train_rows} training prompts, {validation_rows} for validation; longest {longest_prompt} of "
        f"{config.data.max_prompt_length} tokens",
        f"step        {config.data.batch_size} prompts x {rollout.n} samples = {plan.trajectories} trajectories, "
        f"each of up to {rollout.max_response_length} response tokens",
        f"run         {plan.steps} steps = {plan.steps * config.data.batch_size / train_rows:.2f} epochs",
        f"update      {actor.epochs} epoch(s) x {actor.mini_batches} mini-batch(es) of ~{mini:.0f} trajectories, "
        f"micro-batches of up to {actor.micro_batch_tokens} padded tokens",
        f"validation  {validation_rows} prompts x {samples} = {validation_rows * samples} trajectories each time",
        _engine_line(config),
    ]
    return lines


def _engine_line(config: ResolvedConfig) -> str:
    engine = config.rollout.engine
    line = f"engines     {config.engine_replicas} x {engine.registered_name}"
    if engine.devices > 1:
        hosts = f" on {engine.nodes} hosts" if engine.nodes > 1 else ""
        line += (
            f", each with {engine.devices} devices{hosts} (tensor {engine.tensor_parallel} x pipeline "
            f"{engine.pipeline_parallel} x data {engine.data_parallel} parallel)"
        )
    if config.cluster.runtime == "local":
        return f"{line}, in this process"
    return f"{line}, {engine.placement}"


def memory_lines(config: ResolvedConfig, has_critic: bool) -> list[str]:
    """An estimate of the memory that models and optimizers need, in lines for a person."""
    trained = 2 if has_critic else 1
    lines = weight_lines(Path(config.model.path), trained, frozen=int(config.algorithm.kl_coef > 0))
    cluster = config.cluster
    processes = cluster.processes
    if processes > 1:
        shape = f"{cluster.nodes} node(s) x {cluster.processes_per_node} = {processes}"
        lines.append(f"processes   {shape}, each with 1/{processes} of weights, gradients and AdamW states")
    return lines


def weight_lines(model: Path, trained: int = 1, frozen: int = 0) -> list[str]:
    """Memory of ``trained`` models under AdamW and ``frozen`` ones beside them, from the weights' size on disk."""
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    parts = {
        "weights": weights * (trained + frozen),
        "gradients": weights * trained,
        "AdamW states": weights * 2 * trained,
    }
    shown = ", ".join(f"{name} {_size(value)}" for name, value in parts.items())
    return [f"memory      {shown}; together {_size(sum(parts.values()))} plus activations and KV cache"]


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.1f} MiB"
