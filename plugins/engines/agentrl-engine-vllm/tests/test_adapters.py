"""LoRA adapters, over a stand-in for vLLM."""

import asyncio
import re
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from agentrl_core.api import (
    ArrayBucket,
    EngineContext,
    LoraAdapter,
    PolicySpan,
    SamplingParams,
    WeightUpdate,
)
from agentrl_core.api.errors import EngineError
from agentrl_core.engine_kit import memory_files
from agentrl_core.engine_kit.adapter_tensors import tensor_names
from agentrl_engine_vllm.config import VLLMConfig
from agentrl_engine_vllm.launch import engine_arguments

ADAPTER = LoraAdapter(4, 8, ("q_proj", "model.layers.0.mlp.down_proj"), use_rslora=True)


@pytest.fixture
def weights(model_path) -> WeightUpdate:
    return WeightUpdate(files=(f"{model_path}/model.safetensors",))


@pytest.fixture
def tensors(model_path) -> dict[str, np.ndarray]:
    """Those of ADAPTER."""
    rng = np.random.default_rng(0)
    found = {}
    for name, tensor in load_file(f"{model_path}/model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith((".q_proj", "layers.0.mlp.down_proj")):
            a, b = tensor_names(module)
            found[a] = rng.normal(size=(4, tensor.shape[1])).astype(np.float32)
            found[b] = rng.normal(size=(tensor.shape[0], 4)).astype(np.float32)
    return found


def bucket(tensors: dict[str, np.ndarray]) -> ArrayBucket:
    data = np.concatenate([array.reshape(-1).view(np.uint8) for array in tensors.values()])
    shapes = tuple(array.shape for array in tensors.values())
    return ArrayBucket(tuple(tensors), shapes, ("float32",) * len(tensors), data)


@pytest.fixture
def update(tensors) -> WeightUpdate:
    return WeightUpdate([bucket(tensors)], adapter=ADAPTER)


def last() -> Any:
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.last


@pytest.mark.parametrize(("wanted", "given"), [(1, 1), (2, 8), (12, 16), (257, 320), (512, 512)])
def test_vllm_makes_room_for_the_next_rank_that_it_knows(wanted, given) -> None:
    arguments = engine_arguments(VLLMConfig(max_lora_rank=wanted), EngineContext("m"), {})
    assert [arguments[name] for name in ("enable_lora", "max_loras", "max_lora_rank")] == [True, 1, given]


def test_without_the_option_there_are_no_adapters(serve, run, update) -> None:
    assert not any("lora" in name for name in engine_arguments(VLLMConfig(), EngineContext("m"), {}))

    async def main() -> None:
        async with serve() as engine:
            with pytest.raises(EngineError, match="set rollout.engine.config.max_lora_rank to 4 or more"):
                await engine.update_weights(update, 1)
            output = await engine.generate([1], SamplingParams(3), "r")
            assert output.spans == [PolicySpan(0, 0, 3)]
            assert last().lora_requests == [None]
            assert last().calls == [("agentrl_score_whole_distribution",)]

    run(main())


def test_an_engine_begins_with_an_adapter_that_changes_nothing(serve, run) -> None:
    async def main() -> None:
        async with serve(max_lora_rank=4) as engine:
            await engine.generate([1], SamplingParams(3), "r")
            config, tensors = last().adapter
            assert (config["r"], len(tensors)) == (1, 2)
            assert not any(array.any() for array in tensors.values())

    run(main())


@pytest.mark.parametrize("road", ["buckets", "files"])
def test_an_adapter_reaches_vllm_as_peft_saves_it(serve, run, update, tensors, tmp_path, monkeypatch, road) -> None:
    monkeypatch.setattr(memory_files, "MEMORY", tmp_path)
    if road == "files":
        names = list(tensors)
        files = tuple(str(tmp_path / f"{part}.safetensors") for part in range(2))
        for part, path in enumerate(files):
            save_file({name: tensors[name] for name in names[part::2]}, path)
        update = WeightUpdate(files=files, adapter=ADAPTER)

    async def main() -> None:
        async with serve(max_lora_rank=4) as engine:
            last().calls.clear()
            await engine.update_weights(update, 7)
            assert last().calls == [("pause", "keep", True), ("adapter", 1), ("resume",)]
            output = await engine.generate([1], SamplingParams(3), "r")
            assert output.spans == [PolicySpan(7, 0, 3)]

    run(main())
    config, loaded = last().adapter
    assert config == {
        "peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": True, "bias": "none",
        "target_modules": list(ADAPTER.target_modules),
    }  # fmt: skip
    assert loaded.keys() == tensors.keys()
    assert all(np.array_equal(loaded[name], tensors[name]) for name in tensors)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_all_requests_name_the_same_adapter(serve, run, update, weights) -> None:
    async def main() -> None:
        async with serve(max_lora_rank=4) as engine:
            for version, each in enumerate((update, weights, update), 1):
                await engine.generate([1], SamplingParams(3), "r")
                await engine.update_weights(each, version)
            await engine.generate([1], SamplingParams(3), "r")
            requests = last().lora_requests
            assert len(requests) == 4 and len(set(requests)) == 1
            assert not requests[0].load_inplace

    run(main())


def test_what_runs_goes_on_with_the_adapter(serve, run, update) -> None:
    async def main() -> Any:
        async with serve(max_lora_rank=4) as engine:
            last().most_tokens = 5
            task = asyncio.create_task(engine.generate([1], SamplingParams(60), "r"))
            for _ in range(10):
                await asyncio.sleep(0)
            await engine.update_weights(update, 7)
            return await task

    old, new = run(main()).spans
    assert (old.version, new.version, new.end) == (0, 7, 60)


def test_weights_of_the_model_take_the_adapter_away(serve, run, update, weights) -> None:
    async def main() -> None:
        async with serve(max_lora_rank=4) as engine:
            await engine.update_weights(update, 1)
            last().calls.clear()
            await engine.update_weights(weights, 2)
            assert last().calls == [("pause", "keep", True), ("weights", "2"), ("adapter", 1), ("resume",)]
            assert not any(array.any() for array in last().adapter[1].values())

    run(main())


def test_what_is_wrong_is_named_and_nothing_is_sent(serve, run, tensors) -> None:
    first, *rest = tensors
    wrong = {
        f"{first}: missing": ({name: tensors[name] for name in rest}, ADAPTER),
        "rank 4: the highest allowed is 3 (rollout.engine.config.max_lora_rank)": (tensors, ADAPTER),
        "target module k_proj: the engine cannot adapt it; it can down_proj, q_proj, v_proj": (
            tensors,
            LoraAdapter(4, 8, (*ADAPTER.target_modules, "k_proj")),
        ),
    }

    async def main() -> None:
        async with serve(max_lora_rank=3) as engine:
            last().calls.clear()
            for message, (given, adapter) in wrong.items():
                with pytest.raises(EngineError, match=re.escape(message)):
                    await engine.update_weights(WeightUpdate([bucket(given)], adapter=adapter), 1)
            assert not last().calls
            assert (await engine.generate([1], SamplingParams(3), "r")).spans == [PolicySpan(0, 0, 3)]

    run(main())


def test_an_adapter_that_fails_half_way_ends_the_engine(serve, run, update) -> None:
    async def main() -> None:
        async with serve(max_lora_rank=4) as engine:
            last().bad_update = True
            with pytest.raises(EngineError, match="weights 1: size mismatch in a worker; .* started anew"):
                await engine.update_weights(update, 1)
            with pytest.raises(EngineError, match="after an update to weights 1 that failed"):
                await engine.health()

    run(main())


def test_without_weights_there_is_nothing_to_adapt(serve, run, update, weights) -> None:
    async def main() -> None:
        async with serve(max_lora_rank=4) as engine:
            await engine.sleep(2)
            await engine.wake_up()
            with pytest.raises(EngineError, match=r"gone since sleep\(2\): they must come before an adapter"):
                await engine.update_weights(update, 1)
            await engine.update_weights(weights, 1)
            await engine.update_weights(update, 2)
            assert (await engine.generate([1], SamplingParams(3), "r")).spans == [PolicySpan(2, 0, 3)]

    run(main())


def test_a_model_that_vllm_cannot_adapt_does_not_start(make_engine, run, monkeypatch, stand_in) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    monkeypatch.setattr(AsyncLLM, "workers", ((), ()))
    with pytest.raises(EngineError, match="max_lora_rank: vLLM can adapt no layer of this model; set it to 0"):
        run(make_engine(max_lora_rank=4).start())
    assert last().calls[-1] == ("shutdown",)
