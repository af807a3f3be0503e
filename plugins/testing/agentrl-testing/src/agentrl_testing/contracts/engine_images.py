"""What engines must do with images: show them to the model that the trainer computes, and never mix them up."""

import asyncio
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl_core.api import MultiModal, SamplingParams, TokenOutput, together
from agentrl_core.engine_kit.media import MediaProcessor, Size, name_of, opened
from agentrl_testing.contracts.case import needs
from agentrl_testing.contracts.engine_served import EngineCase, Model, Served, check_spans, of_class
from agentrl_testing.tiny_vision import save_tiny_vision_model

GAP = 1e-3
"""Largest gap of a log-prob to that of transformers: libraries round the pixels of an image differently."""
DIFFERENCE = 0.05
"""What another image changes at least, somewhere in an answer."""
MOST = 3
"""Images of a prompt."""
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"


@dataclass(frozen=True)
class Prompt:
    """What a request shows a model: the ids that are computed, and the images among them."""

    ids: list[int]
    multi_modal: MultiModal | None = None

    def followed_by(self, output: TokenOutput, other: "Prompt") -> "Prompt":
        """The next turn of a conversation."""
        ids, collapsed = [*self.ids, *output.token_ids, *other.ids], [*other.ids]
        images: tuple[str, ...] = ()
        data: dict[str, bytes] = {}
        parts = [each.multi_modal for each in (self, other) if each.multi_modal is not None]
        for part in parts:
            images, data = images + part.images, {**data, **part.data}
        before, after = (
            list(each.ids if each.multi_modal is None else each.multi_modal.collapsed_ids) for each in (self, other)
        )
        collapsed = [*before, *output.token_ids, *after]
        return Prompt(ids, MultiModal(images, collapsed, data) if images else None)


