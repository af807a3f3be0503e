"""Engines that serve images wrongly: the embedded one, with one thing wrong in each."""

import copy
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from agentrl_engine_hf.config import HFEngineConfig
from agentrl_engine_hf.engine import HFEngine
from agentrl_engine_hf.images import Pictures
from agentrl_testing.contracts import EngineCase, EngineContract
from agentrl_testing.contracts.engine_images import ImageCases, Seeing


class ShowsOther(HFEngine):
    """Shows the model something else than it is asked to."""

    def shown(self, multi_modal: Any) -> Any:
        return multi_modal

    async def generate(self, prompt_ids, sampling_params, request_id, multi_modal=None):
        shown = multi_modal and self.shown(multi_modal)
        return await super().generate(prompt_ids, sampling_params, request_id, shown)


class ShowsNothing(ShowsOther):
    def shown(self, multi_modal):
        def black(data: bytes) -> bytes:
            file = io.BytesIO()
            Image.new("RGB", Image.open(io.BytesIO(data)).size).save(file, "PNG")
            return file.getvalue()

        return replace(multi_modal, data={name: black(data) for name, data in multi_modal.data.items()})


class ShowsTheFirst(ShowsOther):
    """In the place of all of the same size."""

    def shown(self, multi_modal):
        first = {}
        for name in multi_modal.images:
            first.setdefault(name.rpartition("-")[2], name)
        return replace(multi_modal, data={name: multi_modal.data[first[name.rpartition("-")[2]]] for name in first} | {
            name: multi_modal.data[first[name.rpartition("-")[2]]] for name in multi_modal.images
        })  # fmt: skip


class Placed(HFEngine):
    """Images are somewhere else than they are."""

    def placed(self, pictures: Pictures) -> Pictures:
        return pictures

    async def start(self):
        await super().start()
        if self._images is not None:
            read = self._images.read
            self._images.read = lambda *prompt: self.placed(read(*prompt))


class HasOneAxis(Placed):
    def placed(self, pictures):
        return replace(pictures, positions_AT=None, shift=0)


class ForgetsTheShift(Placed):
    """Right in the prompt, and wrong in what follows it."""

    def placed(self, pictures):
        return replace(pictures, shift=0)


class MixesRows(HFEngine):
    """Shows the images of a batch from the last to the first."""

    async def start(self):
        await super().start()
        if self._images is not None:
            inputs = self._images.inputs
            self._images.inputs = lambda pictures: inputs(sorted(pictures, key=lambda picture: picture.name))


class CachesByText(HFEngine):
    """Finds keys and values by the ids alone, in a session."""

    async def start(self):
        await super().start()
        await self._call(lambda executor: setattr(executor._scheduler, "_claim", _claim_by_text(executor._scheduler)))


class CachesByTextWhatRuns(Placed):
    """The same among requests that run."""

    def placed(self, pictures):
        return replace(pictures, each=tuple(replace(picture, name="image") for picture in pictures.each))

    async def start(self):
        await super().start()
        if self._images is not None:
            self._images._inputs = lambda picture: dict(self._images.media.inputs([_opened(picture.data)]))


def _opened(data: bytes) -> Any:
    return Image.open(io.BytesIO(data)).convert("RGB")


def _claim_by_text(scheduler: Any) -> Any:
    claim = type(scheduler)._claim

    def claims(sequence: Any) -> None:
        last = scheduler.idle.get(sequence.request_id)
        pictures = sequence.pictures
        if last is not None:
            sequence.pictures = last.pictures
        claim(scheduler, sequence)
        sequence.pictures = pictures

    return claims


class SamplesThem(HFEngine):
    """Tokens of images like all others."""

    def __init__(self, config: HFEngineConfig, context: Any) -> None:
        super().__init__(config, replace(context, reserved_ids=()))


class ScoresTheRest(HFEngine):
    """Log-probs are those of all other tokens."""

    async def generate(self, prompt_ids, sampling_params, request_id, multi_modal=None):
        bias = {**sampling_params.logit_bias, **dict.fromkeys(self._context.reserved_ids, -1000.0)}
        params = replace(sampling_params, logit_bias=bias)
        return await super().generate(prompt_ids, params, request_id, multi_modal)


class KeepsWhatItHasSeen(HFEngine):
    """What the vision tower has made of an image outlives its weights."""

    async def start(self):
        await super().start()
        await self._call(self._keep)

    def _keep(self, executor: Any) -> None:
        model, known = executor.model.module.model, {}
        features = model.get_image_features

        def kept(pixels: Any, *args: Any, **kwargs: Any) -> Any:
            key = float(pixels.double().sum())
            if key not in known:
                known[key] = features(pixels, *args, **kwargs)
            return known[key]

        model.get_image_features = kept


class KeepsItsTower(HFEngine):
    """The vision tower gets no new weights."""

    async def start(self):
        await super().start()
        await self._call(self._keep)

    def _keep(self, executor: Any) -> None:
        model = executor.model.module.model
        model.get_image_features = copy.deepcopy(model).get_image_features


class TakesAnyPrompt(HFEngine):
    """Whatever its tokens are."""

    async def generate(self, prompt_ids, sampling_params, request_id, multi_modal=None):
        try:
            return await super().generate(prompt_ids, sampling_params, request_id, multi_modal)
        except ValueError:
            ids = [token for token in prompt_ids if token not in self._context.reserved_ids]
            return await super().generate(ids, sampling_params, request_id)


BROKEN: dict[str, list[type[HFEngine]]] = {
    "test_images_say_what_they_say_in_transformers": [ShowsNothing, HasOneAxis, ForgetsTheShift],
    "test_images_and_text_in_one_batch": [ShowsTheFirst, MixesRows],
    "test_a_conversation_shows_an_image_each_turn": [HasOneAxis, ForgetsTheShift, ShowsNothing],
    "test_another_image_under_the_same_text_is_another_prompt": [CachesByText, CachesByTextWhatRuns],
    "test_tokens_of_images_are_never_sampled": [SamplesThem, ScoresTheRest],
    "test_new_weights_see_images_anew": [KeepsWhatItHasSeen, KeepsItsTower],
    "test_running_requests_see_their_images_with_new_weights": [KeepsItsTower],
    "test_a_prompt_that_is_not_what_its_images_make_is_refused": [TakesAnyPrompt],
}


def test_every_check_has_a_broken_engine() -> None:
    assert {name for name in dir(ImageCases) if name.startswith("test_")} == BROKEN.keys()


@pytest.mark.parametrize(("check", "engine"), [(check, each) for check in BROKEN for each in BROKEN[check]])
def test_the_check_catches_its_broken_engine(spec: Any, tmp_path: Path, check: str, engine: type[HFEngine]) -> None:
    capabilities = ("logprobs", "weight_update", "live_update", "logit_bias", "images")
    seeing = Seeing(EngineCase(spec("engine", engine, *capabilities, config=HFEngineConfig)), tmp_path)
    function = getattr(EngineContract, check)
    marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
    arguments = {marks[0].args[0]: marks[0].args[1][0]} if marks else {}
    try:
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            function(EngineContract(), seeing, **arguments)
    finally:
        seeing.close()
