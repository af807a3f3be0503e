"""LoRA adapters in a real vLLM, judged by transformers with merged weights."""

import asyncio
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_core.api import EngineError, LoraAdapter, PolicySpan, SamplingParams, WeightUpdate
from agentrl_core.engine_kit.adapter_tensors import tensor_names
from agentrl_core.engine_kit.memory_files import write_safetensors
from agentrl_engine_vllm.config import VLLMConfig
from agentrl_engine_vllm.engine import VLLMEngine
from agentrl_engine_vllm.launch import CPU_BLOCK_SIZE
from tests_real.engine_suite import (
    LONG,
    TOLERANCE,
    Case,
    Models,
    bucket_of,
    generate_all,
    largest_gap,
    log_probs,
    make_prompts,
)

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS = {
    1: LoraAdapter(8, 16, ALL_LINEAR),
    # A rank that vLLM has no room of its own for, and layers that it fuses with others that have no adapter.
    2: LoraAdapter(12, 8, ("q_proj", "v_proj", "up_proj", "model.layers.0.mlp.down_proj"), use_rslora=True),
}


class Policies:
    """Models with adapters, by the seed of the model and the number of the adapter."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self._merged: dict[tuple[int, int], Any] = {}

    def tensors(self, number: int) -> dict[str, np.ndarray]:
        """Of the adapter, under PEFT's names."""
        adapter, rng = ADAPTERS[number], np.random.default_rng(number)
        found: dict[str, np.ndarray] = {}
        for name, shape, *_ in self.models.tensors():
            module = name.removesuffix(".weight")
            if any(module == target or module.endswith(f".{target}") for target in adapter.target_modules):
                a, b = tensor_names(module)
                found[a] = rng.normal(0.0, 0.05, (adapter.rank, shape[1])).astype(np.float32)
                found[b] = rng.normal(0.0, 0.05, (shape[0], adapter.rank)).astype(np.float32)
        return found

    def update(self, number: int, drop: str = "") -> WeightUpdate:
        """The adapter in two buckets, those of ``drop`` left out."""
        tensors = [
            (name, array.shape, "float32", array.reshape(-1).view(np.uint8))
            for name, array in self.tensors(number).items()
            if name != drop
        ]
        return WeightUpdate([bucket_of(tensors[::2]), bucket_of(tensors[1::2])], adapter=ADAPTERS[number])

    def module(self, seed: int, number: int) -> Any:
        """W + scaling * B A; number 0 is the model as it is."""
        if not number:
            return self.models.module(seed)
        if (seed, number) not in self._merged:
            module = self._merged[seed, number] = copy.deepcopy(self.models.module(seed))
            tensors = {name: torch.from_numpy(array) for name, array in self.tensors(number).items()}
            for name, parameter in module.named_parameters():
                a, b = tensor_names(name.removesuffix(".weight"))
                if a in tensors:
                    parameter.data += ADAPTERS[number].scaling * tensors[b] @ tensors[a]
        return self._merged[seed, number]


@pytest.fixture(scope="module")
def policies(models: Models) -> Policies:
    return Policies(models)


@pytest.fixture(scope="module")
def case(policies: Policies, run: Any) -> Iterator[Case]:
    config = VLLMConfig(max_lora_rank=12, engine_args={"max_num_batched_tokens": 256})
    engine = VLLMEngine(config, policies.models.context())
    run(engine.start())
    yield Case(engine, policies.models)
    run(engine.close())


@pytest.fixture
def engine(case: Case, run: Any) -> VLLMEngine:
    """Every test begins with the weights of seed 0 as version 0."""
    run(case.engine.update_weights(case.models.files(), 0))
    return case.engine


def test_log_probs_are_those_of_the_merged_weights(engine, policies, run) -> None:
    prompts = make_prompts(24)
    for number in (0, 1, 2, 1):
        if number:
            run(engine.update_weights(policies.update(number), number))
        merged = policies.module(0, number)
        outputs = run(generate_all(engine, prompts, SamplingParams(max_tokens=24)))
        assert sum(len(output.token_ids) for output in outputs) == 24 * 24 >= 500
        assert {span.version for output in outputs for span in output.spans} == {number}
        assert largest_gap(merged, prompts, outputs) <= TOLERANCE
        # It is no small change that the tolerance would hide.
        assert all(largest_gap(policies.module(0, other), prompts, outputs) > 0.5 for other in {0, 1, 2} - {number})
        greedy = run(generate_all(engine, prompts, SamplingParams(max_tokens=16, temperature=0.0)))
        for prompt, output in zip(prompts, greedy, strict=True):
            logits = merged(torch.tensor([[*prompt, *output.token_ids]])).logits[0, len(prompt) - 1 : -1]
            assert output.token_ids == logits.argmax(-1).tolist()


