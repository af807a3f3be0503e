"""Adapters on their way to an SGLang server, over its stand-in."""

import asyncio
from typing import Any

import numpy as np
import pytest

from agentrl_core.api import Adapter, AdapterSlots, ArrayBucket, EngineContext, SamplingParams, WeightUpdate
from agentrl_core.api.engine import PolicySpan
from agentrl_core.api.errors import EngineError
from agentrl_core.api.weights import map_safetensors
from agentrl_core.engine_kit.adapters import adapter_shapes, linear_modules
from agentrl_core.engine_kit.model_tensors import shapes_of
from agentrl_engine_sglang.config import SGLangConfig
from agentrl_engine_sglang.launch import server_arguments

SLOTS = AdapterSlots(names=("one", "bad"), versions=2, rank=4, targets=("q_proj", "down_proj"))
CONFIG: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}


@pytest.fixture
def update(model_path) -> Any:
    modules = linear_modules(shapes_of([map_safetensors(f"{model_path}/model.safetensors")]))
    shapes = adapter_shapes(CONFIG, modules)
    count = sum(int(np.prod(shape)) for shape in shapes.values())
    data = np.ones(count, np.float32).view(np.uint8)
    bucket = ArrayBucket(tuple(shapes), tuple(shapes.values()), ("float32",) * len(shapes), data)
    return lambda name="one", **fields: WeightUpdate([bucket], adapter=Adapter(name, CONFIG | fields))


def test_the_server_is_started_for_rank_targets_and_versions() -> None:
    def arguments(**context: Any) -> dict[str, Any]:
        return server_arguments(SGLangConfig(keep_weights_asleep=False), EngineContext("m", **context), "m", 1)

    found = arguments(adapters=SLOTS)
    expected = {
        "enable_lora": True, "max_lora_rank": 4, "lora_target_modules": ["q_proj", "down_proj"],
        "max_loras_per_batch": 7, "lora_backend": "torch_native",
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    on_gpu = arguments(adapters=SLOTS, device="cuda")
    assert on_gpu["enable_weights_cpu_backup"] and "lora_backend" not in on_gpu
    assert not arguments(device="cuda")["enable_weights_cpu_backup"]
    assert not any("lora" in name for name in arguments())
    for name in ("nodes", "data_parallel"):
        with pytest.raises(EngineError, match=f"rollout.engine.{name}=2: .* set it to 1"):
            arguments(adapters=SLOTS, **{name: 2})


def test_each_version_has_a_name_of_its_own_and_goes_with_its_last_request(serve, run, update, tmp_path) -> None:
    log = tmp_path / "log"

    def said(word: str) -> list[str]:
        return [line.split()[-1] for line in log.read_text().splitlines() if line.startswith(word)]

    async def main() -> None:
        async with serve(adapters=SLOTS, log_file=str(log)) as engine:
            with pytest.raises(ValueError, match="'one' has no version yet"):
                await engine.generate([1], SamplingParams(1, adapter="one"), "r")
            await engine.update_weights(update(), 3)
            long = asyncio.create_task(engine.generate([1], SamplingParams(90, adapter="one"), "long"))
            await asyncio.sleep(0.02)
            for version in (4, 5, 6):
                await engine.update_weights(update(), version)
            for version, asked in ((5, 5), (6, None)):
                output = await engine.generate([1], SamplingParams(3, adapter="one", version=asked), "r")
                assert output.spans == [PolicySpan(version, 0, 3)]
            assert (await engine.generate([1], SamplingParams(3), "r")).spans == [PolicySpan(0, 0, 3)]
            with pytest.raises(ValueError, match="'one' has no version 3 .*there are: 5, 6"):
                await engine.generate([1], SamplingParams(3, adapter="one", version=3), "r")
            assert not long.done()
            assert (await long).spans == [PolicySpan(3, 0, 90)]
            while len(said("unloaded")) < 2:
                await asyncio.sleep(0.01)

    run(main())
    assert said("loaded") == ["one-1", "one-2", "one-3", "one-4"]
    assert said("answered") == ["one-3", "one-4", "None", "one-1"]
    assert said("unloaded") == ["one-2", "one-1"]


def test_what_does_not_fit_is_refused(serve, run, update, model_path) -> None:
    async def main() -> None:
        async with serve(adapters=SLOTS) as engine:
            for bad, words in (
                (update("bad"), "adapter 'bad': the sglang engine refuses it: .*: not supported here"),
                (update(r=5), "r is 5; allowed: 1 to 4"),
                (WeightUpdate(shared=True, adapter=Adapter("one", CONFIG)), "takes adapters as buckets or files only"),
                (WeightUpdate(files=(f"{model_path}/model.safetensors",)), "was started for adapters"),
            ):
                with pytest.raises(EngineError, match=words):
                    await engine.update_weights(bad, 2)
            await engine.update_weights(update(), 2)
            output = await engine.generate([1], SamplingParams(1, adapter="one"), "r")
            assert output.spans == [PolicySpan(2, 0, 1)]

    run(main())
