"""The images of prompts: which tokens stand for them, where these are along the axes of positions, and what the model's
forward takes of them.

Shapes: T tokens of a prompt, A axes of positions.
"""

import inspect
import io
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from PIL import Image

from agentrl_core.api.engine import EngineContext, MultiModal
from agentrl_core.api.errors import EngineError, ImageError
from agentrl_core.engine_kit.media import MediaCache, MediaProcessor, Size, name_of, opened, size_of

_KEPT_BYTES = 512 << 20
"""Of the inputs of images, so that those of a group of requests are computed once."""

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False, slots=True)
class Picture:
    """An image in a prompt.

    Args:
        start, end: its tokens, from the first one that the image itself computes to the last.
        data: the bytes of its file.
    """

    name: str
    start: int
    end: int
    data: bytes

    @property
    def place(self) -> tuple[str, int, int]:
        """Which image it is, and where."""
        return self.name, self.start, self.end


@dataclass(frozen=True, eq=False, slots=True)
class Pictures:
    """The images of a prompt, in order.

    Args:
        positions_AT: of the prompt, for a model that has several axes; None for others.
        shift: of what follows the prompt, between its place and its position.
    """

    each: tuple[Picture, ...] = ()
    positions_AT: torch.Tensor | None = None
    shift: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(picture.name for picture in self.each)

    def within(self, start: int, end: int) -> Iterator[Picture]:
        """Those whose tokens are among ``start..end``, which divides none."""
        return (picture for picture in self.each if start <= picture.start < end)

    def shared(self, other: "Pictures", count: int) -> int:
        """How many of the first ``count`` tokens, the same in both prompts, are also of the same whole images."""
        for own, their in zip_longest(self.each, other.each):
            first = min(picture.start for picture in (own, their) if picture is not None)
            if count <= first:
                break
            if own is None or their is None or own.place != their.place or count < own.end:
                return first
        return count

    def undivided(self, start: int, end: int) -> int:
        """``end`` of a chunk of tokens, moved so that no image is computed in part."""
        for picture in self.each:
            if picture.start < end < picture.end:
                return picture.start if picture.start > start else picture.end
        return end


NO_PICTURES = Pictures()