def test_an_adapter_empties_the_prefix_cache_and_fills_it_anew(engine, policies, run, tmp_path) -> None:
    update = policies.update(2)
    paths = [tmp_path / f"{index}.safetensors" for index in range(2)]
    for path, bucket in zip(paths, update, strict=True):
        write_safetensors(path, bucket)
    in_files = WeightUpdate(files=tuple(map(str, paths)), adapter=update.adapter)

    async def main():
        found = []
        for version, each in enumerate((policies.update(1), in_files, policies.models.files(), policies.update(1)), 1):
            await engine.update_weights(each, version)
            engine.metrics()
            outputs = [await engine.generate(LONG, SamplingParams(16), "s") for _ in range(2)]
            found.append((outputs, engine.metrics()["cached_tokens"]))
        return found

    for version, (number, (outputs, cached)) in enumerate(zip((1, 2, 0, 1), run(main()), strict=True), 1):
        assert largest_gap(policies.module(0, number), [LONG] * 2, outputs) <= TOLERANCE
        assert all(output.spans == [PolicySpan(version, 0, 16)] for output in outputs)
        assert cached == (len(LONG) - 1) // CPU_BLOCK_SIZE * CPU_BLOCK_SIZE


@pytest.mark.parametrize("paused", [True, False], ids=["keep", "unpaused"])
def test_what_runs_goes_on_with_the_newest(engine, policies, run, paused) -> None:
    prompts = make_prompts(16, 5, 30)
    # Model without adapter, with one, with another one, another model without.
    stages = [(0, 0), (0, 1), (0, 2), (1, 0)]
    updates = [policies.update(1), policies.update(2), policies.models.files(1)]

    async def main():
        crowd = asyncio.create_task(generate_all(engine, prompts, SamplingParams(200)))
        for version, update in enumerate(updates, 1):
            # When this one has its tokens, so have the others.
            await engine.generate([version], SamplingParams(12), "clock")
            if paused:
                await engine.pause("keep")
            await engine.update_weights(update, version)
            if paused:
                await engine.resume()
        return await crowd

    for prompt, output in zip(prompts, run(main()), strict=True):
        assert (output.finish_reason, len(output.token_ids)) == ("length", 200)
        assert [span.version for span in output.spans] == [0, 1, 2, 3]
        for span, stage in zip(output.spans, stages, strict=True):
            before = [*prompt, *output.token_ids[: span.start]]
            expected = log_probs(policies.module(*stage), before, output.token_ids[span.start : span.end])
            assert output.log_probs[span.start : span.end] == pytest.approx(expected, abs=1e-4)


def test_an_adapter_belongs_to_the_newest_weights(engine, policies, run) -> None:
    async def main():
        await engine.update_weights(policies.update(1), 1)
        await engine.update_weights(policies.models.buckets(1), 2)
        without = await engine.generate(LONG, SamplingParams(16), "s")
        await engine.update_weights(policies.update(2), 3)
        return without, await engine.generate(LONG, SamplingParams(16), "s")

    without, adapted = run(main())
    assert largest_gap(policies.module(1, 0), [LONG], [without]) <= TOLERANCE
    assert largest_gap(policies.module(1, 2), [LONG], [adapted]) <= TOLERANCE


def test_a_refused_adapter_changes_nothing(engine, policies, run) -> None:
    missing = tensor_names("model.layers.0.self_attn.q_proj")[1]
    wrong = {
        f"{missing}: missing": policies.update(1, drop=missing),
        "rank 13: the highest allowed is 12 .rollout.engine.config.max_lora_rank": WeightUpdate(
            policies.update(1).buckets, adapter=LoraAdapter(13, 16, ALL_LINEAR)
        ),
        "target module embed_tokens: the engine cannot adapt it; it can down_proj, gate_proj, k_proj": WeightUpdate(
            policies.update(1).buckets, adapter=LoraAdapter(8, 16, (*ALL_LINEAR, "embed_tokens"))
        ),
    }
    run(engine.update_weights(policies.update(2), 2))
    for message, update in wrong.items():
        with pytest.raises(EngineError, match=message):
            run(engine.update_weights(update, 3))
    output = run(engine.generate(LONG, SamplingParams(16), "s"))
    assert output.spans == [PolicySpan(2, 0, 16)]
    assert largest_gap(policies.module(0, 2), [LONG], [output]) <= TOLERANCE


def test_an_adapter_outlasts_sleep_as_long_as_the_weights_do(engine, policies, run) -> None:
    async def main():
        await engine.update_weights(policies.update(1), 1)
        await engine.sleep(1)
        await engine.wake_up()
        kept = await engine.generate(LONG, SamplingParams(16), "s")
        await engine.sleep(2)
        await engine.wake_up()
        with pytest.raises(EngineError, match=r"gone since sleep\(2\): they must come before an adapter"):
            await engine.update_weights(policies.update(2), 2)
        await engine.update_weights(policies.models.files(), 2)
        await engine.update_weights(policies.update(2), 3)
        return kept, await engine.generate(LONG, SamplingParams(16), "s")

    kept, renewed = run(main())
    assert largest_gap(policies.module(0, 1), [LONG], [kept]) <= TOLERANCE
    assert largest_gap(policies.module(0, 2), [LONG], [renewed]) <= TOLERANCE
