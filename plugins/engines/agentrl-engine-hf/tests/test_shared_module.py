import asyncio

import pytest
import torch

from agentrl_core.api import PolicySpan, SamplingParams, WeightUpdate


def test_the_engine_generates_with_the_module_itself(qwen3, serve, reference_log_probs) -> None:
    module = qwen3()

    async def main():
        async with serve(module) as engine:
            before = await engine.generate([1, 2, 3], SamplingParams(10, seed=0), "s")
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(0.02 * torch.randn_like(parameter))
            await engine.update_weights(WeightUpdate(shared=True), 1)
            return before, await engine.generate([1, 2, 3], SamplingParams(10, seed=0), "s")

    before, after = asyncio.run(main())
    assert after.token_ids != before.token_ids
    assert after.spans == [PolicySpan(1, 0, 10)]
    assert after.log_probs == pytest.approx(reference_log_probs(module, [1, 2, 3], after.token_ids), abs=2e-5)


def test_training_flags_are_given_back_and_dropout_is_off(qwen3, serve, reference_log_probs) -> None:
    module = qwen3(attention_dropout=0.5).train()
    module.model.layers[0].eval()
    flags = [part.training for part in module.modules()]

    async def main():
        async with serve(module) as engine:
            assert [part.training for part in module.modules()] == flags
            output = await engine.generate([1, 2, 3], SamplingParams(10, seed=0), "s")
            assert [part.training for part in module.modules()] == flags
            return output

    output = asyncio.run(main())
    module.eval()
    assert output.log_probs == pytest.approx(reference_log_probs(module, [1, 2, 3], output.token_ids), abs=2e-5)


def test_during_a_pause_the_module_can_train(qwen3, serve, gate) -> None:
    module = qwen3().train()

    async def main():
        async with serve(module) as engine:
            held = gate(module, 3)
            task = asyncio.create_task(engine.generate([1, 2, 3], SamplingParams(10, seed=0), "s"))
            await held.command(engine.pause("keep"))
            assert module.training
            module(torch.tensor([[1, 2, 3]])).logits.sum().backward()
            assert module.get_input_embeddings().weight.grad is not None
            await engine.resume()
            return await task

    assert len(asyncio.run(main()).token_ids) == 10
    assert module.training
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_a_module_whose_forward_writes_buffers_can_train_afterwards(qwen3, serve) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    module = qwen3(max_position_embeddings=16, rope_parameters=rope)
    before = module.model.rotary_emb.inv_freq.clone()

    async def main():
        async with serve(module) as engine:
            return await engine.generate([1] * 20, SamplingParams(10, seed=0), "s")

    assert len(asyncio.run(main()).token_ids) == 10
    assert not torch.equal(module.model.rotary_emb.inv_freq, before)
    module(torch.tensor([[1] * 25])).logits.sum().backward()
    assert module.get_input_embeddings().weight.grad is not None
