"""The engine's promises, over a stand-in server."""

import asyncio
import json

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


@pytest.fixture
def weights(model_path) -> WeightUpdate:
    return WeightUpdate(files=(f"{model_path}/model.safetensors",))


def test_an_answer_has_ids_log_probs_and_spans(serve, run) -> None:
    async def main() -> TokenOutput:
        async with serve() as engine:
            return await engine.generate([3, 4], SamplingParams(5, temperature=0.7, top_p=0.9, top_k=7, seed=1), "r")

    output = run(main())
    ids = expected([3, 4], 5)
    assert output == TokenOutput(ids, [-token / 1000 for token in ids], "length", [PolicySpan(0, 0, 5)])


def test_a_stop_id_ends_a_request_and_is_part_of_it(serve, run) -> None:
    async def main() -> TokenOutput:
        async with serve() as engine:
            return await engine.generate([3, 4], SamplingParams(50, stop_token_ids=(28,)), "r")

    output = run(main())
    assert (output.token_ids, output.finish_reason) == ([7, 14, 28], "stop")


def test_bad_requests_never_reach_the_server(serve, run) -> None:
    cases = [
        ([], SamplingParams(1), "the prompt is empty"),
        ([1] * MAX_MODEL_LEN, SamplingParams(1), "leaves no room to sample with max_model_len 100"),
        ([1, VOCAB], SamplingParams(1), r"token id 200 is outside the vocabulary 0\.\.199"),
        ([-3, 1], SamplingParams(1), "token id -3 is outside"),
        ([1], SamplingParams(0), "max_tokens is 0"),
        ([1], SamplingParams(1, temperature=-1), "temperature is -1"),
        ([1], SamplingParams(1, top_p=0), "top_p is 0; allowed: numbers > 0 and <= 1"),
    ]

    async def main() -> TokenOutput:
        async with serve() as engine:
            for prompt, params, message in cases:
                with pytest.raises(ValueError, match=message):
                    await engine.generate(prompt, params, "r")
            with pytest.raises(ValueError, match="the prompt has 1 images; this engine takes text alone"):
                await engine.generate([1], SamplingParams(1), "r", MultiModal(("name",), [1]))
            return await engine.generate([1] * 90, SamplingParams(50), "r")

    # What does not fit the context is cut off.
    assert len(run(main()).token_ids) == MAX_MODEL_LEN - 90


def test_a_session_has_one_request_at_a_time(serve, run) -> None:
    async def main() -> None:
        async with serve() as engine:
            first = asyncio.create_task(engine.generate([1], SamplingParams(20), "r"))
            await asyncio.sleep(0)
            with pytest.raises(ValueError, match="'r' is running already"):
                await engine.generate([1], SamplingParams(20), "r")
            await first
            await engine.generate([1], SamplingParams(2), "r")

    run(main())


def test_abort_returns_what_there_is(serve, run) -> None:
    async def main() -> None:
        async with serve() as engine:
            task = asyncio.create_task(engine.generate([1], SamplingParams(90), "r"))
            await engine.generate([1], SamplingParams(5), "clock")
            output = await engine.abort("r")
            assert output == await task
            assert output.finish_reason == "abort"
            assert 0 < len(output.token_ids) < 90
            assert output.token_ids == expected([1], len(output.token_ids))
            assert await engine.abort("r") is None
            # The next request of the session is not affected.
            assert len((await engine.generate([1], SamplingParams(3), "r")).token_ids) == 3

    run(main())


def test_a_cancelled_request_ends_on_the_server(serve, run) -> None:
    async def main() -> None:
        async with serve() as engine:
            task = asyncio.create_task(engine.generate([1], SamplingParams(90), "r"))
            await engine.generate([1], SamplingParams(2), "clock")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await engine.generate([1], SamplingParams(2), "r")
            # Sleep needs an idle server, which a request that nobody waits for would kill otherwise.
            await engine.sleep(1)
            await engine.wake_up()
            await engine.health()

    run(main())


