import asyncio

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from agentrl_core.api import ArrayBucket, PolicySpan, SamplingParams, WeightUpdate
from agentrl_core.api.errors import EngineError


@pytest.mark.parametrize("tied", [True, False])
def test_after_each_update_the_output_is_the_new_models(qwen3, serve, pack, reference_log_probs, tied) -> None:
    module = qwen3(tie_word_embeddings=tied)
    prompt = list(range(40))

    async def main():
        outputs = []
        async with serve(module) as engine:
            for version in range(1, 11):
                await engine.update_weights(pack(qwen3(seed=version, tie_word_embeddings=tied)), version)
                # The same session and the same prompt: a stale cache would show.
                outputs.append(await engine.generate(prompt, SamplingParams(8, seed=0), "s"))
        return outputs

    for version, output in enumerate(asyncio.run(main()), start=1):
        expected = reference_log_probs(qwen3(seed=version, tie_word_embeddings=tied), prompt, output.token_ids)
        assert output.log_probs == pytest.approx(expected, abs=2e-5)
        assert output.spans == [PolicySpan(version, 0, 8)]


def test_tied_weights_may_come_under_either_name_or_both(qwen3, serve, pack) -> None:
    module, new = qwen3(seed=0), qwen3(seed=1)
    state = dict(new.state_dict())
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(state)

    async def main():
        async with serve(module) as engine:
            for absent in ("lm_head.weight", "model.embed_tokens.weight", ""):
                await engine.update_weights(pack({k: v for k, v in state.items() if k != absent}), 1)
                for name, tensor in module.state_dict().items():
                    assert torch.equal(tensor, state[name])

    asyncio.run(main())


def test_bfloat16_and_unaligned_read_only_bytes_are_taken(qwen3, serve, pack) -> None:
    module, new = qwen3(seed=0), qwen3(seed=1)
    update = pack(new, torch.bfloat16)
    shifted = []
    for bucket in update:
        data = np.concatenate([np.zeros(1, np.uint8), bucket.data])[1:]
        data.flags.writeable = False
        shifted.append(ArrayBucket(bucket.names, bucket.shapes, bucket.dtypes, data))

    async def main():
        async with serve(module) as engine:
            await engine.update_weights(WeightUpdate(shifted), 1)

    asyncio.run(main())
    for name, parameter in module.named_parameters():
        expected = new.get_parameter(name).to(torch.bfloat16).float()
        assert torch.equal(parameter, expected)


def test_bad_weights_are_named_and_nothing_is_written(qwen3, serve, pack) -> None:
    module = qwen3(seed=0)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state = dict(qwen3(seed=1).named_parameters())
    norm = state.pop("model.norm.weight")
    state["model.norms.weight"] = norm
    state["model.layers.0.mlp.up_proj.weight"] = state["model.layers.0.mlp.up_proj.weight"].T

    async def main():
        async with serve(module) as engine:
            with pytest.raises(EngineError) as caught:
                await engine.update_weights(pack(state), 1)
            output = await engine.generate([1, 2], SamplingParams(2, seed=0), "r")
            return str(caught.value), output

    message, output = asyncio.run(main())
    assert "model.norms.weight: the model has no such tensor (nearest: model.norm.weight)" in message
    assert "model.norm.weight: missing" in message
    assert "up_proj.weight: shape [128, 256] was given, the model has [256, 128]" in message
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert output.spans == [PolicySpan(0, 0, 2)]


def test_a_bucket_whose_bytes_do_not_add_up_is_refused(qwen3, serve, pack) -> None:
    update = pack(qwen3(seed=1))
    first, second = update.buckets
    broken = ArrayBucket(first.names, first.shapes, first.dtypes, first.data[:-4])
    strange = ArrayBucket(second.names, second.shapes, ("float33",) * len(second.names), second.data)

    async def main():
        async with serve(qwen3()) as engine:
            with pytest.raises(EngineError, match=f"bucket 0 holds {first.nbytes - 4} bytes.*need {first.nbytes}"):
                await engine.update_weights(WeightUpdate([broken, second]), 1)
            with pytest.raises(EngineError, match="bucket 1 has unknown dtypes: float33"):
                await engine.update_weights(WeightUpdate([first, strange]), 1)

    asyncio.run(main())


def test_an_update_forgets_the_cache_of_all_sessions(qwen3, serve, pack) -> None:
    module = qwen3()

    async def main():
        async with serve(module) as engine:
            await engine.generate(list(range(30)), SamplingParams(4, seed=0), "s")
            await engine.update_weights(WeightUpdate(shared=True), 1)
            engine.metrics()
            await engine.generate(list(range(30)), SamplingParams(4, seed=0), "s")
            return engine.metrics()

    assert asyncio.run(main())["cached_tokens"] == 0


def test_a_mixture_of_experts_takes_the_tensors_of_its_checkpoint(serve, pack) -> None:
    """transformers fuses the experts as it loads them, and updates have them one by one."""

    def moe(seed: int) -> Qwen3MoeForCausalLM:
        torch.manual_seed(seed)
        shape = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "head_dim": 8}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2}
        config = Qwen3MoeConfig(vocab_size=200, num_hidden_layers=2, decoder_sparse_step=1, **shape, **heads)
        return Qwen3MoeForCausalLM(config).eval()

    module = moe(0)
    checkpoints = [revert_weight_conversion(each, each.state_dict()) for each in (moe(1), moe(2))]
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in checkpoints[0]

    async def main():
        async with serve(module) as engine:
            for seed, checkpoint in enumerate(checkpoints, start=1):
                await engine.update_weights(pack(checkpoint), seed)
                expected = moe(seed).state_dict()
                assert all(torch.equal(tensor, expected[name]) for name, tensor in module.state_dict().items())
            missing = {name: tensor for name, tensor in checkpoints[0].items() if "experts.3.up" not in name}
            with pytest.raises(EngineError, match="layers.1.mlp.experts.3.up_proj.weight: missing"):
                await engine.update_weights(pack(missing), 3)
            return await engine.generate([1, 2, 3], SamplingParams(4, seed=0), "r")

    assert asyncio.run(main()).spans == [PolicySpan(2, 0, 4)]
