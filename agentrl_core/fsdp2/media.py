"""What a vision-language model takes in addition to the text of a micro-batch: pixels, token types, positions.

No family is named. What a forward takes says its signature; what an image becomes says the model's processor; positions
of several axes are those that the model's own ``get_rope_index`` gives each row.

Shapes: b rows, p prompt and r response tokens, l = p + r tokens of a micro-batch; T tokens of a packed sequence; M
images of the row with the most.
"""

import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from agentrl_core.api.errors import ConfigError, ImageError, ProtocolError
from agentrl_core.api.training_backend import IMAGES, SEQUENCE_COLUMNS, Columns, MicroBatch
from agentrl_core.engine_kit.media import MediaCache, MediaProcessor, MediaSource, Size, name_of, opened, size_of
from agentrl_core.fsdp2.packing import ForwardPass
from agentrl_core.workers.image_columns import at_features, image_column, image_name, replaced_tokens

MOST_BYTES = 1 << 30
"""Of the pixels that are kept for later micro-batches."""
TOKEN_TYPES = "mm_token_type_ids", "token_type_ids"
EXAMPLE_SIZES = Size(64, 64), Size(64, 64), Size(96, 64)


class Media:
    """The images of a worker's batches, for one model.

    Args:
        model: of transformers; it may be without its head, sharded, or have adapters.
        processor: of the same model.
        source: has the bytes of images.
        in_step: the model is sharded. A micro-batch without images then gets a row with one that counts for nothing, so
            that every rank runs the layers that see, forwards and backwards, when the others do.
        most_bytes: of pixels that are kept.
    """

    def __init__(
        self,
        model: Any,
        processor: MediaProcessor,
        source: MediaSource,
        in_step: bool = False,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._processor = processor
        self._source = source
        self._in_step = in_step
        token = getattr(model.config, "image_token_id", None)
        if token is None:
            raise ConfigError(f"{type(model.config).__name__} names no image_token_id: which tokens are images?")
        self._token = int(token)
        self._dtype = next(model.parameters()).dtype
        self._takes = set(inspect.signature(type(model).forward).parameters)
        self._types = next((name for name in TOKEN_TYPES if name in self._takes), None)
        self._positions: Callable[..., Any] | None = next(
            (module.get_rope_index for module in model.modules() if hasattr(module, "get_rope_index")), None
        )
        self._counts: dict[Size, int] = {}
        self._kept = MediaCache[dict[str, Tensor]](most_bytes, _size)
        self._examples: dict[str, Any] = {}
        for seed, size in enumerate(EXAMPLE_SIZES):
            name, image = _example_image(seed, size)
            self._examples[name] = image

    def column(self, names: Sequence[Sequence[str]] | None, columns: Columns, method: str) -> Columns:
        """The column of the images of a batch, by the names of its rows', if it may have some.

        Raises:
            ProtocolError: a row has another number of tokens for images than its images take.
        """
        rows = columns["input_ids"].shape[0]
        shown = image_column([()] * rows if names is None else list(names), self._tokens, self._token)
        expected_B = replaced_tokens(shown)
        found_B = ((columns["input_ids"] == self._token) & columns["attention_mask"].bool()).sum(-1).cpu()
        wrong = (expected_B != found_B).nonzero().squeeze(-1).tolist()
        if wrong:
            row = wrong[0]
            own = "no images" if names is None or not len(names[row]) else f"the images {tuple(names[row])}"
            raise ProtocolError(
                f"{method}: row {row} has {int(found_B[row])} tokens {self._token}, which stand for images, "
                f"and its non-tensor column {IMAGES!r} has {own}, which take {int(expected_B[row])}; {len(wrong)} rows "
                "are like that. Name all images of a row, in their order, and do not cut rows within an image"
            )
        return {} if names is None else {IMAGES: shown}

    def _tokens(self, size: Size) -> int:
        """How many tokens the features of an image replace."""
        if size not in self._counts:
            self._counts[size] = self._ids(self._processor.expansion(size)).count(self._token)
        return self._counts[size]

    def _ids(self, text: str) -> list[int]:
        found: list[int] = self._processor.processor.tokenizer.encode(text, add_special_tokens=False)
        return found

    def completed(self, micro: MicroBatch) -> MicroBatch:
        """With one more row, which shows an image and predicts one token, where other ranks may have images and this
        micro-batch has none."""
        if not self._in_step or IMAGES not in micro.columns or bool((micro[IMAGES][..., 2] >= 0).any()):
            return micro
        name = next(iter(self._examples))
        ids = self._ids(self._processor.expansion(size_of(name)))
        width_l, width_r = micro["input_ids"].shape[1], micro["responses"].shape[1]
        added = max(len(ids) - (width_l - width_r), 0)
        columns: Columns = {}
        for key, column in micro.columns.items():
            if key == IMAGES:
                row = torch.full((1, *column.shape[1:]), -1)
                row[:, :1] = image_column([[name]], self._tokens, self._token)
            else:
                column = functional.pad(column, (added, 0)) if key in SEQUENCE_COLUMNS else column
                row = torch.zeros_like(column[:1]) if len(column) else column.new_zeros(1, *column.shape[1:])
            columns[key] = torch.cat([column, row])
        end = width_l - width_r + added
        columns["input_ids"][-1, end - len(ids) : end] = columns["input_ids"].new_tensor(ids)
        columns["attention_mask"][-1, end - len(ids) : end + 1] = 1
        columns["position_ids"][-1] = (columns["attention_mask"][-1].cumsum(-1) - 1).clamp(min=0)
        columns["response_mask"][-1, 0] = True
        return replace(micro, columns=columns, is_plain=False)

    def filled(self, rows: ForwardPass, micro: MicroBatch) -> ForwardPass:
        """With everything that the model's forward takes."""
        inputs = dict(rows.inputs)
        if self._positions is not None:
            # Always said, or the model would take those of another call.
            inputs.setdefault("position_ids", micro["position_ids"])
        slots_bl = _slots(micro)
        if slots_bl is None:
            return replace(rows, inputs=inputs)
        places = slice(None) if rows.packed is None else rows.packed.cpu().numpy()
        inputs |= self._pixels(micro, _in_order(slots_bl.reshape(-1)[places]), self._takes)
        # What stands behind a row's end may look like an image.
        ids_bl = micro["input_ids"].masked_fill(~micro["attention_mask"].bool(), 0)
        if rows.packed is None:
            inputs["input_ids"] = ids_bl
        if self._types is not None:
            inputs[self._types] = self._types_of(inputs["input_ids"])
        if self._positions is not None:
            positions_Abl = self._positions_of(ids_bl, micro, _in_order(slots_bl))
            packed = rows.packed
            inputs["position_ids"] = positions_Abl if packed is None else positions_Abl.flatten(1)[:, None, packed]
        return replace(rows, inputs=inputs)

    def _positions_of(self, ids_bl: Tensor, micro: MicroBatch, slots: list[int]) -> Tensor:
        """[axes, b, l] as the model itself counts them in each row."""
        assert self._positions is not None, "the model has positions of one axis"
        takes = set(inspect.signature(self._positions).parameters)
        known = {"input_ids": ids_bl, "attention_mask": micro["attention_mask"], **self._pixels(micro, slots, takes)}
        known |= {name: self._types_of(ids_bl) for name in TOKEN_TYPES}
        positions_Abl: Tensor = self._positions(**{name: known[name] for name in takes & known.keys()})[0]
        return positions_Abl

    def _types_of(self, ids: Tensor) -> Tensor:
        known = [each for each in self._processor.processor.image_token_ids if each is not None]
        types: Tensor = torch.isin(ids, ids.new_tensor(known)).long()
        return types

    def _pixels(self, micro: MicroBatch, slots: Sequence[int], takes: set[str]) -> Columns:
        """What a function takes of images, by their places among all images [b * M] of a micro-batch."""
        images, device = micro[IMAGES].flatten(0, 1).numpy(), micro["input_ids"].device
        parts = [self._of(image_name(images[slot])) for slot in slots]
        joined = {name: _joined([part[name] for part in parts]) for name in parts[0].keys() & takes}
        return {name: self._cast(value).to(device) for name, value in joined.items()}

    def _cast(self, value: Tensor) -> Tensor:
        """A processor may choose a data type of its own."""
        return value.to(self._dtype) if value.is_floating_point() else value

    def _of(self, name: str) -> dict[str, Tensor]:
        """What the forward takes of one image."""
        kept = self._kept.get(name)
        return self._kept.put(name, self._made(name)) if kept is None else kept

    def _made(self, name: str) -> dict[str, Tensor]:
        try:
            image: Any = self._examples.get(name) or opened(self._source.read(name))
            if image.size != size_of(name):
                raise ImageError(f"its file has {image.size[0]} x {image.size[1]} pixels")
            made = self._processor.inputs([image])
        except Exception as error:
            raise ImageError(f"the image {name} cannot be shown to the model: {error}") from error
        return {key: value for key, value in made.items() if isinstance(value, Tensor) and key in self._takes}

    def examples(self) -> tuple[MicroBatch, list[dict[str, Any]]]:
        """Rows with and without images, on the CPU, and what the processor itself gives the model for each.

        The first three have the same text as far as they go; the second shows another image, and the fourth shows its
        second one in the response.

        Raises:
            ConfigError: the processor makes other tokens of a text than expected.
        """
        names, mark = list(self._examples), self._processor.placeholder
        texts = [(f"a{mark}bcde", [0]), (f"a{mark}bcde", [1]), (f"a{mark}bcdfgh", [0]), (f"{mark}c{mark}d", [1, 2])]
        texts.append(("hgfe", []))
        wholes = [self._processor.whole(text, [self._examples[names[i]] for i in shown]) for text, shown in texts]
        for (text, shown), whole in zip(texts, wholes, strict=True):
            expected = self._ids(self._processor.expanded(text, [names[i] for i in shown]))
            found = whole["input_ids"][0].tolist()
            if found[-len(expected) :] != expected:
                raise ConfigError(
                    f"{type(self._processor.processor).__name__} makes {len(found)} tokens of {text!r}, and "
                    f"{len(expected)} were expected of the images one by one"
                )
        shown_bM4 = image_column([[names[i] for i in shown] for _, shown in texts], self._tokens, self._token)
        rows = [whole["input_ids"][0] for whole in wholes]
        # The last row's second image, with what comes before it in its text, is in its response.
        first = int((rows[3] == self._token).nonzero()[self._tokens(EXAMPLE_SIZES[1]) - 1])
        ends = [len(rows[0]) - 3, len(rows[1]) - 3, len(rows[2]) - 4, first + 2, 1]
        micro = _micro_batch(rows, ends, shown_bM4)
        micro.columns["response_mask"] &= micro["responses"] != self._token
        kept = [{name: self._cast(value) for name, value in each.items() if name in self._takes} for each in wholes]
        return micro, kept


def _micro_batch(rows: Sequence[Tensor], ends: Sequence[int], images_bM4: Tensor) -> MicroBatch:
    """Rows whose prompts end at ``ends``."""
    p, r = max(ends), max(len(ids) - end for ids, end in zip(rows, ends, strict=True))
    ids_bl, attention_bl = torch.zeros(len(rows), p + r, dtype=torch.long), torch.zeros(len(rows), p + r).long()
    for row, (ids, end) in enumerate(zip(rows, ends, strict=True)):
        ids_bl[row, p - end : p - end + len(ids)] = ids
        attention_bl[row, p - end : p - end + len(ids)] = 1
    columns: Columns = {
        "input_ids": ids_bl,
        "attention_mask": attention_bl,
        "position_ids": (attention_bl.cumsum(-1) - 1).clamp(min=0),
        "responses": ids_bl[:, p:],
        "response_mask": attention_bl[:, p:].bool(),
        IMAGES: images_bM4,
    }
    return MicroBatch(torch.arange(len(rows)), columns)


def _slots(micro: MicroBatch) -> "np.ndarray[Any, Any] | None":
    """[b, l] the place among all images [b * M] of the one whose features replace a token, -1 for others; None where
    the micro-batch shows none."""
    if IMAGES not in micro.columns or not bool((micro[IMAGES][..., 2] >= 0).any()):
        return None
    images_bM4 = micro[IMAGES].numpy()
    slots_bl = np.full(micro["input_ids"].shape, -1, np.int64)
    ids_bl = micro["input_ids"].masked_fill(~micro["attention_mask"].bool(), -1).cpu().numpy()
    for row, (ids_l, images_M4) in enumerate(zip(ids_bl, images_bM4, strict=True)):
        places, images = at_features(ids_l, images_M4)
        slots_bl[row, places] = row * images_bM4.shape[1] + images
    return slots_bl


def _in_order(slots: "np.ndarray[Any, Any]") -> list[int]:
    """The different slots in the order in which they come."""
    return list(dict.fromkeys(slots[slots >= 0].tolist()))


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """One input of several images; those of different shapes are filled up with zeros, as processors do it."""
    shape = [max(sizes) for sizes in zip(*(each.shape[1:] for each in tensors), strict=True)]
    filled = []
    for tensor in tensors:
        missing = [size - own for size, own in zip(shape, tensor.shape[1:], strict=True)]
        filled.append(functional.pad(tensor, [each for size in reversed(missing) for each in (0, size)]))
    return torch.cat(filled)


def _size(made: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in made.values())


def _example_image(seed: int, size: Size) -> tuple[str, Any]:
    from PIL import Image

    data = random.Random(seed).randbytes(3 * size.width * size.height)
    return name_of(data, size, "png"), Image.frombytes("RGB", (size.width, size.height), data)
