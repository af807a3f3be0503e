import asyncio
import statistics

import pytest
import torch

from agentrl_core.api.engine import PolicySpan, SamplingParams
from agentrl_engine_hf.config import HFEngineConfig


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_those_of_a_forward(
    model, serve, prompts, generate_all, reference_log_probs, temperature
) -> None:
    async def main():
        async with serve(model) as engine:
            params = [SamplingParams(max_tokens=20 + 2 * i, temperature=temperature, seed=i) for i in range(48)]
            return await generate_all(engine, prompts(48), params)

    outputs = asyncio.run(main())
    assert sum(len(output.token_ids) for output in outputs) >= 2000
    for prompt, output in zip(prompts(48), outputs, strict=True):
        expected = reference_log_probs(model, prompt, output.token_ids, temperature)
        assert output.log_probs == pytest.approx(expected, abs=2e-5)
        assert output.spans == [PolicySpan(0, 0, len(output.token_ids))]
        assert output.finish_reason == "length"


@pytest.mark.parametrize("shape", [{}, {"num_key_value_heads": 2}, {"num_key_value_heads": 1, "head_dim": 64}])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_greedy_equals_transformers_generate(request, serve, prompts, generate_all, family, shape) -> None:
    module = request.getfixturevalue(family)(**shape)

    async def main():
        async with serve(module) as engine:
            return await generate_all(engine, prompts(6), SamplingParams(max_tokens=24, temperature=0.0))

    for prompt, output in zip(prompts(6), asyncio.run(main()), strict=True):
        ids = torch.tensor([prompt])
        generated = module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=24,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert output.token_ids == generated[0, len(prompt) :].tolist()


def test_requests_join_and_leave_a_full_batch(model, serve, prompts, generate_all, reference_log_probs) -> None:
    async def main():
        async with serve(model, HFEngineConfig(max_num_seqs=5, max_prefill_tokens=64)) as engine:
            params = [SamplingParams(max_tokens=1 + (7 * i) % 23, seed=i) for i in range(40)]
            return await generate_all(engine, prompts(40), params), engine.metrics()

    outputs, metrics = asyncio.run(main())
    assert [len(output.token_ids) for output in outputs] == [1 + (7 * i) % 23 for i in range(40)]
    sampled = sum(len(output.token_ids) for output in outputs)
    assert metrics["steps"] >= sampled / 5, "no more than five take part in a step"
    for prompt, output in zip(prompts(40), outputs, strict=True):
        assert output.log_probs == pytest.approx(reference_log_probs(model, prompt, output.token_ids), abs=2e-5)


def test_a_prompt_longer_than_the_prefill_budget_is_prefilled_in_parts(
    model, serve, prompts, generate_all, reference_log_probs
) -> None:
    long = prompts(3, 90, 120)

    async def main():
        async with serve(model, HFEngineConfig(max_prefill_tokens=16)) as engine:
            return await generate_all(engine, long, SamplingParams(max_tokens=8, seed=3))

    for prompt, output in zip(long, asyncio.run(main()), strict=True):
        assert output.log_probs == pytest.approx(reference_log_probs(model, prompt, output.token_ids), abs=2e-5)


def test_a_bounded_kv_cache_changes_no_output(model, serve, prompts, generate_all) -> None:
    params = [SamplingParams(max_tokens=100, seed=i) for i in range(6)]

    async def main(tokens):
        async with serve(model, HFEngineConfig(max_num_seqs=8, kv_cache_tokens=tokens)) as engine:
            first = await generate_all(engine, prompts(6), params)
            return first + await generate_all(engine, prompts(6, seed=1), params), engine.metrics()

    (free, free_metrics), (bounded, bounded_metrics) = asyncio.run(main(0)), asyncio.run(main(256))
    assert [output.token_ids for output in bounded] == [output.token_ids for output in free]
    assert bounded_metrics["steps"] > free_metrics["steps"]


def test_seeds_do_not_depend_on_the_composition_of_the_batch(model, serve, prompts, generate_all) -> None:
    everyone = prompts(12)
    params = [SamplingParams(max_tokens=16, seed=1000 + i) for i in range(12)]

    async def main():
        async with serve(model) as engine:
            together = await generate_all(engine, everyone, params, "together")
            alone = [(await generate_all(engine, [everyone[i]], [params[i]], f"alone{i}"))[0] for i in range(12)]
            return together, alone

    together, alone = asyncio.run(main())
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]


