"""Sampling by a real vLLM, judged by transformers."""

import asyncio

import pytest
import torch

from agentrl_core.api import PolicySpan, SamplingParams, WeightUpdate

from .conftest import EOS, MAX_MODEL_LEN, VOCAB, generate_all, make_prompts, worst_gap


@pytest.fixture(scope="module")
def engine(case, run):
    run(case.engine.update_weights(WeightUpdate(files=case.files(0)), 0))
    return case.engine


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 20},
    ],
    ids=str,
)
def test_log_probs_are_those_of_transformers(engine, case, run, sampling) -> None:
    prompts = make_prompts(48)
    outputs = run(generate_all(engine, prompts, SamplingParams(max_tokens=48, **sampling)))
    assert sum(len(output.token_ids) for output in outputs) == 48 * 48 >= 2000
    assert worst_gap(case.module(), prompts, outputs, sampling["temperature"]) <= 2e-5


def test_greedy_tokens_are_those_of_transformers(engine, case, run) -> None:
    prompts = make_prompts(16, seed=1)
    outputs = run(generate_all(engine, prompts, SamplingParams(max_tokens=24, temperature=0.0)))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.token_ids) == 24
        # Each is the most likely one after those before it.
        logits = case.module()(torch.tensor([[*prompt, *output.token_ids]])).logits[0, len(prompt) - 1 : -1]
        assert output.token_ids == logits.argmax(-1).tolist()
    assert worst_gap(case.module(), prompts, outputs) <= 2e-5


def test_requests_of_every_kind_share_a_batch(engine, case, run) -> None:
    prompts = make_prompts(24, seed=2)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.5, "seed": 3},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 0.8, "top_p": 0.5},
    ]

    async def main():
        return await asyncio.gather(
            *(engine.generate(prompt, SamplingParams(32, **kinds[i % 4]), f"r{i}") for i, prompt in enumerate(prompts))
        )

    outputs = run(main())
    for number, kind in enumerate(kinds):
        gap = worst_gap(case.module(), prompts[number::4], outputs[number::4], kind["temperature"] or 1.0)
        assert gap <= 2e-5


def test_a_request_ends_at_its_own_stop_ids_only(engine, run) -> None:
    prompts = make_prompts(200, 1, 4, seed=3)
    stops = tuple(range(0, VOCAB, 5))
    assert EOS not in stops
    with_stops = run(generate_all(engine, prompts, SamplingParams(60, temperature=1.5, stop_token_ids=stops)))
    for output in with_stops:
        assert not set(output.token_ids[:-1]) & set(stops)
        if output.finish_reason == "stop":
            assert output.token_ids[-1] in stops
        else:
            assert len(output.token_ids) == 60
    # The model's own end of sequence is sampled, and does not end a request that has not asked for it.
    assert EOS in [token for output in with_stops for token in output.token_ids[:-1]]
    without = run(generate_all(engine, prompts[:64], SamplingParams(60, temperature=1.5)))
    assert {(output.finish_reason, len(output.token_ids)) for output in without} == {("length", 60)}
    assert any(EOS in output.token_ids[:-1] for output in without)


@pytest.mark.parametrize("prompt_length", [1, MAX_MODEL_LEN - 60, MAX_MODEL_LEN - 1])
def test_the_whole_context_can_be_used(engine, case, run, prompt_length) -> None:
    (prompt,) = make_prompts(1, prompt_length, prompt_length, seed=4)
    output = run(engine.generate(prompt, SamplingParams(MAX_MODEL_LEN), "whole"))
    assert len(prompt) + len(output.token_ids) == MAX_MODEL_LEN
    assert output.finish_reason == "length"
    assert worst_gap(case.module(), [prompt], [output]) <= 2e-5


def test_impossible_requests_are_refused_and_the_engine_survives(engine, run) -> None:
    one = SamplingParams(1)
    for prompt, message in (
        ([], "empty"),
        ([1] * MAX_MODEL_LEN, "no room"),
        ([VOCAB], f"token id {VOCAB} is outside"),
        ([-1], "token id -1 is outside"),
    ):
        with pytest.raises(ValueError, match=message):
            run(engine.generate(prompt, one, "r"))
    with pytest.raises(ValueError, match="max_tokens is 0"):
        run(engine.generate([1], SamplingParams(0), "r"))
    with pytest.raises(ValueError, match="top_p"):
        run(engine.generate([1], SamplingParams(1, top_p=2.0), "r"))
    assert len(run(engine.generate([1], one, "r")).token_ids) == 1
    run(engine.health())


def test_abort_returns_what_was_sampled(engine, case, run) -> None:
    prompt = [1, 2, 3]

    async def main():
        task = asyncio.create_task(engine.generate(prompt, SamplingParams(250), "r"))
        await engine.generate(prompt, SamplingParams(20), "other")
        return await engine.abort("r"), await task, await engine.abort("r"), await engine.abort("unknown")

    aborted, output, again, unknown = run(main())
    assert aborted == output
    assert output.finish_reason == "abort"
    assert 0 < len(output.token_ids) < 250
    assert output.spans == [PolicySpan(0, 0, len(output.token_ids))]
    assert worst_gap(case.module(), [prompt], [output]) <= 2e-5
    assert (again, unknown) == (None, None)


def test_a_cancelled_request_ends_in_vllm_too(engine, run) -> None:
    async def main():
        task = asyncio.create_task(engine.generate([1, 2], SamplingParams(250), "r"))
        await engine.generate([1, 2], SamplingParams(4), "other")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        again = await engine.generate([1, 2], SamplingParams(4), "r")
        await engine.pause("drain")
        await engine.resume()
        return again

    assert len(run(main()).token_ids) == 4


def test_turns_share_their_cache(engine, run) -> None:
    (prompt,) = make_prompts(1, 60, 60, seed=5)

    async def main():
        first = await engine.generate(prompt, SamplingParams(20), "s")
        engine.metrics()
        await engine.generate([*prompt, *first.token_ids, 7], SamplingParams(4), "s")
        return engine.metrics()

    metrics = run(main())
    assert metrics["prompt_tokens"] == 81
    # Whole blocks.
    assert metrics["cached_tokens"] == 64
    assert metrics["generated_tokens"] == 4