class ImageReader:
    """Finds the images of prompts, and makes the inputs of a model's forward of them. May be used by many threads.

    Raises:
        EngineError: the model is of a family whose images this engine cannot serve.
    """

    def __init__(self, context: EngineContext, module: Any) -> None:
        self._context = context
        media = MediaProcessor.load(context.model_path)
        token = getattr(module.config, "image_token_id", None)
        if media is None or token is None:
            raise EngineError(
                f"model.path: {context.model_path} ({module.config.model_type!r}) has no processor of images that "
                "the hf engine knows. Use another engine, for example rollout.engine.name=vllm"
            )
        self.media = media
        self.token = int(token)
        self._rope = next((part.get_rope_index for part in module.modules() if hasattr(part, "get_rope_index")), None)
        self._own_tokens: dict[Size, list[int]] = {}
        self._kept = MediaCache[Inputs](_KEPT_BYTES, _bytes)

    def read(self, request_id: str, ids: list[int], multi_modal: MultiModal | None) -> Pictures:
        """The images of a prompt. It warms the cache of their inputs, which the engine's thread needs soon.

        Raises:
            ValueError: the prompt's tokens are not those of its images, or an image cannot be read.
        """
        names = () if multi_modal is None else multi_modal.images
        places = np.flatnonzero(np.array(ids) == self.token).tolist()
        pictures: list[Picture] = []
        for name in names:
            where = f"request {request_id!r}, image {name}:"
            try:
                own = self.own_tokens(size_of(name))
            except ImageError as error:
                raise ValueError(f"{where} {error}") from error
            before = sum(self._count(picture.name) for picture in pictures)
            start = places[before] if before < len(places) else len(ids)
            found = ids[start : start + len(own)]
            if found != own:
                raise ValueError(f"{where} {_difference(found, own, start)}")
            assert multi_modal is not None
            if name not in multi_modal.data:
                raise ValueError(f"{where} its bytes did not come with the request")
            pictures.append(Picture(name, start, start + len(own), multi_modal.data[name]))
        if (count := sum(self._count(name) for name in names)) != len(places):
            raise ValueError(
                f"request {request_id!r}: token {places[count]} of the prompt is {self.token}, which only images have, "
                f"and its {len(names)} images come before it"
            )
        if pictures and pictures[-1].end == len(ids):
            raise ValueError(f"request {request_id!r}: the prompt ends with an image; some text must follow it")
        for picture in pictures:
            try:
                self.inputs([picture])
            except Exception as error:
                raise ValueError(f"request {request_id!r}, image {picture.name}: {error}") from error
        return self._placed(ids, tuple(pictures)) if pictures else NO_PICTURES

    def example(self, token: int) -> tuple[list[int], Pictures]:
        """A prompt with an image among tokens of some text, and the image."""
        file, size = io.BytesIO(), Size(64, 64)
        Image.effect_noise(size, 100).convert("RGB").save(file, "PNG")
        name = name_of(file.getvalue(), size, "png")
        tokenizer = self.media.processor.tokenizer
        whole = tokenizer.encode(self.media.expansion(size), add_special_tokens=False)
        ids = [token] * 3 + whole + [token] * 3
        return ids, self.read("start", ids, MultiModal((name,), ids, {name: file.getvalue()}))

    def plain_logits(self, module: Any, ids: list[int], pictures: Pictures, device: torch.device) -> torch.Tensor:
        """Those of the last token ``[V]``, as the model's own forward computes them."""
        ids_1T = torch.tensor([ids], device=device)
        inputs = {name: value.to(device) for name, value in self.inputs(pictures.each).items()}
        taken = inspect.signature(module.forward).parameters
        types = {name for name in ("token_type_ids", "mm_token_type_ids") if name in taken}
        if self._rope is not None:
            types.add("mm_token_type_ids")
        # Some keep the positions of their last forward.
        parts = [part for part in module.modules() if hasattr(part, "rope_deltas")]
        before = [part.rope_deltas for part in parts]
        try:
            output = module(
                input_ids=ids_1T, use_cache=False, **inputs, **dict.fromkeys(types, (ids_1T == self.token).int())
            )
        finally:
            for part, deltas in zip(parts, before, strict=True):
                part.rope_deltas = deltas
        logits_V: torch.Tensor = output.logits[0, -1]
        return logits_V

    def own_tokens(self, size: Size) -> list[int]:
        """What stands for an image of this size, from its first own token to its last one."""
        known = self._own_tokens.get(size)
        if known is None:
            tokenizer = self.media.processor.tokenizer
            known = tokenizer.encode(self.media.expansion(size), add_special_tokens=False)
            while known and known[0] != self.token:
                known = known[1:]
            while known and known[-1] != self.token:
                known = known[:-1]
            self._own_tokens[size] = known
        return known

    def _count(self, name: str) -> int:
        return self.own_tokens(size_of(name)).count(self.token)

    def inputs(self, pictures: SequenceOf[Picture]) -> Inputs:
        """What the forward takes of these images together, on the host."""
        each = [self._inputs(picture) for picture in pictures]
        # Some models have the tiles of all images of a conversation in the second dimension.
        tiled = each[0]["pixel_values"].dim() == 5 if each and "pixel_values" in each[0] else False
        return {
            name: torch.cat([inputs[name] for inputs in each], dim=1 if tiled else 0)
            for name in (each[0] if each else ())
        }

    def _inputs(self, picture: Picture) -> Inputs:
        if (kept := self._kept.get(picture.name)) is not None:
            return kept
        found: Inputs = {
            name: value
            for name, value in self.media.inputs([opened(picture.data)]).items()
            if isinstance(value, torch.Tensor)
        }
        return self._kept.put(picture.name, found)

    def _placed(self, ids: list[int], pictures: tuple[Picture, ...]) -> Pictures:
        if self._rope is None:
            return Pictures(pictures)
        grids = {name: value for name, value in self.inputs(pictures).items() if name.endswith("_thw")}
        ids_1T = torch.tensor([ids])
        types_1T = (ids_1T == self.token).int()
        positions_A1T, shift = self._rope(ids_1T, mm_token_type_ids=types_1T, **grids)
        return Pictures(pictures, positions_A1T[:, 0], int(shift))


def _bytes(inputs: Inputs) -> int:
    return sum(value.nbytes for value in inputs.values())


def _difference(found: list[int], own: list[int], start: int) -> str:
    place = next(
        (place for place, (left, right) in enumerate(zip(found, own, strict=False)) if left != right), len(found)
    )
    there = found[place] if place < len(found) else "missing"
    return f"token {start + place} of the prompt is {there}, and the model's processor makes it {own[place]}"
