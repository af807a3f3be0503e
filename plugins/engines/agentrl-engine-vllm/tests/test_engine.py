"""The engine's promises, over a stand-in for vLLM."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentrl_core.api import (
    ArrayBucket,
    MultiModal,
    PolicySpan,
    SamplingParams,
    TokenOutput,
    WeightUpdate,
    map_safetensors,
)
from agentrl_core.api.errors import EngineError

# Of the engines that conftest.py makes.
VOCAB = 200
MAX_MODEL_LEN = 100


def expected(prompt: list[int], count: int, version: int = 0) -> list[int]:
    """What the stand-in samples."""
    ids: list[int] = []
    for _ in range(count):
        ids.append((sum(prompt) + sum(ids) + 1000 * version) % VOCAB)
    return ids


def last() -> Any:
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.last


@pytest.fixture
def weights(model_path) -> WeightUpdate:
    return WeightUpdate(files=(f"{model_path}/model.safetensors",))


async def turns(count: int) -> None:
    """Let the others go on for a while."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_an_answer_has_ids_log_probs_and_spans(serve, run) -> None:
    async def main() -> TokenOutput:
        async with serve() as engine:
            output = await engine.generate([3, 4], SamplingParams(5, temperature=0.7, top_p=0.9, top_k=7, seed=1), "r")
            assert engine.metrics() == {
                "prompt_tokens": 2, "cached_tokens": 1,
            }  # fmt: skip
            assert not any(engine.metrics().values())
            return output

    output = run(main())
    ids = expected([3, 4], 5)
    assert output == TokenOutput(ids, [-token / 1000 for token in ids], "length", [PolicySpan(0, 0, 5)])


def test_bad_requests_never_reach_vllm(serve, run) -> None:
    cases = [
        ([], SamplingParams(1), "the prompt is empty"),
        ([1] * MAX_MODEL_LEN, SamplingParams(1), "leaves no room to sample with max_model_len 100"),
        ([1, VOCAB], SamplingParams(1), r"token id 200 is outside the vocabulary 0\.\.199"),
        ([-3, 1], SamplingParams(1), "token id -3 is outside"),
        ([1], SamplingParams(0), "max_tokens is 0"),
        ([1], SamplingParams(1, temperature=-1), "temperature is -1"),
        ([1], SamplingParams(1, temperature=3), "temperature is 3; allowed: 0 .greedy., or 0.01 to 2"),
        ([1], SamplingParams(1, top_p=0), "top_p is 0; allowed: numbers > 0 and <= 1"),
    ]

    async def main() -> TokenOutput:
        async with serve() as engine:
            for prompt, params, message in cases:
                with pytest.raises(ValueError, match=message):
                    await engine.generate(prompt, params, "r")
            with pytest.raises(ValueError, match="the prompt has 1 images; this engine takes text alone"):
                await engine.generate([1], SamplingParams(1), "r", MultiModal(("name",), [1]))
            assert not last().params
            return await engine.generate([1] * 90, SamplingParams(50), "r")

    # What does not fit the context is cut off.
    assert len(run(main()).token_ids) == MAX_MODEL_LEN - 90


def test_a_schema_goes_with_its_request_only(serve, run) -> None:
    async def main() -> None:
        async with serve() as engine:
            await engine.generate([1], SamplingParams(2, json_schema='{"type": "object"}'), "r")
            await engine.generate([1], SamplingParams(2), "r")
            constrained, plain = last().params
            assert constrained.structured_outputs.json == '{"type": "object"}'
            assert plain.structured_outputs is None

    run(main())


def test_a_session_has_one_request_at_a_time(serve, run) -> None:
    async def main() -> None:
        async with serve() as engine:
            first = asyncio.create_task(engine.generate([1], SamplingParams(20), "r"))
            await turns(2)
            with pytest.raises(ValueError, match="'r' is running already"):
                await engine.generate([1], SamplingParams(20), "r")
            await first
            await engine.generate([1], SamplingParams(2), "r")

    run(main())


def test_abort_returns_what_there_is(serve, run) -> None:
    async def main() -> None:
        async with serve() as engine:
            task = asyncio.create_task(engine.generate([1], SamplingParams(90), "r"))
            await turns(10)
            output = await engine.abort("r")
            assert output == await task
            assert output.finish_reason == "abort"
            assert 0 < len(output.token_ids) < 90
            assert output.token_ids == expected([1], len(output.token_ids))
            assert await engine.abort("r") is None

    run(main())


