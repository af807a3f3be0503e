import asyncio
import random

from agentrl_core.api.engine import SamplingParams
from agentrl_engine_hf.config import HFEngineConfig


async def trajectory(engine, session_id, prompt, seed, jitter):
    rng = random.Random(seed)
    played = []
    for turn in range(1 + rng.randrange(4)):
        for _ in range(jitter.randrange(20)):
            await asyncio.sleep(0)
        params = SamplingParams(max_tokens=3 + rng.randrange(12), seed=seed * 10 + turn)
        output = await engine.generate(prompt, params, session_id)
        played.append((output.token_ids, output.log_probs))
        prompt = prompt + output.token_ids + [rng.randrange(200) for _ in range(rng.randrange(6))]
    await engine.close_session(session_id)
    return played


async def rollout(engine, prompts, jitter_seed):
    """All sessions of a rollout, opened and started in an order that the jitter decides."""
    jitter = random.Random(jitter_seed)
    ids = [f"s{i:02d}" for i in range(len(prompts))]
    for session_id in jitter.sample(ids, len(ids)):
        await engine.open_session(session_id)
    order = jitter.sample(range(len(ids)), len(ids))
    tasks = {i: asyncio.create_task(trajectory(engine, ids[i], prompts[i], i, jitter)) for i in order}
    return [await tasks[i] for i in range(len(ids))]


def test_the_same_rollout_gives_the_same_bits(model, serve, prompts) -> None:
    starts = prompts(14, 1, 60) + [[4, 5, 6, 7]] * 4
    config = HFEngineConfig(max_num_seqs=7)

    async def main():
        results = []
        async with serve(model, config, deterministic=True) as engine:
            results.append(await rollout(engine, starts, 1))
            results.append(await rollout(engine, starts, 2))
            # Other work in between, with and without sessions.
            await rollout(engine, prompts(9, 100, 150, seed=5), 3)
            await engine.generate([1] * 50, SamplingParams(20), "stray")
            results.append(await rollout(engine, starts, 4))
        async with serve(model, config, deterministic=True) as engine:
            results.append(await rollout(engine, starts, 5))
        return results

    first, *others = asyncio.run(main())
    assert sum(len(ids) for played in first for ids, _ in played) > 200
    for other in others:
        assert other == first


def test_a_step_waits_until_every_open_session_has_a_request(model, serve) -> None:
    async def main():
        async with serve(model, deterministic=True) as engine:
            await engine.open_session("a")
            await engine.open_session("b")
            first = asyncio.create_task(engine.generate([1, 2], SamplingParams(4, seed=0), "a"))
            await engine.health()
            waiting = not first.done() and engine.metrics()["steps"] == 0
            await engine.close_session("b")
            return waiting, await first

    waiting, output = asyncio.run(main())
    assert waiting
    assert len(output.token_ids) == 4