@pytest.mark.parametrize("paused", [True, False])
def test_an_update_changes_what_runs(serve, run, weights, paused) -> None:
    async def main() -> None:
        async with serve() as engine:
            tasks = [asyncio.create_task(engine.generate([i + 1], SamplingParams(90), f"r{i}")) for i in range(8)]
            await engine.generate([1], SamplingParams(5), "clock")
            if paused:
                await engine.pause("keep")
            await engine.update_weights(weights, 7)
            if paused:
                await engine.resume()
            for output in await asyncio.gather(*tasks):
                assert len(output.token_ids) == 90
                assert [span.version for span in output.spans] == [0, 7]
            after = await engine.generate([1], SamplingParams(3), "s")
            assert (after.token_ids, after.spans) == (expected([1], 3, 7), [PolicySpan(7, 0, 3)])

    run(main())


@pytest.mark.parametrize("mode", ["keep", "drain", "abort"])
def test_pause_promises_that_nothing_is_sampled(serve, run, mode) -> None:
    async def main() -> None:
        async with serve() as engine:
            task = asyncio.create_task(engine.generate([1], SamplingParams(60), "r"))
            await engine.generate([1], SamplingParams(5), "clock")
            await engine.pause(mode)
            late = asyncio.create_task(engine.generate([1], SamplingParams(2), "late"))
            refused = asyncio.create_task(engine.generate([1], SamplingParams(2), "refused"))
            await asyncio.sleep(0)
            if mode == "keep":
                # Long enough for all of it, if it ran.
                assert not (await asyncio.wait([task, late], timeout=0.4))[0]
            else:
                assert task.done() or mode == "abort"
                output = await task
                assert output.finish_reason == {"drain": "length", "abort": "abort"}[mode]
            assert (await engine.abort("refused")) == await refused == TokenOutput([], [], "abort")
            assert not late.done()
            await engine.resume()
            assert len((await late).token_ids) == 2
            if mode == "keep":
                assert (await task).token_ids == expected([1], 60)

    run(main())


def test_sleep_waits_for_requests_and_holds_new_ones(serve, run, tmp_path) -> None:
    log = tmp_path / "log"

    async def main() -> None:
        async with serve(log_file=str(log)) as engine:
            task = asyncio.create_task(engine.generate([1], SamplingParams(30), "r"))
            await engine.generate([1], SamplingParams(2), "clock")
            await engine.sleep(1)
            assert len((await task).token_ids) == 30
            await engine.sleep(2)
            late = asyncio.create_task(engine.generate([1], SamplingParams(2), "late"))
            await engine.wake_up(["weights"])
            assert not late.done()
            await engine.wake_up()
            await late
            task = asyncio.create_task(engine.generate([1], SamplingParams(30), "r"))
            await engine.generate([1], SamplingParams(2), "clock")
            await engine.pause("keep")
            with pytest.raises(EngineError, match="1 paused requests hold the engine awake"):
                await engine.sleep(1)
            await engine.resume()
            with pytest.raises(ValueError, match="sleep level 3"):
                await engine.sleep(3)
            with pytest.raises(ValueError, match=r"wake_up tags \['gpu'\]"):
                await engine.wake_up(["gpu"])

    run(main())
    lines = [line for line in log.read_text().splitlines() if "memory_occupation" in line]
    assert lines == [
        "/release_memory_occupation ['kv_cache']",
        "/release_memory_occupation ['weights']",
        "/resume_memory_occupation ['weights']",
        "/resume_memory_occupation ['kv_cache']",
    ]


