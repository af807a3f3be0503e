import asyncio
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl_core.api.engine import SamplingParams
from agentrl_engine_hf.config import HFEngineConfig


async def converse(engine, session_id, prompt, turns, seed, tool_tokens=6):
    """Play turns of one trajectory; returns (prompt, output) of each."""
    rng = random.Random(seed)
    played = []
    for turn in range(turns):
        params = SamplingParams(max_tokens=4 + rng.randrange(8), seed=seed * 100 + turn)
        output = await engine.generate(prompt, params, session_id)
        played.append((prompt, output))
        prompt = prompt + output.token_ids + [rng.randrange(200) for _ in range(tool_tokens)]
    return played


def test_turns_reuse_the_cache_and_change_nothing(model, serve, prompts, reference_log_probs) -> None:
    async def main(close_between):
        async with serve(model) as engine:
            if close_between:
                generate = engine.generate

                async def generate_afresh(prompt, params, session_id):
                    await engine.close_session(session_id)
                    return await generate(prompt, params, session_id)

                engine.generate = generate_afresh
            played = await asyncio.gather(*(converse(engine, f"s{i}", p, 4, i) for i, p in enumerate(prompts(8))))
            return played, engine.metrics()

    (reused, with_cache), (afresh, without) = asyncio.run(main(False)), asyncio.run(main(True))
    expected_cached = 0
    for left, right in zip(reused, afresh, strict=True):
        known = 0
        for (prompt, output), (_, other) in zip(left, right, strict=True):
            assert output.token_ids == other.token_ids
            assert output.log_probs == pytest.approx(other.log_probs, abs=1e-5)
            assert output.log_probs == pytest.approx(reference_log_probs(model, prompt, output.token_ids), abs=2e-5)
            expected_cached += known
            # The last sampled token was never fed to the model.
            known = len(prompt) + len(output.token_ids) - 1
    assert with_cache["cached_tokens"] == expected_cached
    assert without["cached_tokens"] == 0
    assert with_cache["prompt_tokens"] == without["prompt_tokens"]


def test_a_diverging_prompt_keeps_the_common_prefix_only(model, serve, reference_log_probs) -> None:
    first = list(range(20, 40))
    second = first[:11] + [199] + first[12:]

    async def main():
        async with serve(model) as engine:
            await engine.generate(first, SamplingParams(6, seed=1), "s")
            engine.metrics()
            return await engine.generate(second, SamplingParams(6, seed=2), "s"), engine.metrics()

    output, metrics = asyncio.run(main())
    assert metrics["cached_tokens"] == 11
    assert output.log_probs == pytest.approx(reference_log_probs(model, second, output.token_ids), abs=2e-5)


def test_the_same_prompt_again_computes_one_token(model, serve, reference_log_probs) -> None:
    prompt = list(range(30))

    async def main():
        async with serve(model) as engine:
            first = await engine.generate(prompt, SamplingParams(6, seed=1), "s")
            engine.metrics()
            return first, await engine.generate(prompt, SamplingParams(6, seed=1), "s"), engine.metrics()

    first, again, metrics = asyncio.run(main())
    assert metrics["cached_tokens"] == 29
    assert again.token_ids == first.token_ids


def test_sessions_idle_longest_are_evicted_and_prefilled_again(model, serve, prompts, reference_log_probs) -> None:
    starts = prompts(5, 20, 20)

    async def main():
        async with serve(model, HFEngineConfig(max_num_seqs=3)) as engine:
            turns = {}
            for i, start in enumerate(starts):
                turns[i] = start + (await engine.generate(start, SamplingParams(5, seed=i), f"s{i}")).token_ids
            engine.metrics()
            cached, outputs = [], []
            for i in (4, 0, 3):
                outputs.append((turns[i], await engine.generate(turns[i], SamplingParams(5, seed=i), f"s{i}")))
                cached.append(engine.metrics()["cached_tokens"])
            return cached, outputs

    cached, outputs = asyncio.run(main())
    # Three rows hold sessions 2, 3, 4; session 0 takes the row of 2, which is idle longest by then.
    assert cached == [24, 0, 24]
    for prompt, output in outputs:
        assert output.log_probs == pytest.approx(reference_log_probs(model, prompt, output.token_ids), abs=2e-5)


def test_close_session_frees_the_row(model, serve) -> None:
    prompt = list(range(30))

    async def main():
        async with serve(model) as engine:
            await engine.open_session("s")
            await engine.generate(prompt, SamplingParams(4, seed=1), "s")
            await engine.close_session("s")
            await engine.close_session("unknown")
            engine.metrics()
            await engine.generate(prompt, SamplingParams(4, seed=1), "s")
            return engine.metrics()

    assert asyncio.run(main())["cached_tokens"] == 0


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 3), st.integers(0, 12), st.booleans()), min_size=1, max_size=9
    ),
    rows=st.integers(1, 6),
    kv_tokens=st.sampled_from([0, 128, 300]),
    prefill=st.sampled_from([7, 50, 4096]),
)
def test_rows_never_mix(model, serve, reference_log_probs, data, rows, kv_tokens, prefill) -> None:
    """Whatever joins, leaves, waits, is evicted or closed: every token is the model's own continuation."""
    config = HFEngineConfig(max_num_seqs=rows, kv_cache_tokens=kv_tokens, max_prefill_tokens=prefill)

    async def trajectory(engine, number, length, turns, tool_tokens, close):
        # Some trajectories share their prompt.
        prompt = [(length * 7 + k) % 200 for k in range(length)]
        played = await converse(engine, f"s{number}", prompt, turns, number, tool_tokens)
        if close:
            await engine.close_session(f"s{number}")
        return played

    async def main():
        async with serve(model, config) as engine:
            return await asyncio.gather(*(trajectory(engine, number, *item) for number, item in enumerate(data)))

    for played in asyncio.run(main()):
        for prompt, output in played:
            expected = reference_log_probs(model, prompt, output.token_ids)
            assert output.log_probs == pytest.approx(expected, abs=2e-5)
