"""Memory that is really free again: of an engine that sleeps, and of a worker whose tensors wait on the host."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import torch
from _gpu_bench import PROMPT_TOKENS, Bench
from _report import Figure
from torch import Tensor

from agentrl_core.api.engine import EngineContext, SamplingParams, TokenOutput
from agentrl_core.workers.actor import ActorWorker

WORKSPACES = 0.25
"""[GiB] that libraries keep for as long as a process lives, cuBLAS for one, and blocks that are partly in use."""
ROUNDING = 2.0**-8
"""Half of bfloat16's eps: what rounds once more, or in another order, may differ by so much of itself."""


def sleep(bench: Bench) -> Iterator[Figure]:
    """The embedded engine in its own weights: what it holds awake and asleep, and that it says the same afterwards."""
    # Writes the model.
    config = bench.config()
    context = EngineContext(
        model_path=str(bench.model_path),
        dtype="bfloat16" if bench.device.type == "cuda" else "float32",
        max_model_len=bench.shape.tokens,
        device=bench.device.type,
    )
    memory = bench.memory
    memory.settle()
    before = memory.reserved
    engine: Any = config.rollout.engine.build(context)
    found = asyncio.run(_sleeping(engine, memory, bench.shape.tokens))
    case = "the hf engine"
    for level in (1, 2):
        yield Figure(case, f"tokens that differ after sleep at level {level}", found[f"wrong {level}"], "", 0)
        yield Figure(case, f"waking from level {level}", found[f"wake {level}"], "s")
        if before is not None:
            taken = found[f"asleep {level}"] - before
            yield Figure(case, f"reserved asleep at level {level}", taken, "GiB", WORKSPACES if level == 2 else None)
    if before is not None:
        yield Figure(case, "reserved awake", found["awake"] - before, "GiB")


async def _sleeping(engine: Any, memory: Any, tokens: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    await engine.start()
    try:
        first = await _answers(engine, tokens, "first")
        found["awake"] = memory.reserved
        for level in (1, 2):
            await engine.sleep(level)
            found[f"asleep {level}"] = memory.reserved
            start = time.perf_counter()
            await engine.wake_up()
            found[f"wake {level}"] = time.perf_counter() - start
            again = await _answers(engine, tokens, f"after {level}")
            found[f"wrong {level}"] = sum(map(_differing, first, again))
    finally:
        await engine.close()
    return found


def _differing(first: TokenOutput, second: TokenOutput) -> int:
    """Tokens that are other ones, or were sampled with another log-prob."""
    assert first.log_probs is not None and second.log_probs is not None
    return sum(
        one != other or abs(before - after) > ROUNDING
        for one, other, before, after in zip(
            first.token_ids, second.token_ids, first.log_probs, second.log_probs, strict=True
        )
    )


async def _answers(engine: Any, tokens: int, tag: str) -> list[TokenOutput]:
    """Greedy ones, of equal length, to eight prompts."""
    params = SamplingParams(max_tokens=min(tokens - PROMPT_TOKENS, 64), temperature=0.0)
    prompts = [[(7 * row + place) % 200 + 1 for place in range(PROMPT_TOKENS)] for row in range(8)]
    return list(await asyncio.gather(
        *(engine.generate(prompt, params, f"{tag} {row}") for row, prompt in enumerate(prompts))
    ))  # fmt: skip


def offload(bench: Bench) -> Iterator[Figure]:
    """A worker whose weights and moments wait on the host: what stays on the device, and that it resumes exactly."""
    waiting = ("actor.offload_parameters=true", "actor.offload_optimizer=true", "actor.optimizer.lr=1e-3")
    first, second = bench.batch(0), bench.batch(1)
    memory = bench.memory
    memory.settle()
    nothing = memory.reserved
    with bench.actor("actor.optimizer.lr=1e-3") as actor:
        expected = _updated(actor, first)
        if nothing is not None:
            assert memory.reserved is not None and memory.held is not None
            # Engines share the device from here on.
            kept = memory.reserved - memory.held
            yield Figure("all on the device", "reserved but unused after an update", kept, "GiB", WORKSPACES)
    with bench.actor(*waiting) as actor:
        if nothing is not None:
            assert memory.reserved is not None
            yield Figure("offloaded", "reserved after loading", memory.reserved - nothing, "GiB", WORKSPACES)
        found = _updated(actor, first)
        if nothing is not None:
            assert memory.reserved is not None
            yield Figure("offloaded", "reserved after an update", memory.reserved - nothing, "GiB", WORKSPACES)
        # Twice the same arithmetic; kernels may add in another order.
        yield Figure("offloaded", "norm of the gradient, relative difference", _relative(found, expected), "", ROUNDING)
        memory.settle()
        start = time.perf_counter()
        actor.save_checkpoint(str(bench.folder / "checkpoint"))
        yield Figure("checkpoint", "writing", time.perf_counter() - start, "s")
        if memory.growth is not None:
            yield Figure("checkpoint", "memory of writing it", memory.growth, "GiB", _passing(actor))
        saved, schedule = _state(actor), actor._backend.steps
        expected = _updated(actor, second)
    with bench.actor(*waiting) as actor:
        memory.settle()
        start = time.perf_counter()
        actor.load_checkpoint(str(bench.folder / "checkpoint"))
        yield Figure("checkpoint", "reading", time.perf_counter() - start, "s")
        if memory.growth is not None:
            yield Figure("checkpoint", "memory of reading it", memory.growth, "GiB", _passing(actor))
        loaded = _state(actor)
        wrong = sum(not torch.equal(loaded[name], tensor) for name, tensor in saved.items())
        yield Figure("checkpoint", "tensors of weights and moments", len(saved), "", 1, at_least=True)
        yield Figure("checkpoint", "of them not as they were saved", wrong + (loaded.keys() != saved.keys()), "", 0)
        yield Figure("checkpoint", "steps of the schedule that are lost", abs(actor._backend.steps - schedule), "", 0)
        found = _updated(actor, second)
        yield Figure(
            "checkpoint", "next norm of the gradient, relative difference", _relative(found, expected), "", ROUNDING
        )


def _passing(actor: ActorWorker) -> float:
    """[GiB] of the weights and half of them again. The moments, twice as much, have no business on the device."""
    return 1.5 * sum(parameter.nbytes for parameter in actor.module.parameters()) / 2**30


def _updated(actor: ActorWorker, batch: Any) -> float:
    """The norm of the gradient of one update with this batch."""
    batch = batch.slice()
    batch.union(actor.compute_log_prob(batch))
    return actor.update(batch)["actor/grad_norm"]


def _relative(found: float, expected: float) -> float:
    return abs(found - expected) / expected


def _state(actor: ActorWorker) -> dict[str, Tensor]:
    """Weights and moments, copied to the host."""
    tensors = {**actor.module.state_dict(), **actor._backend._optimizer.moments()}
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
