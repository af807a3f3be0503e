"""What engines must say of a model with experts: to which ones each token went."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl_core.api import SamplingParams, TokenOutput, together
from agentrl_testing.contracts.case import needs
from agentrl_testing.contracts.engine_served import PROMPTS, EngineCase, Model, Served, of_class

EXPERTS, CHOSEN, LAYERS = 8, 2, 3
"""Experts of a layer, those that a token is sent to, layers."""


class ExpertModel(Model):
    """A tiny Qwen3-MoE, and where transformers sends its tokens.

    As SGLang takes it: embeddings are not tied, and all layers have experts.
    """

    def __init__(self, seed: int) -> None:
        import torch
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = Qwen3MoeConfig(
                vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=LAYERS,
                num_attention_heads=4, num_key_value_heads=4, head_dim=32, max_position_embeddings=512,
                initializer_range=0.12, tie_word_embeddings=False, eos_token_id=None, pad_token_id=0, bos_token_id=None,
                num_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=64, norm_topk_prob=True,
            )  # fmt: skip
            self.module = Qwen3MoeForCausalLM(config).eval()

    def experts(self, ids: Sequence[int]) -> np.ndarray[Any, Any]:
        """[len(ids), LAYERS, CHOSEN], sorted."""
        import torch

        with torch.no_grad():
            layers = self.module(torch.tensor([list(ids)]), output_router_logits=True).router_logits
        chosen: np.ndarray[Any, Any] = (
            torch.stack([each.topk(CHOSEN).indices for each in layers], 1).sort(-1).values.numpy()
        )
        return chosen


class Routing(Served):
    """An engine that says where it sent its tokens."""

    model: ExpertModel

    def __init__(self, plugin: EngineCase, folder: Path) -> None:
        super().__init__(replace(plugin, context={**plugin.context, "routed_experts": True}), folder)

    def first(self) -> Model:
        return ExpertModel(0)

    def check(self, prompt: Sequence[int], output: TokenOutput, what: str) -> None:
        """The experts of an output are those of transformers, for this sequence alone."""
        found, ids = output.routed_experts, [*prompt, *output.token_ids][:-1]
        assert found is not None, f"{what}: the engine returned no routed_experts"
        shape = len(ids), LAYERS, CHOSEN
        assert found.shape == shape, f"{what}: routed_experts of shape {list(found.shape)}, expected {list(shape)}"
        differ = (np.sort(found, -1) != self.model.experts(ids)).any((1, 2)).nonzero()[0]
        assert not len(differ), (
            f"{what}: of {len(ids)} tokens those at {differ[:5].tolist()} and {len(differ[5:])} more have other experts"
        )


class ExpertCases:
    """Cases of :class:`EngineContract`."""

    @pytest.fixture
    def routing(self, request: pytest.FixtureRequest, plugin: EngineCase) -> Iterator[Routing]:
        """An engine of a model with experts, for all tests of this class, with the weights that it began with."""
        needs(plugin, "routed_experts")
        routing = of_class(request, "_routing", lambda folder: Routing(plugin, folder))
        routing.fresh()
        yield routing

    def test_experts_are_those_of_each_sequence_alone(self, routing: Routing) -> None:
        """Prompts of many lengths in one batch, each twice, so that the second may come from a cache."""
        prompts = [*PROMPTS, *PROMPTS]
        for limit in (1, 12):
            outputs = routing.run(routing.together(prompts, max_tokens=limit))
            for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
                routing.check(prompt, output, f"request {number} of {len(prompts)}, {limit} tokens")

    def test_a_later_turn_has_the_experts_of_all_its_tokens(self, routing: Routing) -> None:
        """Also of the turns before, which an engine may have cached."""

        async def turns(number: int) -> list[tuple[list[int], TokenOutput]]:
            name, prompt, done = f"session-{number}", list(PROMPTS[number]), []
            async with routing.session(name):
                for turn in range(3):
                    params = SamplingParams(max_tokens=6 + number, seed=turn)
                    done.append((prompt, await routing.engine.generate(prompt, params, name)))
                    prompt = [*prompt, *done[-1][1].token_ids, 20 + turn, 30 + number]
            return done

        async def sessions() -> list[list[tuple[list[int], TokenOutput]]]:
            return await together(turns(number) for number in range(4))

        for number, done in enumerate(routing.run(sessions())):
            for turn, (prompt, output) in enumerate(done):
                routing.check(prompt, output, f"turn {turn} of session {number}")

    def test_what_is_aborted_has_the_experts_of_its_tokens(self, routing: Routing) -> None:
        """It may be asked for again, and goes on."""
        needs(routing.plugin, "abort")

        async def main() -> TokenOutput:
            long = asyncio.ensure_future(routing.generate(PROMPTS[0], "long", max_tokens=450))
            # When it is answered, the other one has some tokens.
            await routing.generate(PROMPTS[1], "clock", max_tokens=8)
            await routing.engine.abort("long")
            return await long

        output = routing.run(main())
        assert output.token_ids, "an aborted request returned nothing of what it had"
        routing.check(PROMPTS[0], output, f"after {len(output.token_ids)} tokens, {output.finish_reason}")

    def test_new_weights_choose_experts_anew(self, routing: Routing) -> None:
        """For prompts that the old weights have seen, too."""
        needs(routing.plugin, "weight_update")
        routing.run(routing.together(PROMPTS))
        model = ExpertModel(1)
        routing.take(model, model.buckets())
        for number, output in enumerate(routing.run(routing.together(PROMPTS))):
            routing.check(PROMPTS[number], output, f"request {number} after an update")
