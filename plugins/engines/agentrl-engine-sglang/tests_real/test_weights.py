"""Weight updates of a real server: the output is the new model's, whatever was cached or running."""

import asyncio
from typing import Any

import numpy as np
import pytest

from agentrl_core.api import ArrayBucket, PolicySpan, SamplingParams, WeightUpdate, map_safetensors
from agentrl_core.api.errors import EngineError
from agentrl_engine_sglang.engine import SGLangEngine

from .conftest import Models, generate_all, make_prompts, reference_log_probs, worst_gap

PROMPT = list(range(40))


def as_buckets(files: tuple[str, ...], parts: int = 3) -> WeightUpdate:
    """The tensors of safetensors files, in buckets as the trainer sends them."""
    (whole,) = (map_safetensors(path) for path in files)
    tensors = list(whole.tensors())
    buckets = []
    for part in range(parts):
        names, shapes, dtypes, data = zip(*tensors[part::parts], strict=True)
        buckets.append(ArrayBucket(names, shapes, dtypes, np.concatenate(data)))
    return WeightUpdate(buckets)


class Case:
    """An engine, its road, and models of its kind: the output layer is tied on one road, and not on the other."""

    def __init__(self, road: str, engine: SGLangEngine, models: Models) -> None:
        self.road = road
        self.engine = engine
        self.tied = road == "files"
        self._models = models

    def files(self, seed: int) -> tuple[str, ...]:
        return self._models.files(seed, self.tied)

    def module(self, seed: int) -> Any:
        return self._models.module(seed, self.tied)


@pytest.fixture(scope="module", params=["files", "tensors", "group"])
def case(request, serve, models) -> Case:
    return Case(request.param, serve(request.param), models)


@pytest.fixture
def engine(case):
    return case.engine


@pytest.fixture(autouse=True)
def fresh(case, run):
    """Every test begins with the weights of seed 0 as version 0."""
    run(case.engine.update_weights(WeightUpdate(files=case.files(0)), 0))


async def update_and_generate(engine, update_of):
    outputs = []
    for version in range(1, 11):
        await engine.update_weights(update_of(version), version)
        # The same session and the same prompt: a stale cache would show.
        outputs.append(await engine.generate(PROMPT, SamplingParams(16), "s"))
    return outputs


@pytest.mark.parametrize("form", ["files", "buckets"])
def test_after_each_update_the_output_is_the_new_models(engine, case, run, form) -> None:
    def update_of(version: int) -> WeightUpdate:
        files = case.files(version)
        return WeightUpdate(files=files) if form == "files" else as_buckets(files)

    outputs = run(update_and_generate(engine, update_of))
    for version, output in enumerate(outputs, start=1):
        assert worst_gap(case.module(version), [PROMPT], [output]) <= 2e-5
        assert output.spans == [PolicySpan(version, 0, 16)]


def test_only_tied_weights_may_come_under_the_output_layers_name(engine, case, run) -> None:
    (bucket,) = as_buckets(case.files(3), parts=1)
    tensors = [item for item in bucket.tensors() if item[0] != "lm_head.weight"]
    names, shapes, dtypes, data = zip(*tensors, strict=True)
    names = tuple("lm_head.weight" if "embed" in name else name for name in names)
    renamed = ArrayBucket(names, shapes, dtypes, np.concatenate(data))
    if not case.tied:
        with pytest.raises(EngineError, match="model.embed_tokens.weight: missing"):
            run(engine.update_weights(WeightUpdate([renamed]), 3))
        return
    run(engine.update_weights(WeightUpdate([renamed]), 3))
    output = run(engine.generate(PROMPT, SamplingParams(16), "s"))
    assert worst_gap(case.module(3), [PROMPT], [output]) <= 2e-5