def test_a_request_that_waits_can_be_aborted_or_goes_on(serve, run) -> None:
    async def main() -> None:
        async with serve() as engine:
            await engine.pause("drain")
            ended, served = (asyncio.create_task(engine.generate([1], SamplingParams(3), name)) for name in "ab")
            await turns(5)
            assert not last().params
            assert await engine.abort("a") == await ended == TokenOutput([], [], "abort")
            await engine.resume()
            assert (await served).token_ids == expected([1], 3)

    run(main())


NAMES = ("r0", "r1", "r2", "r3")


@pytest.mark.parametrize(
    ("mode", "reason", "call"),
    [("abort", "abort", ("abort", *NAMES)), ("drain", "length", ("pause", "wait", False))],
)
def test_pause_empties_the_engine_with_one_call(serve, run, mode, reason, call) -> None:
    async def main() -> None:
        async with serve() as engine:
            tasks = [
                asyncio.create_task(engine.generate([i], SamplingParams(60), name)) for i, name in enumerate(NAMES)
            ]
            await turns(10)
            before = len(last().calls)
            await engine.pause(mode)
            assert {output.finish_reason for output in await asyncio.gather(*tasks)} == {reason}
            assert last().calls[before:] == [call]


def test_an_abort_that_overtakes_its_request_is_said_again(serve, run, monkeypatch) -> None:
    monkeypatch.setattr("agentrl_engine_vllm.engine.ABORT_INTERVAL", 0.001)

    async def main() -> None:
        async with serve() as engine:
            last().most_tokens = 5
            tasks = [
                asyncio.create_task(engine.generate([i], SamplingParams(60), name)) for i, name in enumerate(NAMES)
            ]
            await turns(10)
            last().running.discard("r2")
            pausing = asyncio.create_task(engine.pause("abort"))
            await turns(10)
            last().running.add("r2")
            await pausing
            assert {output.finish_reason for output in await asyncio.gather(*tasks)} == {"abort"}
            assert set(call for call in last().calls if call[0] == "abort") == {("abort", *NAMES), ("abort", "r2")}

    run(main())


@pytest.mark.parametrize("paused", [True, False])
def test_an_update_empties_the_cache_and_what_runs_goes_on(serve, run, weights, paused) -> None:
    async def main() -> TokenOutput:
        async with serve() as engine:
            last().most_tokens = 5
            task = asyncio.create_task(engine.generate([1], SamplingParams(60), "r"))
            await turns(10)
            if paused:
                await engine.pause("keep")
            await engine.update_weights(weights, 7)
            assert last().calls.index(("pause", "keep", True)) < last().calls.index(("weights", "7"))
            if paused:
                await turns(10)
                assert not task.done()
                assert last().calls[-1] == ("weights", "7")
                await engine.resume()
            return await task

    output = run(main())
    old, new = output.spans
    assert (old.version, new.version, new.end) == (0, 7, 60)
    assert len(output.token_ids) == 60


def test_a_paused_engine_that_is_empty_is_not_paused_again_for_an_update(serve, run, weights) -> None:
    async def main() -> None:
        async with serve() as engine:
            await engine.pause("abort")
            late = asyncio.create_task(engine.generate([1], SamplingParams(5), "late"))
            await turns(5)
            await engine.update_weights(weights, 7)
            assert [call[0] for call in last().calls[-2:]] == ["reset", "weights"]
            assert not any(call[0] == "pause" for call in last().calls)
            await engine.resume()
            assert [span.version for span in (await late).spans] == [7]

    run(main())


def test_a_cache_that_requests_keep_is_under_another_salt(serve, run, weights) -> None:
    async def main() -> TokenOutput:
        async with serve() as engine:
            last().most_tokens = 5
            task = asyncio.create_task(engine.generate([1], SamplingParams(60), "r"))
            await turns(10)
            during: list[asyncio.Task[TokenOutput]] = []

            async def come_in_the_middle() -> None:
                during.append(asyncio.create_task(engine.generate([1], SamplingParams(5), "during")))
                await turns(10)

            last().start_weight_update = come_in_the_middle
            await engine.update_weights(replace(weights, running="continue"), 7)
            assert ("pause", "keep", False) in last().calls and ("pause", "keep", True) not in last().calls
            assert [span.version for span in (await during[0]).spans] == [7]
            await engine.generate([1], SamplingParams(5), "after")
            before, *later = last().salts
            assert len(set(later)) == 1 and before not in later
            return await task

    assert [span.version for span in run(main()).spans] == [0, 7]