def test_the_samples_of_a_group_differ_and_their_prompt_is_prefilled_once(
    model, serve, prompts, generate_all, reference_log_probs
) -> None:
    group = prompts(2, 30, 30)
    expected_cached = 2 * 7 * 29

    async def main():
        async with serve(model) as engine:
            params = [SamplingParams(max_tokens=12, seed=i) for i in range(16)]
            return await generate_all(engine, [group[i // 8] for i in range(16)], params), engine.metrics()

    outputs, metrics = asyncio.run(main())
    assert (metrics["prompt_tokens"], metrics["cached_tokens"]) == (16 * 30, expected_cached)
    assert len({tuple(output.token_ids) for output in outputs}) == 16
    for i, output in enumerate(outputs):
        expected = reference_log_probs(model, group[i // 8], output.token_ids)
        assert output.log_probs == pytest.approx(expected, abs=2e-5)


def test_unseeded_requests_differ(model, serve, generate_all) -> None:
    async def main():
        async with serve(model) as engine:
            return await generate_all(engine, [[1, 2, 3]] * 4, SamplingParams(max_tokens=12))

    assert len({tuple(output.token_ids) for output in asyncio.run(main())}) == 4


def test_a_stop_token_ends_the_output_and_is_part_of_it(model, serve, prompts, generate_all) -> None:
    stop = tuple(range(0, 200, 8))

    async def main():
        async with serve(model) as engine:
            return await generate_all(
                engine, prompts(16), [SamplingParams(max_tokens=150, seed=i, stop_token_ids=stop) for i in range(16)]
            )

    outputs = asyncio.run(main())
    assert {"stop"} <= {output.finish_reason for output in outputs}
    for output in outputs:
        assert (output.token_ids[-1] in stop) == (output.finish_reason == "stop")
        assert not set(output.token_ids[:-1]) & set(stop)
        assert len(output.token_ids) == len(output.log_probs)


def test_max_tokens_is_clipped_to_the_context(model, serve, generate_all) -> None:
    async def main():
        async with serve(model, max_model_len=32) as engine:
            return await generate_all(engine, [[5] * 20, [5] * 31], SamplingParams(max_tokens=1000, seed=0))

    assert [(len(output.token_ids), output.finish_reason) for output in asyncio.run(main())] == [
        (12, "length"),
        (1, "length"),
    ]


def test_top_k_and_top_p_restrict_what_is_sampled_but_not_its_log_prob(
    model, serve, generate_all, reference_log_probs
) -> None:
    prompt = [7, 8, 9]
    with torch.no_grad():
        probs = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    order = probs.argsort(descending=True).tolist()
    nucleus = {order[0]}
    while sum(probs[i].item() for i in nucleus) < 0.5:
        nucleus.add(order[len(nucleus)])
    count = 64

    async def main():
        async with serve(model) as engine:
            params = [SamplingParams(1, top_k=2, seed=i) for i in range(count)]
            params += [SamplingParams(1, top_p=0.5, seed=i) for i in range(count)]
            params += [SamplingParams(1, seed=i) for i in range(count)]
            return await generate_all(engine, [prompt] * len(params), params)

    outputs = asyncio.run(main())
    sampled = [output.token_ids[0] for output in outputs]
    assert set(sampled[:count]) == set(order[:2])
    assert set(sampled[count : 2 * count]) <= nucleus
    assert len(set(sampled[2 * count :])) > len(nucleus)
    for output in outputs:
        assert output.log_probs == pytest.approx(reference_log_probs(model, prompt, output.token_ids), abs=2e-5)


def test_samples_follow_the_distribution(model, serve, generate_all) -> None:
    prompt, count = [3, 4, 5], 3000
    with torch.no_grad():
        probs = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    likeliest = int(probs.argmax())
    share = probs[likeliest].item()

    async def main():
        async with serve(model) as engine:
            return await generate_all(engine, [prompt] * count, [SamplingParams(1, seed=i) for i in range(count)])

    hits = [output.token_ids[0] == likeliest for output in asyncio.run(main())]
    deviation = (share * (1 - share) / count) ** 0.5
    assert abs(statistics.fmean(hits) - share) < 4 * deviation


def test_a_model_is_loaded_from_its_directory(
    qwen3, tmp_path, serve, prompts, generate_all, reference_log_probs
) -> None:
    module = qwen3(seed=4)
    module.save_pretrained(tmp_path)

    async def main():
        async with serve(model_path=str(tmp_path)) as engine:
            return await generate_all(engine, prompts(3), SamplingParams(max_tokens=8, seed=0))

    for prompt, output in zip(prompts(3), asyncio.run(main()), strict=True):
        assert output.log_probs == pytest.approx(reference_log_probs(module, prompt, output.token_ids), abs=2e-5)