@pytest.mark.parametrize("paused", [True, False], ids=["keep", "unpaused"])
def test_requests_in_flight_go_on_with_the_new_weights(engine, case, run, paused) -> None:
    prompts = make_prompts(32, 5, 30)

    async def main():
        tasks = [asyncio.create_task(engine.generate(p, SamplingParams(200), f"r{i}")) for i, p in enumerate(prompts)]
        # When this one has its tokens, so have the others.
        await engine.generate([1], SamplingParams(20), "clock")
        if paused:
            await engine.pause("keep")
        await engine.update_weights(WeightUpdate(files=case.files(1)), 1)
        if paused:
            late = asyncio.create_task(engine.generate([5], SamplingParams(3), "late"))
            await asyncio.sleep(0)
            await engine.resume()
            assert (await late).spans == [PolicySpan(1, 0, 3)]
        return await asyncio.gather(*tasks)

    outputs = run(main())
    for prompt, output in zip(prompts, outputs, strict=True):
        assert (output.finish_reason, len(output.token_ids)) == ("length", 200)
        old, new = output.spans
        assert (old.version, old.start, new.version, new.end) == (0, 0, 1, 200)
        assert 0 < old.end == new.start < 200
        head = reference_log_probs(case.module(0), prompt, output.token_ids[: old.end])
        tail = reference_log_probs(case.module(1), [*prompt, *output.token_ids[: old.end]], output.token_ids[old.end :])
        assert output.log_probs == pytest.approx([*head, *tail], abs=1e-4)


def test_wrong_weights_are_named_and_nothing_changes(engine, case, run) -> None:
    (bucket,) = as_buckets(case.files(1), parts=1)
    names = tuple("model.norms.weight" if name == "model.norm.weight" else name for name in bucket.names)
    shapes = tuple(
        shape[::-1] if "layers.0.mlp.up_proj" in name else shape
        for name, shape in zip(names, bucket.shapes, strict=True)
    )
    wrong = ArrayBucket(names, shapes, bucket.dtypes, bucket.data)
    with pytest.raises(EngineError) as caught:
        run(engine.update_weights(WeightUpdate([wrong]), 1))
    message = str(caught.value)
    assert "model.norms.weight: the model has no such tensor (nearest: model.norm.weight)" in message
    assert "model.norm.weight: missing" in message
    assert "up_proj.weight: shape [128, 256] was given, the model has [256, 128]" in message
    output = run(engine.generate(PROMPT, SamplingParams(16), "s"))
    assert output.spans == [PolicySpan(0, 0, 16)]
    assert worst_gap(case.module(0), [PROMPT], [output]) <= 2e-5


def test_pause_and_sleep(engine, case, run) -> None:
    async def main():
        running = asyncio.create_task(generate_all(engine, make_prompts(8), SamplingParams(200)))
        await engine.generate([1], SamplingParams(8), "clock")
        await engine.pause("keep")
        held = asyncio.create_task(engine.generate([1], SamplingParams(3), "held"))
        with pytest.raises(EngineError, match="8 paused requests"):
            await engine.sleep(1)
        aborted = await engine.abort("r0")
        assert aborted is not None and aborted.finish_reason == "abort"
        await engine.resume()
        await engine.pause("drain")
        outputs = await running
        assert [len(output.token_ids) for output in outputs[1:]] == [200] * 7
        await engine.resume()
        assert len((await held).token_ids) == 3

        running = asyncio.create_task(generate_all(engine, make_prompts(8), SamplingParams(200)))
        await engine.generate([1], SamplingParams(8), "clock")
        await engine.pause("abort")
        ended = await running
        assert {output.finish_reason for output in ended} == {"abort"}
        await engine.resume()

        for level in (1, 2):
            await engine.sleep(level)
            asleep = asyncio.create_task(engine.generate([1], SamplingParams(3), "asleep"))
            await engine.wake_up(["weights"])
            assert not asleep.done()
            await engine.wake_up(["kv_cache"])
            assert len((await asleep).token_ids) == 3
        return outputs[1:], ended

    outputs, ended = run(main())
    assert worst_gap(case.module(0), make_prompts(8)[1:], outputs) <= 2e-5
    assert worst_gap(case.module(0), make_prompts(8), ended) <= 2e-5