def test_buckets_come_as_files_that_are_gone_afterwards(serve, run, weights) -> None:
    bucket = map_safetensors(weights.files[0])

    async def main() -> None:
        async with serve() as engine:
            await engine.update_weights(WeightUpdate([bucket]), 1)
            (size,) = last().sizes
            assert size >= bucket.nbytes

    run(main())


def test_wrong_weights_are_refused_before_anything_is_sent(serve, run, weights) -> None:
    bucket = map_safetensors(weights.files[0])
    names = ("odd.weight", *bucket.names[1:])
    wrong = ArrayBucket(names, bucket.shapes, bucket.dtypes, np.asarray(bucket.data))

    async def main() -> TokenOutput:
        async with serve() as engine:
            with pytest.raises(EngineError, match="odd.weight: the model has no such tensor"):
                await engine.update_weights(WeightUpdate([wrong]), 1)
            with pytest.raises(EngineError, match="cannot share the actor's module"):
                await engine.update_weights(WeightUpdate(shared=True), 1)
            return await engine.generate([1], SamplingParams(3), "r")

    assert run(main()).spans == [PolicySpan(0, 0, 3)]


def test_an_update_that_fails_half_way_ends_the_engine(serve, run, weights) -> None:
    async def main() -> None:
        async with serve() as engine:
            last().bad_update = True
            with pytest.raises(EngineError, match="weights 1: size mismatch in a worker; restart the vllm engine"):
                await engine.update_weights(weights, 1)
            assert last().calls[-1] == ("shutdown",)
            for call in (engine.health(), engine.generate([1], SamplingParams(1), "r")):
                with pytest.raises(EngineError, match="after an update to weights 1 that failed"):
                    await call

    run(main())


def test_a_vllm_that_died_is_not_healthy(serve, run) -> None:
    async def main() -> None:
        async with serve() as engine:
            await engine.health()
            last().dead = True
            with pytest.raises(EngineError, match="vLLM has ended: EngineCore encountered an issue"):
                await engine.health()

    run(main())


def test_sleep_waits_for_what_runs_and_holds_what_comes(serve, run, weights) -> None:
    async def main() -> None:
        async with serve() as engine:
            running = asyncio.create_task(engine.generate([1], SamplingParams(60), "r"))
            await turns(10)
            await engine.sleep(1)
            assert len((await running).token_ids) == 60
            later = asyncio.create_task(engine.generate([1], SamplingParams(3), "later"))
            await engine.wake_up(["weights"])
            await turns(10)
            assert not later.done()
            await engine.wake_up(["kv_cache"])
            assert (await later).token_ids == expected([1], 3)
            with pytest.raises(ValueError, match="sleep level 3"):
                await engine.sleep(3)
            with pytest.raises(ValueError, match=r"wake_up tags \['odd'\]"):
                await engine.wake_up(["odd"])

    run(main())


def test_after_sleep_without_weights_requests_need_an_update(serve, run, weights) -> None:
    async def main() -> TokenOutput:
        async with serve() as engine:
            await engine.sleep(2)
            await engine.wake_up()
            with pytest.raises(EngineError, match=r"gone since sleep\(2\)"):
                await engine.generate([1], SamplingParams(3), "r")
            await engine.update_weights(weights, 4)
            return await engine.generate([1], SamplingParams(3), "r")

    assert run(main()).spans == [PolicySpan(4, 0, 3)]


def test_paused_requests_hold_the_engine_awake(serve, run) -> None:
    async def main() -> None:
        async with serve() as engine:
            task = asyncio.create_task(engine.generate([1], SamplingParams(60), "r"))
            await turns(5)
            await engine.pause("keep")
            with pytest.raises(EngineError, match="hold the engine awake"):
                await engine.sleep()
            await engine.resume()
            await task

    run(main())


def test_a_closed_engine_lets_nobody_wait(serve, run) -> None:
    async def main() -> None:
        async with serve() as engine:
            last().most_tokens = 5
            running = asyncio.create_task(engine.generate([1], SamplingParams(60), "running"))
            await turns(10)
            await engine.pause()
            waiting = asyncio.create_task(engine.generate([1], SamplingParams(60), "waiting"))
            await turns(10)
        for task in (running, waiting):
            with pytest.raises(EngineError, match="has been closed"):
                await task

    run(main())
