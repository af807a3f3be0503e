"""The experts that tokens were sent to, against the router logits of transformers for each sequence alone."""

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl_core.api import SamplingParams
from agentrl_core.api.errors import ConfigError
from agentrl_engine_hf.config import HFEngineConfig

EXPERTS, CHOSEN, VOCAB = 6, 2, 200


def in_loop(test: Callable[..., Any]) -> Callable[..., None]:
    """A test that is a coroutine."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


@pytest.fixture(scope="module")
def experts() -> Any:
    """Three layers, of which the second one has no experts."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, initializer_range=0.3, num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN, moe_intermediate_size=16, mlp_only_layers=[1], eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config).eval()


def expected_of(module: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    """[tokens - 1, 3, CHOSEN], sorted; zeros for the layer without experts."""
    with torch.no_grad():
        logits = module(torch.tensor([ids[:-1]]), output_router_logits=True).router_logits
    first, last = (each.view(-1, EXPERTS).topk(CHOSEN).indices.sort(-1).values for each in logits)
    return torch.stack([first, torch.zeros_like(first), last], 1).numpy()


def check(module: Any, prompt: list[int], output: Any) -> None:
    found = output.routed_experts
    assert found.shape == (len(prompt) + len(output.token_ids) - 1, 3, CHOSEN)
    np.testing.assert_array_equal(np.sort(found, -1), expected_of(module, [*prompt, *output.token_ids]))


@pytest.mark.parametrize("shared", [True, False])
@in_loop
async def test_they_are_those_of_each_sequence_alone(
    experts: Any, serve: Callable[..., Any], prompts: Callable[..., Any], tmp_path: Any, shared: bool
) -> None:
    """Prompts of many lengths, some twice, in chunks, with few rows, which therefore move; ends at different times."""
    experts.save_pretrained(tmp_path)
    context = {"module": experts} if shared else {"model_path": str(tmp_path)}
    config = HFEngineConfig(max_num_seqs=5, max_prefill_tokens=32)
    wanted = [*prompts(9, 2, 40), *(2 * prompts(2, 30, 30, seed=1)), *(3 * prompts(1, 5, 9, seed=2))]
    async with serve(config=config, routed_experts=True, **context) as engine:
        outputs = await asyncio.gather(*(
            engine.generate(prompt, SamplingParams(3 + 5 * (number % 4), seed=number), f"s{number}")
            for number, prompt in enumerate(wanted)
        ))  # fmt: skip
    for prompt, output in zip(wanted, outputs, strict=True):
        check(experts, prompt, output)


@in_loop
async def test_turns_of_a_session_have_those_of_the_turns_before(
    experts: Any, serve: Callable[..., Any], prompts: Callable[..., Any]
) -> None:
    outputs = []
    async with serve(experts, routed_experts=True) as engine:

        async def session(number: int, prompt: list[int]) -> None:
            await engine.open_session(f"s{number}")
            for turn in range(3):
                output = await engine.generate(prompt, SamplingParams(4 + number, seed=turn), f"s{number}")
                outputs.append((prompt, output))
                prompt = [*prompt, *output.token_ids, *prompts(1, 3, 6, seed=turn)[0]]
            await engine.close_session(f"s{number}")

        await asyncio.gather(*(session(number, prompt) for number, prompt in enumerate(prompts(4, 5, 20))))
    for prompt, output in outputs:
        check(experts, prompt, output)


@in_loop
async def test_what_is_aborted_has_those_of_its_tokens(experts: Any, serve: Callable[..., Any]) -> None:
    async with serve(experts, routed_experts=True) as engine:
        running = asyncio.create_task(engine.generate([5, 6, 7], SamplingParams(200, seed=1), "s"))
        while (output := await engine.abort("s")) is None or not output.token_ids:
            await asyncio.sleep(0.01)
            if running.done():
                running = asyncio.create_task(engine.generate([5, 6, 7], SamplingParams(200, seed=1), "s"))
        check(experts, [5, 6, 7], await running)


@in_loop
async def test_without_being_asked_there_are_none(experts: Any, serve: Callable[..., Any]) -> None:
    async with serve(experts) as engine:
        output = await engine.generate([5, 6, 7], SamplingParams(2, seed=1), "s")
    assert output.routed_experts is None


@in_loop
async def test_a_model_without_experts_is_refused(model: Any, serve: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="has no routers that choose experts"):
        async with serve(model, routed_experts=True):
            pass
