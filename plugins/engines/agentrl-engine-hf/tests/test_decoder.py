"""The recorded decode step: what it repeats, and when it is not used."""

import asyncio
import gc
import weakref

import pytest
import torch
from transformers import Olmo2Config, Olmo2ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from agentrl_core.api import EngineContext, SamplingParams
from agentrl_engine_hf.config import HFEngineConfig
from agentrl_engine_hf.decoder import _example
from agentrl_engine_hf.model import Model

SHAPE = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _recorded(module) -> bool:
    model = Model(EngineContext("", shared_module=module), "sdpa")
    model.new_cache()
    return bool(model._decoder._records)


def test_qwen3_qwen2_and_llama_are_recorded_and_keep_their_attention(qwen3, llama) -> None:
    for module in (qwen3(num_key_value_heads=2), llama(), Qwen2ForCausalLM(Qwen2Config(**SHAPE)).eval()):
        assert _recorded(module)
        assert module.config._attn_implementation == "sdpa"


def test_a_padding_token_does_not_prevent_the_record(qwen3) -> None:
    assert _recorded(qwen3(pad_token_id=5))
    assert _recorded(Olmo2ForCausalLM(Olmo2Config(**SHAPE | {"pad_token_id": 5})).eval())


def test_a_model_with_branches_that_a_record_would_freeze_is_not_recorded(qwen3) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert not _recorded(qwen3(rope_parameters=rope))


def test_a_module_with_foreign_parts_is_not_recorded(qwen3) -> None:
    class Foreign(torch.nn.Linear):
        """As an adapter's layer would be."""

    module = qwen3()
    layer = module.model.layers[0].mlp
    layer.down_proj = Foreign(layer.down_proj.in_features, layer.down_proj.out_features, bias=False)
    assert not _recorded(module)


async def _same(qwen3, serve, prompts, generate_all, heads: int) -> None:
    module = qwen3(num_key_value_heads=heads)
    params = [SamplingParams(max_tokens=n, seed=n, temperature=0.8) for n in (3, 24, 9, 30)]
    found = []
    for record in (True, False):
        async with serve(module, HFEngineConfig(record_decode=record)) as engine:
            found.append(await generate_all(engine, prompts(4), params))
    for left, right in zip(*found, strict=True):
        assert left.token_ids == right.token_ids
        assert left.log_probs == pytest.approx(right.log_probs, abs=1e-5)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_with_and_without_a_record_the_same_is_sampled(qwen3, serve, prompts, generate_all, heads: int) -> None:
    asyncio.run(_same(qwen3, serve, prompts, generate_all, heads))


def test_a_replaced_part_is_recorded_anew_and_its_output_is_the_new_modules(qwen3) -> None:
    module = qwen3()
    model = Model(EngineContext("", shared_module=module), "sdpa")
    model.new_cache()
    old = model._decoder._records[False]
    layer = module.model.layers[0].mlp
    layer.down_proj = torch.nn.Linear(layer.down_proj.in_features, layer.down_proj.out_features, bias=False)
    model.begin()
    assert model._decoder._records
    assert model._decoder._records[False] is not old


def test_a_hook_that_is_set_later_is_called(qwen3, serve, generate_all) -> None:
    async def main() -> int:
        module, calls = qwen3(), []
        async with serve(module) as engine:
            hook = module.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
            await generate_all(engine, [[1, 2, 3]], SamplingParams(max_tokens=8, seed=0))
            hook.remove()
        return len(calls)

    assert asyncio.run(main()) >= 8


def _kept_by_torch() -> tuple[int, int]:
    """Classes of modules, and compiled functions, which torch keeps until the process ends."""
    gc.collect()
    return len(torch.nn.Module.__subclasses__()), len(torch.jit._state._python_cu.get_functions())


def test_a_model_that_is_gone_leaves_nothing_of_its_record(qwen3) -> None:
    def record() -> weakref.ref:
        module = qwen3()
        assert _recorded(module)
        return weakref.ref(module)

    record()
    before = _kept_by_torch()
    modules = [record() for _ in range(3)]
    assert _kept_by_torch() == before
    assert all(module() is None for module in modules)


def test_weights_that_change_in_place_change_what_is_replayed(qwen3) -> None:
    model = Model(EngineContext("", shared_module=qwen3()), "sdpa")
    model.new_cache()
    inputs = _example(3, 24, model._layers, torch.float32, torch.device("cpu"), None)
    with torch.inference_mode():
        before = model._decoder.replay(inputs)
        for weight in model.module.parameters():
            weight.copy_(weight * 1.1)
        found, expected = model._decoder.replay(inputs), model._decoder.forward(*inputs)
    assert not torch.allclose(found, before)
    torch.testing.assert_close(found, expected)
