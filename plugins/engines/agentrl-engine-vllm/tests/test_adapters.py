"""Adapters on their way to vLLM, over its stand-in."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl_core.api import Adapter, AdapterSlots, ArrayBucket, EngineContext, SamplingParams, WeightUpdate
from agentrl_core.api.engine import PolicySpan
from agentrl_core.api.errors import EngineError
from agentrl_core.api.weights import map_safetensors
from agentrl_core.engine_kit.adapters import adapter_shapes, linear_modules, targeted
from agentrl_core.engine_kit.model_tensors import shapes_of
from agentrl_engine_vllm.adapters import adapter_arguments

SLOTS = AdapterSlots(names=("one", "bad"), versions=2, rank=4, targets=("q_proj", "down_proj"))
CONFIG: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": {"q_proj", "down_proj"}}


@pytest.fixture
def update(model_path) -> Any:
    """A new version of an adapter, in two buckets."""
    modules = linear_modules(shapes_of([map_safetensors(f"{model_path}/model.safetensors")]))
    shapes = adapter_shapes(CONFIG, modules)
    assert len(shapes) == 2 * len(targeted(CONFIG, modules)) == 8

    def make(name: str = "one", value: float = 1.0, **fields: Any) -> WeightUpdate:
        buckets = [
            ArrayBucket((tensor,), (shape,), ("float32",), np.full(shape, value, np.float32).reshape(-1).view(np.uint8))
            for tensor, shape in shapes.items()
        ]
        return WeightUpdate(buckets, adapter=Adapter(name, CONFIG | fields))

    return make


def last() -> Any:
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.last


def test_vllm_has_a_place_for_each_version_and_one_that_is_dropped() -> None:
    assert adapter_arguments(None, 2) == {}
    found = adapter_arguments(AdapterSlots(("a", "b"), 3, 12, ("q_proj",)), 1)
    assert found == {"enable_lora": True, "max_lora_rank": 16, "max_loras": 8, "max_cpu_loras": 8}
    with pytest.raises(EngineError, match="model.adapter.rank=600: vLLM serves ranks up to 512"):
        adapter_arguments(AdapterSlots(("a",), 1, 600, ("q_proj",)), 1)
    with pytest.raises(EngineError, match="rollout.engine.nodes=2"):
        adapter_arguments(SLOTS, 2)


def test_each_version_is_a_folder_under_a_name_of_its_own(serve, run, update) -> None:
    async def main() -> None:
        async with serve(adapters=SLOTS) as engine:
            assert last().arguments["enable_lora"]
            for version in (3, 4):
                await engine.update_weights(update(value=version), version)
            for version, asked in ((3, 3), (4, None)):
                output = await engine.generate([1], SamplingParams(3, adapter="one", version=asked), "r")
                assert output.spans == [PolicySpan(version, 0, 3)]
            assert (await engine.generate([1], SamplingParams(3), "r")).spans == [PolicySpan(0, 0, 3)]
            old, new, none = last().loras
            assert none is None
            assert len({old.lora_name, new.lora_name}) == len({old.lora_path, new.lora_path}) == 2
            assert old.lora_int_id != new.lora_int_id
            for lora, value in ((old, 3), (new, 4)):
                folder = Path(lora.lora_path)
                config = json.loads((folder / "adapter_config.json").read_text())
                assert config == CONFIG | {"target_modules": ["down_proj", "q_proj"]}
                bucket = map_safetensors(str(folder / "adapter_model.safetensors"))
                assert shapes_of([bucket]) == shapes_of(update())
                assert (np.frombuffer(bucket.data.tobytes(), np.float32) == value).all()

    run(main())
    assert not any(folder.exists() for folder in last().loaded.values())


def test_a_folder_goes_with_the_last_request_that_uses_it(serve, run, update) -> None:
    async def main() -> None:
        async with serve(adapters=SLOTS) as engine:
            await engine.update_weights(update(), 1)
            last().most_tokens = 5
            task = asyncio.create_task(engine.generate([1], SamplingParams(60, adapter="one"), "r"))
            await asyncio.sleep(0)
            for version in (2, 3, 4):
                await engine.update_weights(update(), version)
            await asyncio.sleep(0.01)
            # The second one was dropped, and nobody used it.
            assert sorted(last().loaded) == [1, 3, 4]
            with pytest.raises(ValueError, match="'one' has no version 1 .*there are: 3, 4"):
                await engine.generate([1], SamplingParams(1, adapter="one", version=1), "late")
            folder = last().loaded[1]
            await engine.abort("r")
            assert (await task).spans == [PolicySpan(1, 0, 5)]
            await asyncio.sleep(0.01)
            assert sorted(last().loaded) == [3, 4] and not folder.exists()

    run(main())


def test_what_does_not_fit_is_refused_and_leaves_nothing(serve, run, update) -> None:
    async def main() -> None:
        async with serve(adapters=SLOTS) as engine:
            await engine.update_weights(update(), 1)
            with pytest.raises(EngineError, match="adapter 'bad': the vllm engine refuses it: not supported here"):
                await engine.update_weights(update("bad"), 2)
            with pytest.raises(EngineError, match="r is 5; allowed: 1 to 4"):
                await engine.update_weights(update(r=5), 2)
            with pytest.raises(EngineError, match="takes adapters as buckets or files only"):
                await engine.update_weights(WeightUpdate(shared=True, adapter=Adapter("one", CONFIG)), 2)
            with pytest.raises(ValueError, match="'bad' has no version yet"):
                await engine.generate([1], SamplingParams(1, adapter="bad"), "r")
            (folder,) = last().loaded.values()
            assert list(folder.parent.iterdir()) == [folder]

    run(main())


def test_the_models_own_weights_stay(serve, run, model_path) -> None:
    """Also in the deepest sleep: nobody would send them again."""

    async def main() -> None:
        async with serve(adapters=SLOTS) as engine:
            with pytest.raises(EngineError, match="was started for adapters"):
                await engine.update_weights(WeightUpdate(files=(f"{model_path}/model.safetensors",)), 1)
            await engine.sleep(2)
            assert last().calls[-1] == ("sleep", 1)
            await engine.wake_up()
            await engine.generate([1], SamplingParams(1), "r")

    run(main())


def test_an_engine_without_adapters_says_so(serve, run, update) -> None:
    async def main() -> None:
        async with serve() as engine:
            assert "enable_lora" not in last().arguments
            with pytest.raises(EngineError, match="none, it was started without"):
                await engine.update_weights(update(), 1)
            with pytest.raises(ValueError, match="the engine has no adapters"):
                await engine.generate([1], SamplingParams(1, adapter="one"), "r")

    run(main())
    assert EngineContext("m").adapters is None