def picture(number: int, width: int = 56, height: int = 56) -> tuple[str, bytes]:
    """The name and the PNG file of some image, always the same for the same number.

    Its sides are multiples of what the tiny model's processor rounds them to, so that none resizes it.
    """
    from PIL import Image

    colors = np.random.default_rng(number).integers(0, 256, (height // 14, width // 14, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(colors.repeat(14, 0).repeat(14, 1)).save(file, "PNG")
    data = file.getvalue()
    return name_of(data, Size(width, height), "png"), data


class ImageModel(Model):
    """A tiny vision-language model and what transformers says about an output."""

    def __init__(self, seed: int, folder: Path, family: str) -> None:
        import torch
        from transformers import AutoModelForImageTextToText

        self.path = save_tiny_vision_model(
            folder / f"vision-{seed}", seed=seed, family=family, hidden_size=128, intermediate_size=256,
            num_attention_heads=4, num_key_value_heads=4, initializer_range=0.12, max_position_embeddings=512,
            # vLLM asks for the order of the axes, which transformers knows of each family.
            rope_parameters={
                "rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": family == "qwen3_vl",
            },
        )  # fmt: skip
        self.module = AutoModelForImageTextToText.from_pretrained(self.path, dtype=torch.float32).eval()

    def save(self, path: Path) -> str:
        """It is saved already."""
        return self.path

    @cached_property
    def media(self) -> MediaProcessor:
        """Its processor of images."""
        media = MediaProcessor.load(self.path)
        assert media is not None
        return media

    @property
    def tokenizer(self) -> Any:
        """It knows the tokens that stand for images."""
        return self.media.processor.tokenizer

    @property
    def vocab_size(self) -> int:
        """Tokens of the embedding."""
        return int(self.module.get_input_embeddings().weight.shape[0])

    def prompt(self, *parts: str | tuple[str, bytes]) -> Prompt:
        """One of texts and images."""
        text = "".join(part if isinstance(part, str) else PLACEHOLDER for part in parts)
        pictures = [part for part in parts if not isinstance(part, str)]
        names = tuple(name for name, _ in pictures)
        whole, collapsed = (
            self.tokenizer.encode(each, add_special_tokens=False) for each in (self.media.expanded(text, names), text)
        )
        return Prompt(whole, MultiModal(names, collapsed, dict(pictures)) if names else None)

    def said(self, prompt: Prompt, output: Sequence[int], temperature: float = 1.0, bias: dict[int, float] | None = None
             ) -> list[float]:  # fmt: skip
        """The log-prob of each id of an output, in one forward over all of it."""
        import torch

        ids = torch.tensor([[*prompt.ids, *output]])
        shown: dict[str, Any] = {}
        if prompt.multi_modal is not None:
            data = prompt.multi_modal.data
            shown = self.media.inputs([opened(data[name]) for name in prompt.multi_modal.images])
            shown["mm_token_type_ids"] = (ids == self.module.config.image_token_id).int()
        with torch.no_grad():
            logits = self.module(input_ids=ids, use_cache=False, **shown).logits[0, len(prompt.ids) - 1 : -1].float()
        for token, value in (bias or {}).items():
            logits[:, token] += value
        log_probs = torch.log_softmax(logits / temperature, -1)
        return [float(row[token]) for row, token in zip(log_probs, output, strict=True)]


class Seeing(Served):
    """An engine that serves a model with images."""

    model: ImageModel

    def __init__(self, plugin: EngineCase, folder: Path) -> None:
        self._models: dict[int, ImageModel] = {}
        self._folder, self._family = folder, plugin.vision
        model = self.known(0)
        fields = {
            **plugin.context, "vocab_size": model.vocab_size, "max_images": MOST, "reserved_ids": model.media.reserved,
        }  # fmt: skip
        super().__init__(replace(plugin, context=fields), folder)

    def known(self, seed: int) -> ImageModel:
        """The model of this seed."""
        if seed not in self._models:
            self._models[seed] = ImageModel(seed, self._folder, self._family)
        return self._models[seed]

    def first(self) -> Model:
        return self.known(0)

    async def show(self, prompt: Prompt, name: str = "r", **params: Any) -> TokenOutput:
        """One request in a new session."""
        async with self.session(name):
            return await self.turn(prompt, name, **params)

    async def turn(self, prompt: Prompt, name: str, **params: Any) -> TokenOutput:
        """One request in a session."""
        sampling = SamplingParams(**{"max_tokens": 12, **params})
        return await self.engine.generate(prompt.ids, sampling, name, prompt.multi_modal)

    async def show_all(self, prompts: Sequence[Prompt], tag: str = "r", **params: Any) -> list[TokenOutput]:
        """Many requests at once."""
        calls = (self.show(prompt, f"{tag}{number}", seed=number, **params) for number, prompt in enumerate(prompts))
        return await together(calls)

    def check(self, prompt: Prompt, output: TokenOutput, what: str, bias: dict[int, float] | None = None) -> None:
        """Its log-probs are those of the model with these images."""
        check_spans(output, self.version)
        assert output.log_probs is not None, "the engine returned no log-probs"
        expected = self.model.said(prompt, output.token_ids, bias=bias)
        gap = max(abs(own - other) for own, other in zip(output.log_probs, expected, strict=True))
        assert gap <= GAP, f"{what}: log-probs differ by {gap:.1e} from those of transformers"

    def check_differ(self, one: Prompt, other: Prompt, output: TokenOutput) -> None:
        """The check of two images can fail: they give this output other log-probs."""
        both = zip(self.model.said(one, output.token_ids), self.model.said(other, output.token_ids), strict=True)
        gap = max(abs(own - their) for own, their in both)
        assert gap > DIFFERENCE, f"these two prompts tell the model nothing different ({gap:.1e})"


class ImageCases:
    """Cases of :class:`EngineContract`."""

    @pytest.fixture
    def seeing(self, request: pytest.FixtureRequest, plugin: EngineCase) -> Iterator[Seeing]:
        """An engine of a model with images, for all tests of this class, with the weights that it began with."""
        needs(plugin, "images", "logprobs")
        seeing = of_class(request, "_seeing", lambda folder: Seeing(plugin, folder))
        seeing.fresh()
        yield seeing

    def test_images_say_what_they_say_in_transformers(self, seeing: Seeing) -> None:
        """One image, two in one message, the same twice, and a wide one."""
        model, (one, two) = seeing.model, (picture(1), picture(2, 112, 84))
        prompts = [
            model.prompt("Look: ", one, " What is it?"),
            model.prompt("Compare ", one, two, " now"),
            model.prompt(two, " and ", one, " and again ", two, "."),
        ]
        for prompt in prompts:
            seeing.check(prompt, seeing.run(seeing.show(prompt)), f"{len(prompt.ids)} tokens, alone")
        swapped = model.prompt("Compare ", two, one, " now")
        seeing.check_differ(prompts[1], swapped, seeing.run(seeing.show(prompts[1])))

    def test_images_and_text_in_one_batch(self, seeing: Seeing) -> None:
        """Each request sees its own images, and a text sees none."""
        shown = [[picture(10 * number + each) for each in range(number % (MOST + 1))] for number in range(1, 9)]
        prompts = [seeing.model.prompt("Look: ", *each, "?" * number) for number, each in enumerate(shown, 1)]
        for temperature in (1.0, 0.0):
            outputs = seeing.run(seeing.show_all(prompts, temperature=temperature))
            for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
                seeing.check(prompt, output, f"request {number} of {len(prompts)}")

    def test_a_conversation_shows_an_image_each_turn(self, seeing: Seeing) -> None:
        """What is cached of the turns before holds images, and the positions after them."""
        model = seeing.model

        async def talk() -> list[tuple[Prompt, TokenOutput]]:
            turns = []
            async with seeing.session("talk"):
                prompt = model.prompt("Here is the first one, of three: ", picture(20, 112, 112), " Well?")
                for number in range(3):
                    output = await seeing.turn(prompt, "talk", seed=number)
                    turns.append((prompt, output))
                    shown = model.prompt(f" Turn {number}: ", picture(21 + number, 84, 56), " And this?")
                    prompt = prompt.followed_by(output, shown if number == 0 else model.prompt(" No image."))
                    if number == 1:
                        prompt = prompt.followed_by(TokenOutput([], [], "stop"), shown)
            return turns

        for number, (prompt, output) in enumerate(seeing.run(talk())):
            seeing.check(prompt, output, f"turn {number}")

    def test_another_image_under_the_same_text_is_another_prompt(self, seeing: Seeing) -> None:
        """Its ids are the same, and no cache of the first one may be read: in a session, in others, or in a batch."""
        model, text = seeing.model, "A text that is long enough for caches of whole blocks, it says nothing. " * 2
        one, other = (model.prompt(text, picture(number), " So: " + text) for number in (30, 31))
        assert one.ids == other.ids

        async def main() -> list[tuple[Prompt, TokenOutput]]:
            answers = [
                (one, await seeing.show(one, "first", seed=1)),
                (other, await seeing.show(other, "second", seed=1)),
            ]
            async with seeing.session("both"):
                answers += [(each, await seeing.turn(each, "both", seed=2)) for each in (one, other, one)]
            batch = [one, other] * 3
            return [*answers, *zip(batch, await seeing.show_all(batch, "batch"), strict=True)]

        answers = seeing.run(main())
        seeing.check_differ(one, other, answers[0][1])
        for number, (prompt, output) in enumerate(answers):
            seeing.check(prompt, output, f"answer {number}, with the {'first' if prompt is one else 'other'} image")

    @pytest.mark.parametrize("temperature", [1.0, 0.0])
    def test_tokens_of_images_are_never_sampled(self, seeing: Seeing, temperature: float) -> None:
        """Whatever the model likes; the log-probs are those of all tokens."""
        needs(seeing.plugin, "logit_bias")
        bias = {token: 6.0 for token in seeing.model.media.reserved}
        prompts = [seeing.model.prompt("Look: ", picture(1), " What?"), seeing.model.prompt("No image at all")] * 4
        cases: list[tuple[dict[str, Any], dict[int, float]]] = [
            ({}, bias), ({"top_k": 2}, bias), ({"top_p": 0.9}, bias), ({}, {token: 1000.0 for token in bias}),
        ]  # fmt: skip
        for params, biases in cases:
            outputs = seeing.run(seeing.show_all(prompts, temperature=temperature, logit_bias=biases, **params))
            for prompt, output in zip(prompts, outputs, strict=True):
                found = bias.keys() & set(output.token_ids)
                assert not found, f"with {params} tokens {sorted(found)} were sampled, which stand for images"
                if biases is bias:
                    seeing.check(prompt, output, f"with {params} and reserved tokens that the model likes", bias)

    @pytest.mark.parametrize("road", ["buckets", "files"])
    def test_new_weights_see_images_anew(self, seeing: Seeing, road: str) -> None:
        """What an encoder has made of an image with the old weights is worth nothing."""
        needs(seeing.plugin, "weight_update")
        prompts = [seeing.model.prompt("Look: ", picture(number), picture(number + 1), " What?") for number in (40, 41)]
        for seed in (1, 2):
            seeing.run(seeing.show_all(prompts))
            old, model = seeing.model, seeing.known(seed)
            seeing.take(model, model.buckets() if road == "buckets" else model.file(seeing.folder))
            for prompt, output in zip(prompts, seeing.run(seeing.show_all(prompts)), strict=True):
                seeing.check(prompt, output, f"after {seed} updates")
            assert old is not seeing.model

    def test_running_requests_see_their_images_with_new_weights(self, seeing: Seeing) -> None:
        """Each token has the log-prob of the weights that its version names, in a forward over all of the prompt."""
        needs(seeing.plugin, "live_update")
        shown = [[picture(50 + number), picture(60 + number)][: 1 + number % 2] for number in range(6)]
        prompts = [seeing.model.prompt("Look: ", *each, " What is it?") for each in shown]
        models = {seeing.version: seeing.model}

        async def main() -> list[TokenOutput]:
            crowd = asyncio.ensure_future(seeing.show_all(prompts, "crowd", max_tokens=120))
            # When it is answered, the others have some tokens of the present weights.
            await seeing.show(prompts[0], "clock", max_tokens=8)
            await seeing.update(seeing.known(1))
            models[seeing.version] = seeing.model
            return await crowd

        outputs = seeing.run(main())
        assert any(len(output.spans) > 1 for output in outputs), "no request ran when the weights changed"
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.log_probs is not None, "the engine returned no log-probs"
            for span in output.spans:
                expected = models[span.version].said(prompt, output.token_ids)
                gap = max(abs(output.log_probs[place] - expected[place]) for place in range(span.start, span.end))
                assert gap <= GAP, f"tokens of {span} differ by {gap:.1e} from the weights of their version"

    def test_a_prompt_that_is_not_what_its_images_make_is_refused(self, seeing: Seeing) -> None:
        """The trainer computes ``prompt_ids``; and so does a prompt with too many images."""
        model = seeing.model
        good = model.prompt("Look: ", picture(1), " What?")
        token = model.module.config.image_token_id
        place = good.ids.index(token)
        bad = [
            replace(good, ids=good.ids[:place] + good.ids[place + 1 :]),
            replace(good, ids=good.ids[:place] + [token] + good.ids[place:]),
            model.prompt(*(picture(number) for number in range(MOST + 1)), "?"),
        ]
        for prompt in bad:
            with pytest.raises(Exception, match=r"token|images"):
                seeing.run(seeing.show(prompt))
        seeing.run(seeing.engine.health())
        seeing.check(good, seeing.run(seeing.show(good)), "after requests that were refused")
