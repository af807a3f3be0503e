"""Engines that say wrongly where they sent tokens: the embedded one, with one thing wrong in each."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl_engine_hf.config import HFEngineConfig
from agentrl_engine_hf.engine import HFEngine
from agentrl_testing.contracts import EngineCase, EngineContract
from agentrl_testing.contracts.engine_experts import ExpertCases, Routing


class SaysOther(HFEngine):
    """Returns something else than the experts that were chosen."""

    def said(self, experts: Any, prompt: list[int], session: str) -> Any:
        return experts

    async def generate(self, prompt_ids, sampling_params, request_id, multi_modal=None):
        output = await super().generate(prompt_ids, sampling_params, request_id, multi_modal)
        output.routed_experts = self.said(output.routed_experts, list(prompt_ids), request_id)
        return output


class SaysNothing(SaysOther):
    def said(self, experts, prompt, session):
        return None


class LeavesOutThePrompt(SaysOther):
    def said(self, experts, prompt, session):
        return experts[len(prompt) :]


class HasOneMore(SaysOther):
    """The last token, which no layer has seen yet."""

    def said(self, experts, prompt, session):
        return np.concatenate([experts, experts[-1:]])


class LeavesOutALayer(SaysOther):
    def said(self, experts, prompt, session):
        return experts[:, 1:]


class IsOneTokenLate(SaysOther):
    def said(self, experts, prompt, session):
        return np.roll(experts, 1, axis=0)


class SaysOneExpertTwice(SaysOther):
    def said(self, experts, prompt, session):
        return np.repeat(experts[..., :1], experts.shape[-1], axis=-1)


class ForgetsTurns(SaysOther):
    """What it has cached has no experts."""

    async def start(self):
        await super().start()
        self._turns: dict[str, int] = {}

    def said(self, experts, prompt, session):
        experts = experts.copy()
        experts[: self._turns.get(session, 0)] = 0
        self._turns[session] = len(experts)
        return experts


class ForgetsWhatIsAborted(HFEngine):
    async def generate(self, prompt_ids, sampling_params, request_id, multi_modal=None):
        output = await super().generate(prompt_ids, sampling_params, request_id, multi_modal)
        if output.finish_reason == "abort":
            output.routed_experts = None
        return output


class KeepsOldOnes(SaysOther):
    """The experts of a prompt that it has seen are those of then."""

    async def start(self):
        await super().start()
        self._known: dict[tuple[int, ...], Any] = {}

    def said(self, experts, prompt, session):
        kept = self._known.setdefault(tuple(prompt), experts[: len(prompt)].copy())
        return np.concatenate([kept, experts[len(prompt) :]])


BROKEN: dict[str, list[type[HFEngine]]] = {
    "test_experts_are_those_of_each_sequence_alone": [
        SaysNothing, LeavesOutThePrompt, HasOneMore, LeavesOutALayer, IsOneTokenLate, SaysOneExpertTwice,
    ],
    "test_a_later_turn_has_the_experts_of_all_its_tokens": [ForgetsTurns],
    "test_what_is_aborted_has_the_experts_of_its_tokens": [ForgetsWhatIsAborted],
    "test_new_weights_choose_experts_anew": [KeepsOldOnes],
}  # fmt: skip


def test_every_check_has_a_broken_engine() -> None:
    assert {name for name in dir(ExpertCases) if name.startswith("test_")} == BROKEN.keys()


@pytest.mark.parametrize(("check", "engine"), [(check, each) for check in BROKEN for each in BROKEN[check]])
def test_the_check_catches_its_broken_engine(spec: Any, tmp_path: Path, check: str, engine: type[HFEngine]) -> None:
    capabilities = ("weight_update", "abort", "routed_experts")
    routing = Routing(EngineCase(spec("engine", engine, *capabilities, config=HFEngineConfig)), tmp_path)
    try:
        with pytest.raises(AssertionError):
            getattr(EngineContract, check)(EngineContract(), routing)
    finally:
        routing.close()
