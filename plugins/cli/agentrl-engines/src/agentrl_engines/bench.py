"""Starts an engine as a run would, and measures start-up time, speed, log-prob gap and memory."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from agentrl_core.api import AgentRLError, SamplingParams, TokenOutput, together
from agentrl_core.config import load_config
from agentrl_core.config.schema import ResolvedConfig
from agentrl_core.engine_kit.media import without_images
from agentrl_core.serving.replicas import EngineReplicas
from agentrl_core.trainer.logprob_gap import GAP, gap_of_answers
from agentrl_core.trainer.preparation import Preparation
from agentrl_core.trainer.roles import start_engines, start_runtime, start_workers

WARM_UP = 4
"""Requests before the measurement: the first ones compile, allocate and open connections."""


@dataclass(frozen=True)
class EngineFigures:
    """The measurements of one engine.

    Args:
        start_seconds: seconds until the engine was healthy.
        tokens: number of sampled tokens.
        seconds: seconds to sample them.
        gap_mean, gap_max: |engine - actor| of the sampled tokens' log-probs; None without the capability ``logprobs``.
        memory_bytes: host memory of all replicas and the processes that they started. With ``cluster.runtime=local``
            it includes the trainer itself. None if the system does not report it.
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


def measure_engines(
    config: Path, overrides: Sequence[str], engines: Sequence[str], requests: int, concurrency: int
) -> dict[str, EngineFigures | AgentRLError]:
    """The measurements, or the failure, of each engine; where there is only one its failure is raised.

    Args:
        config: file whose run the engines serve, with ``overrides``.
        engines: ``NAME`` or ``NAME=INTERPRETER``; "" is the file's own.
        requests, concurrency: see :func:`measure_engine`.
    """
    found: dict[str, EngineFigures | AgentRLError] = {}
    for engine in engines:
        try:
            loaded = load_config(config, [*overrides, *_engine_overrides(engine)])
            engine = engine or loaded.rollout.engine.name
            found[engine] = measure_engine(loaded, requests, concurrency)
        except AgentRLError as error:
            if len(engines) < 2:
                raise
            found[engine] = error
    return found


def row_of(found: EngineFigures | AgentRLError) -> dict[str, Any]:
    """For JSON."""
    if isinstance(found, AgentRLError):
        return {"error": str(found)}
    return {**asdict(found), "tokens_per_second": found.tokens_per_second}


def _engine_overrides(engine: str) -> list[str]:
    name, _, python = engine.partition("=")
    if not name:
        return []
    # Another engine can't run in the interpreter of the file's own engine. Engines outside this process need Ray.
    where = [f"rollout.engine.python={python}", "cluster.runtime=ray"] if python else ["rollout.engine.python=null"]
    return [f"rollout.engine.name={name}", *where]


def measure_engine(config: ResolvedConfig, requests: int, concurrency: int) -> EngineFigures:
    """Sample answers of at most ``rollout.max_response_length`` tokens to the first training prompts, without images.

    Args:
        config: from ``load_config``; engine and actor use the model in ``model.path``.
        requests: number of answers; the prompts repeat.
        concurrency: maximum concurrent requests.

    Raises:
        ConfigError, DataError, TemplateError, PluginError: before anything starts.
        EngineError: the engine did not start, or a request failed.
    """
    preparation = Preparation.of(config)
    renderer, data, sampling = preparation.renderer, preparation.data, config.rollout.sampling
    found = [row["raw_prompt"] for row in data.train if row["raw_prompt"]] or [data.first_prompt]
    messages = [without_images(each) for each in found]
    prompts = [
        renderer.render(messages[number % len(messages)], generation_prompt=True).ids for number in range(requests)
    ]
    params = SamplingParams(
        config.rollout.max_response_length, sampling.temperature, sampling.top_p, sampling.top_k,
        stop_token_ids=tuple(renderer.stop_token_ids),
    )  # fmt: skip
    with start_runtime(config) as runtime:
        training = start_workers(config, runtime, preparation.steps, actor_only=True)
        start = time.perf_counter()
        engines = start_engines(config, runtime, preparation, training)
        start_seconds = time.perf_counter() - start
        try:
            runtime.run(_answers(engines, prompts[:WARM_UP], params, concurrency))
            start = time.perf_counter()
            outputs = runtime.run(_answers(engines, prompts, params, concurrency))
            seconds = time.perf_counter() - start
            memory = engines.memory()
        finally:
            engines.close()
        gap = gap_of_answers(list(zip(prompts, outputs, strict=True)), sampling.temperature, training["actor"])
    tokens = sum(len(output.token_ids) for output in outputs)
    return EngineFigures(start_seconds, tokens, seconds, gap.get(f"{GAP}_mean"), gap.get(f"{GAP}_max"), memory)


async def _answers(
    engines: EngineReplicas, prompts: Sequence[Sequence[int]], params: SamplingParams, concurrency: int
) -> list[TokenOutput]:
    """One answer to each prompt, round-robin over the replicas; request i has seed i."""
    slots = asyncio.Semaphore(concurrency)

    async def one(number: int, prompt: Sequence[int]) -> TokenOutput:
        async with slots:
            replica, seeded = number % len(engines.servers), replace(params, seed=number)
            return await engines.sample(replica, prompt, seeded, f"answer-{number}")

    return await together(one(number, prompt) for number, prompt in enumerate(prompts))
