"""Broken engines: the embedded one, with one thing wrong in each."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import WeightUpdate
from agentrl_core.api.engine import RESHAPING
from agentrl_engine_hf.config import HFEngineConfig
from agentrl_engine_hf.engine import HFEngine
from agentrl_testing.contracts import EngineCase, EngineContract, PluginContract
from agentrl_testing.contracts.engine_adapters import AdapterCases
from agentrl_testing.contracts.engine_experts import ExpertCases
from agentrl_testing.contracts.engine_images import ImageCases
from agentrl_testing.contracts.engine_served import Model, Served


class Changed(HFEngine):
    """Changes requests and outputs."""

    def params(self, params: Any) -> Any:
        return params

    def output(self, output: Any) -> Any:
        return output

    async def generate(self, prompt_ids, sampling_params, request_id, multi_modal=None):
        return self.output(await super().generate(prompt_ids, self.params(sampling_params), request_id, multi_modal))


class TooLong(Changed):
    def params(self, params):
        return replace(params, max_tokens=params.max_tokens + 1)


class Warm(Changed):
    """Samples where it should take the likeliest."""

    def params(self, params):
        return replace(params, temperature=params.temperature or 1.0)


class DropsStop(Changed):
    def output(self, output):
        if output.finish_reason != "stop":
            return output
        return replace(output, token_ids=output.token_ids[:-1], log_probs=(output.log_probs or [])[:-1])


class OtherLogProbs(Changed):
    def output(self, output):
        return replace(output, log_probs=[value - 0.001 for value in output.log_probs])


class Unshaped(Changed):
    """Ignores penalties, biases, min_p and schemas."""

    def params(self, params):
        return replace(params, **RESHAPING, json_schema=None)


class Unchained(Changed):
    """Takes top_p of the whole distribution."""

    def params(self, params):
        return replace(params, top_k=0, min_p=0.0) if params.top_p < 1 else params


class Trusting(Changed):
    """Makes something of every request."""

    def params(self, params):
        return replace(params, temperature=min(1.0, params.temperature), stop_token_ids=())


class Unseeded(Changed):
    def params(self, params):
        return replace(params, seed=None)


class SameSession(Changed):
    """Answers the second turn of a session as if there were no first."""

    seen: dict[str, int]

    async def generate(self, prompt_ids, sampling_params, request_id, multi_modal=None):
        self.__dict__.setdefault("seen", {})
        start = self.seen.get(request_id, 0)
        self.seen[request_id] = len(prompt_ids)
        return await super().generate(list(prompt_ids)[start:], sampling_params, request_id, multi_modal)


class ForgetsAborted(Changed):
    def output(self, output):
        return replace(output, finish_reason="stop") if output.finish_reason == "abort" else output

    async def abort(self, request_id):
        return await super().abort(request_id)


class Stale(Changed):
    """Takes the number of an update and not its weights."""

    async def update_weights(self, update, version):
        await super().update_weights(_own(), version)


def _own() -> WeightUpdate:
    """The weights that it began with."""
    return Model(0, True).buckets()


class KeepsItsCache(Changed):
    """Takes new weights and forgets nothing."""

    async def update_weights(self, update, version):
        await self._call(lambda executor: setattr(executor._scheduler, "invalidate", lambda but_decoding: None))
        await super().update_weights(update, version)


class Continues(Changed):
    """What runs keeps its cache, whatever is asked for."""

    async def update_weights(self, update, version):
        await super().update_weights(replace(update, running="continue"), version)


class Recomputes(Changed):
    """What runs computes its cache again, whatever is asked for."""

    async def update_weights(self, update, version):
        await super().update_weights(replace(update, running="recompute"), version)


class KeepsWhatRuns(Changed):
    """Freezes what it should end."""

    async def pause(self, mode="keep"):
        await super().pause("keep" if mode == "abort" else mode)


class Lenient(Changed):
    async def update_weights(self, update, version):
        try:
            await super().update_weights(update, version)
        except Exception:  # noqa: BLE001 - broken on purpose
            pass


class NeverPauses(Changed):
    async def pause(self, mode="keep"):
        return None

    async def resume(self):
        return None


class ForgetsToWake(Changed):
    async def wake_up(self, tags=None):
        await asyncio.Event().wait()


class TextMetrics(Changed):
    def metrics(self):
        return {"state": "fine"}


class NeverProgresses(Changed):
    async def progress(self):
        return 0.0


class StuckAfterCancel(Changed):
    """A cancelled request leaves the engine paused."""

    async def generate(self, prompt_ids, sampling_params, request_id, multi_modal=None):
        try:
            return await super().generate(prompt_ids, sampling_params, request_id, multi_modal)
        except asyncio.CancelledError:
            await HFEngine.pause(self, "keep")
            raise


ALL = (
    "logprobs",
    "seeds",
    "abort",
    "pause",
    "sleep",
    "weight_update",
    "live_update",
    "old_cache",
    "broadcast",
    "sessions",
    "json_schema",
    "chained_truncation",
    *RESHAPING,
)
BROKEN: dict[str, type[HFEngine]] = {
    "test_answers_fit_their_request": TooLong,
    "test_greedy_is_the_likeliest_continuation": Warm,
    "test_a_stop_id_ends_the_answer_and_belongs_to_it": DropsStop,
    "test_log_probs_are_those_of_transformers": OtherLogProbs,
    "test_greedy_log_probs_are_those_at_temperature_one": OtherLogProbs,
    "test_log_probs_are_those_before_truncation": OtherLogProbs,
    "test_penalties_and_biases_are_those_of_transformers": Unshaped,
    "test_a_large_bias_decides_the_token": Unshaped,
    "test_min_p_leaves_the_likely_tokens": Unshaped,
    "test_top_p_takes_its_share_of_what_is_left": Unchained,
    "test_what_no_engine_serves_is_refused_and_numpy_is_served": Trusting,
    "test_a_schema_is_kept_by_its_request_alone": Unshaped,
    "test_a_seed_repeats_an_answer_in_any_company": Unseeded,
    "test_turns_of_a_session_continue": SameSession,
    "test_abort_returns_what_was_generated": ForgetsAborted,
    "test_a_cancelled_request_ends": StuckAfterCancel,
    "test_new_weights_answer_after_an_update": Stale,
    "test_weights_that_are_sent_in_a_group_are_received": Stale,
    "test_weights_that_do_not_fit_are_refused": Lenient,
    "test_pause_keep_goes_on_with_new_weights": Stale,
    "test_requests_that_run_compute_their_cache_again": Continues,
    "test_requests_that_run_keep_their_cache": Recomputes,
    "test_requests_end_before_weights_that_they_must_not_meet": KeepsWhatRuns,
    "test_a_new_request_finds_no_cache_of_other_weights": KeepsItsCache,
    "test_pause_empties_the_engine": NeverPauses,
    "test_sleep_and_wake": ForgetsToWake,
    "test_progress_shows_that_requests_are_computed": NeverProgresses,
    "test_metrics_are_numbers": TextMetrics,
}


def test_every_check_has_a_broken_engine() -> None:
    # Those of adapters, experts and images are in files of their own.
    others = (PluginContract, AdapterCases, ExpertCases, ImageCases)
    shared = {name for cases in others for name in dir(cases) if name.startswith("test_")}
    own = {name for name in dir(EngineContract) if name.startswith("test_")} - shared
    assert own == BROKEN.keys()


@pytest.mark.parametrize("check", BROKEN)
def test_the_check_catches_its_broken_engine(
    spec: Any, tmp_path: Path, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl_testing.contracts.engine_served.DEADLINE", 6.0)
    case = EngineCase(spec("engine", BROKEN[check], *ALL, config=HFEngineConfig))
    served = Served(case, tmp_path)
    function = getattr(EngineContract, check)
    marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
    arguments = {marks[0].args[0]: marks[0].args[1][0]} if marks else {}
    try:
        with pytest.raises((AssertionError, TimeoutError, pytest.fail.Exception)):
            function(EngineContract(), served, **arguments)
    finally:
        served.close()