def test_buckets_are_written_as_the_same_files(serve, run, weights, tmp_path) -> None:
    (file,) = weights
    half = len(file.names) // 2
    parts = [list(file.tensors())[:half], list(file.tensors())[half:]]
    buckets = []
    for part in parts:
        names, shapes, dtypes, data = zip(*part, strict=True)
        buckets.append(ArrayBucket(names, shapes, dtypes, np.concatenate(data)))

    async def main() -> dict[str, bytes]:
        async with serve() as engine:
            # Fewer files in the second update: none of the first may be left.
            await engine.update_weights(WeightUpdate([*buckets]), 1)
            await engine.update_weights(WeightUpdate([file]), 2)
            await engine.update_weights(WeightUpdate([*buckets]), 3)
            folder = engine._weights._folder.path
            found = {}
            import pathlib

            for path in pathlib.Path(folder).iterdir():
                found |= {name: data.tobytes() for name, _, _, data in map_safetensors(str(path)).tensors()}
            return found

    assert run(main()) == {name: data.tobytes() for name, _, _, data in file.tensors()}


def test_wrong_weights_are_named_and_not_sent(serve, run, weights) -> None:
    (file,) = weights
    names = tuple("model.norms.weight" if name == "model.norm.weight" else name for name in file.names)
    shapes = tuple(s[::-1] if "layers.0.mlp.up_proj" in n else s for n, s in zip(names, file.shapes, strict=True))
    wrong = WeightUpdate([ArrayBucket(names, shapes, file.dtypes, file.data)])
    short = WeightUpdate([ArrayBucket(file.names, file.shapes, file.dtypes, file.data[:-4])])
    strange = WeightUpdate([ArrayBucket(file.names, file.shapes, ("float33",) * len(names), file.data)])

    async def main() -> None:
        async with serve() as engine:
            with pytest.raises(EngineError) as caught:
                await engine.update_weights(wrong, 1)
            message = str(caught.value)
            assert "model.norms.weight: the model has no such tensor (nearest: model.norm.weight)" in message
            assert "model.norm.weight: missing" in message
            assert "up_proj.weight: shape [32, 64] was given, the model has [64, 32]" in message
            with pytest.raises(EngineError, match=f"bucket 0 holds {file.nbytes - 4} bytes.*need {file.nbytes}"):
                await engine.update_weights(short, 1)
            with pytest.raises(EngineError, match="unknown dtypes: float33"):
                await engine.update_weights(strange, 1)
            with pytest.raises(EngineError, match="cannot share the actor's module"):
                await engine.update_weights(WeightUpdate(shared=True), 1)
            assert (await engine.generate([1], SamplingParams(1), "r")).spans == [PolicySpan(0, 0, 1)]

    run(main())


def test_a_server_that_fails_in_an_update_is_stopped(serve, run, weights) -> None:
    async def main() -> None:
        async with serve("bad_update") as engine:
            task = asyncio.create_task(engine.generate([1], SamplingParams(90), "r"))
            await engine.generate([1], SamplingParams(2), "clock")
            with pytest.raises(EngineError, match="shapes differ"):
                await engine.update_weights(weights, 4)
            for broken in (task, engine.health()):
                with pytest.raises(EngineError, match="stopped after an update to weights 4 that failed"):
                    await broken

    run(main())


def test_metrics_count_since_the_last_call(serve, run) -> None:
    async def main() -> None:
        async with serve() as engine:
            await asyncio.gather(*(engine.generate([1, 2, 3], SamplingParams(5), f"r{i}") for i in range(4)))
            assert engine.metrics() == {
                "prompt_tokens": 12, "cached_tokens": 8, "retractions": 0,
            }  # fmt: skip
            assert set(engine.metrics().values()) == {0}

    run(main())


def test_a_refusal_is_told_in_the_servers_words(serve, run, monkeypatch) -> None:
    from agentrl_engine_sglang import engine as module

    original = module.request_body
    monkeypatch.setattr(
        module, "request_body", lambda *args: json.loads(json.dumps(original(*args)).replace("top_p", "top_pp"))
    )

    async def main() -> None:
        async with serve() as engine:
            with pytest.raises(EngineError, match="POST /generate: status 400: unknown field `top_pp`"):
                await engine.generate([1], SamplingParams(1), "r")

    run(main())
