"""Starts an engine as a run would, and measures what matters before one is chosen."""

import time
from dataclasses import dataclass

from agentrl_core.api import SamplingParams
from agentrl_core.config.schema import ResolvedConfig
from agentrl_core.controller import ClassWithInitArgs
from agentrl_core.trainer.logprob_gap import GAP, gap_of_answers
from agentrl_core.trainer.preparation import Preparation
from agentrl_core.trainer.roles import start_engines, start_runtime, training_gpus
from agentrl_core.workers.actor import ActorWorker

WARM_UP = 4
"""Requests before the clock starts: first ones compile, allocate and open connections."""


@dataclass(frozen=True)
class EngineFigures:
    """What was measured.

    Args:
        start_seconds: until the engine was healthy.
        tokens: that were sampled.
        seconds: that took.
        gap_mean, gap_max: |engine - actor| of the sampled tokens' log-probs; None without the capability ``logprobs``.
        memory_bytes: of the host, all replicas and the processes that they started; with ``cluster.runtime=local``
            the trainer itself is in it. None where the system does not tell.
    """

    start_seconds: float
    tokens: int
    seconds: float
    gap_mean: float | None
    gap_max: float | None
    memory_bytes: int | None

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens per second of all replicas."""
        return self.tokens / self.seconds


def measure_engine(config: ResolvedConfig, requests: int, concurrency: int) -> EngineFigures:
    """Sample answers of ``rollout.max_response_length`` tokens at most to the first training prompts.

    Args:
        config: from ``load_config``; the model is that of ``model.path``, for the engine and for the actor.
        requests: how many; the prompts are used again and again.
        concurrency: requests on their way at a time.

    Raises:
        ConfigError, DataError, TemplateError, PluginError: before anything starts.
        EngineError: the engine did not start, or a request failed.
    """
    preparation = Preparation.of(config)
    plan, renderer = preparation.plan, preparation.renderer
    sampling, rows = config.rollout.sampling, preparation.data.train
    prompts = [
        renderer.encode(renderer.render(rows[number % len(rows)]["raw_prompt"], generation_prompt=True))
        for number in range(requests)
    ]
    params = SamplingParams(
        config.rollout.max_response_length, sampling.temperature, sampling.top_p, sampling.top_k,
        stop_token_ids=renderer.stop_token_ids,
    )  # fmt: skip
    cluster = config.cluster
    with start_runtime(config) as runtime:
        classes = {"actor": ClassWithInitArgs(ActorWorker, config, plan.optimizer_steps)}
        actor = runtime.colocated_worker_groups(
            classes, cluster.nodes, cluster.processes_per_node, num_gpus=training_gpus(config)
        )["actor"]
        actor.init_model()
        start = time.perf_counter()
        engines = start_engines(config, runtime, plan, preparation.facts, actor)
        start_seconds = time.perf_counter() - start
        try:
            engines.answer(prompts[:WARM_UP], params, concurrency)
            start = time.perf_counter()
            outputs = engines.answer(prompts, params, concurrency)
            seconds = time.perf_counter() - start
            memory = engines.memory()
        finally:
            engines.close()
        gap = gap_of_answers(list(zip(prompts, outputs, strict=True)), sampling.temperature, actor)
    tokens = sum(len(output.token_ids) for output in outputs)
    return EngineFigures(start_seconds, tokens, seconds, gap.get(f"{GAP}_mean"), gap.get(f"{GAP}_max"), memory)
