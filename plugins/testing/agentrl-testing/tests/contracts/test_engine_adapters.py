"""Engines that serve adapters wrongly: the embedded one, with one thing wrong in each. The reference, against PEFT."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel, get_peft_model_state_dict
from safetensors.numpy import save_file

from agentrl_core.api import PolicySpan
from agentrl_engine_hf.config import HFEngineConfig
from agentrl_engine_hf.engine import HFEngine
from agentrl_testing.contracts import EngineCase, EngineContract
from agentrl_testing.contracts.engine_adapters import ATTENTION, Adapted, AdaptedModel, AdapterCases
from agentrl_testing.contracts.engine_served import PROMPTS, Model


class Claims(HFEngine):
    """Samples with something else than it says."""

    newest: dict[str, int]

    def asked(self, params: Any) -> Any:
        return params

    async def generate(self, prompt_ids, sampling_params, request_id, multi_modal=None):
        newest = self.__dict__.setdefault("newest", {})
        name, version = sampling_params.adapter, sampling_params.version
        version = (newest.get(name) if version is None else version) if name else 0
        output = await super().generate(prompt_ids, self.asked(sampling_params), request_id, multi_modal)
        return replace(output, spans=[PolicySpan(version, 0, len(output.token_ids))])

    async def update_weights(self, update, version):
        await super().update_weights(update, version)
        self.__dict__.setdefault("newest", {})[update.adapter.name] = version


class ServesTheBase(Claims):
    def asked(self, params):
        return replace(params, adapter="", version=None)


class ServesTheNewest(Claims):
    def asked(self, params):
        return replace(params, version=None)


class ServesTheFirstOfABatch(HFEngine):
    async def start(self):
        await super().start()

        def change(executor: Any) -> None:
            mix = executor.model.lora.mix
            executor.model.lora.mix = lambda rows: mix([rows[0]] * len(rows))

        await self._call(change)


class OverwritesTheOldVersion(HFEngine):
    """Loads in place: what runs goes on with the new weights under the old number."""

    async def update_weights(self, update, version):
        await super().update_weights(update, version)

        def change(executor: Any) -> None:
            newest = executor._adapters.newest(update.adapter.name)
            for entry in executor._adapters:
                if entry.name == newest.name:
                    entry.held = newest.held
            executor.model.lora.forget()

        await self._call(change)


class ServesWhatIsDropped(HFEngine):
    """With the newest version."""

    async def generate(self, prompt_ids, sampling_params, request_id, multi_modal=None):
        try:
            return await super().generate(prompt_ids, sampling_params, request_id, multi_modal)
        except ValueError:
            return await super().generate(prompt_ids, replace(sampling_params, version=None), request_id, multi_modal)


class FreesWhatIsUsed(HFEngine):
    """What is dropped is gone at once."""

    async def update_weights(self, update, version):
        await super().update_weights(update, version)

        def change(executor: Any) -> None:
            for entry in executor._adapters:
                if not entry.kept:
                    entry.held = [(a * 0, b * 0) for a, b in entry.held]
            executor.model.lora.forget()

        await self._call(change)


class CachesByName(HFEngine):
    """Finds keys and values by the name of the adapter, whatever the version."""

    async def start(self):
        await super().start()
        await self._call(lambda executor: setattr(executor._scheduler, "weights_of", lambda each: each.params.adapter))


class CachesByNameWhatRuns(CachesByName):
    """The same among requests that run; turns of a session share nothing."""

    async def start(self):
        await super().start()
        await self._call(lambda executor: setattr(executor._scheduler, "_claim", lambda sequence: None))


class CachesByPrompt(HFEngine):
    """Finds keys and values by the prompt alone."""

    async def start(self):
        await super().start()
        await self._call(lambda executor: setattr(executor._scheduler, "weights_of", lambda each: None))


class NamesTheLastUpdate(HFEngine):
    last = 0

    async def generate(self, prompt_ids, sampling_params, request_id, multi_modal=None):
        output = await super().generate(prompt_ids, sampling_params, request_id, multi_modal)
        return replace(output, spans=[PolicySpan(self.last, 0, len(output.token_ids))])

    async def update_weights(self, update, version):
        await super().update_weights(update, version)
        self.last = version


class Lenient(HFEngine):
    async def update_weights(self, update, version):
        try:
            await super().update_weights(update, version)
        except Exception:  # noqa: BLE001 - broken on purpose
            pass


class ServesUnknownNames(HFEngine):
    async def generate(self, prompt_ids, sampling_params, request_id, multi_modal=None):
        if sampling_params.adapter not in ("first", "second"):
            sampling_params = replace(sampling_params, adapter="", version=None)
        return await super().generate(prompt_ids, sampling_params, request_id, multi_modal)


class ChangesBeforeItChecks(HFEngine):
    """A refused update has emptied the adapter of its name."""

    async def update_weights(self, update, version):
        try:
            await super().update_weights(update, version)
        except Exception:
            await self._call(self._empty)
            raise

    def _empty(self, executor: Any) -> None:
        for entry in executor._adapters:
            if entry.name == "first":
                entry.held = [(a * 0, b * 0) for a, b in entry.held]
        executor.model.lora.forget()


class LosesTheBaseInItsSleep(HFEngine):
    async def sleep(self, level=1):
        await super().sleep(level)
        await self._call(lambda executor: executor.model.module.model.norm.weight.data.zero_())


class LosesAdaptersInItsSleep(ChangesBeforeItChecks):
    async def sleep(self, level=1):
        await super().sleep(level)
        await self._call(self._empty)


BROKEN: dict[str, list[type[HFEngine]]] = {
    "test_an_adapter_answers_after_its_update": [ServesTheBase],
    "test_adapters_and_versions_answer_in_one_batch": [ServesTheNewest, ServesTheFirstOfABatch],
    "test_a_version_that_is_dropped_serves_its_requests_to_their_end": [
        OverwritesTheOldVersion, FreesWhatIsUsed, ServesWhatIsDropped,
    ],
    "test_a_paused_request_keeps_its_version": [OverwritesTheOldVersion],
    "test_no_prefix_of_another_version_or_adapter_is_read": [CachesByName, CachesByNameWhatRuns, CachesByPrompt],
    "test_spans_name_the_version_of_the_adapter": [NamesTheLastUpdate],
    "test_adapters_that_do_not_fit_are_refused": [Lenient, ServesUnknownNames, ChangesBeforeItChecks],
    "test_weights_and_adapters_are_there_after_sleep": [LosesTheBaseInItsSleep, LosesAdaptersInItsSleep],
}  # fmt: skip


def test_every_check_has_a_broken_engine() -> None:
    assert {name for name in dir(AdapterCases) if name.startswith("test_")} == BROKEN.keys()


@pytest.mark.parametrize(("check", "engine"), [(check, each) for check in BROKEN for each in BROKEN[check]])
def test_the_check_catches_its_broken_engine(spec: Any, tmp_path: Path, check: str, engine: type[HFEngine]) -> None:
    capabilities = ("logprobs", "pause", "sleep", "weight_update", "live_update", "adapters")
    served = Adapted(EngineCase(spec("engine", engine, *capabilities, config=HFEngineConfig)), tmp_path)
    function = getattr(EngineContract, check)
    marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
    arguments = {marks[0].args[0]: marks[0].args[1][0]} if marks else {}
    try:
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            function(EngineContract(), served, **arguments)
    finally:
        served.close()


@pytest.mark.parametrize("fields", [{}, {"rank": 8, "alpha": 4}, {"targets": ATTENTION}], ids=str)
def test_the_reference_is_what_peft_computes(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Engines live in environments without PEFT, so the contract merges its adapters into the model itself."""
    reference = AdaptedModel(1, True, **fields)
    save_file(reference.lora, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(reference.config))
    base = Model(0, True)
    module = PeftModel.from_pretrained(base.module, tmp_path).eval()
    assert get_peft_model_state_dict(module).keys() == reference.lora.keys()
    output = reference.greedy(PROMPTS[3], 12)
    expected = reference.log_probs(PROMPTS[3], output)
    base.module = module
    assert base.log_probs(PROMPTS[3], output) == pytest.approx(expected, abs=2e-5)
    with module.disable_adapter():
        assert base.log_probs(PROMPTS[3], output) != pytest.approx(expected, abs=0.1)
