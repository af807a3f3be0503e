"""Images as models take them: what stands for them in the tokens of a prompt, and what their pixels become.

An image has a name, which says what it holds: ``<hash of its pixels' file>-<width>x<height>.png``. Messages, nodes and
batches carry names; the bytes behind a name are asked for where a model needs them. In the *rendered* text of a
conversation one placeholder stands for each image, and so it does in the *collapsed* ids that some engines take. The
*expanded* ids, those that a model computes and that are trained, have as many tokens as the image takes.

An engine's own interpreter imports this module: torch and transformers are imported where they are used.
"""

import hashlib
import io
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from agentrl_core.api.errors import ConfigError, EngineError, ImageError
from agentrl_core.api.message_parts import text_of

_T = TypeVar("_T")
_NAME = re.compile(r"[0-9a-f]{32}-(\d{1,6})x(\d{1,6})\.(png|jpeg)")
_PROCESSOR_FILES = "processor_config.json", "preprocessor_config.json"


class Size(NamedTuple):
    """Of an image, in pixels."""

    width: int
    height: int


def name_of(data: bytes, size: Size, kind: str) -> str:
    """The name of an image.

    Args:
        data: the file's bytes.
        kind: ``png`` or ``jpeg``.
    """
    return f"{hashlib.sha256(data).hexdigest()[:32]}-{size.width}x{size.height}.{kind}"


def is_name(value: Any) -> bool:
    """Whether a value has the form of an image's name."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def size_of(name: str) -> Size:
    """The size of an image, which its name says.

    Raises:
        ImageError: it is no name of an image.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise ImageError(f"{name!r:.100} is no name of an image; names look like <32 hex digits>-<width>x<height>.png")
    return Size(int(found[1]), int(found[2]))


def parts_of(message: Mapping[str, Any]) -> list[Any]:
    """The values of a message's parts that are images: their names, once they have one."""
    content = message.get("content")
    if not isinstance(content, list):
        return []
    return [part.get("image") for part in content if isinstance(part, Mapping) and part.get("type") == "image"]


def images_in(messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Names of the images of messages, in order.

    Raises:
        ImageError: a part of the type ``image`` has no name.
    """
    found = tuple([value for message in messages for value in parts_of(message)])
    if wrong := [value for value in found if not is_name(value)]:
        raise ImageError(
            f"a message has the image {wrong[0]!r:.100}, which has no name yet; an agent loop gets the part of a "
            "message from `await session.image(value)`"
        )
    return found


def without_images(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as text: an image is ``<image>``."""
    return [{**message, "content": text_of(message)} if parts_of(message) else dict(message) for message in messages]


def has_processor(path: str | Path) -> bool:
    """Whether a model's directory has the files of a processor of images."""
    return any((Path(path) / name).is_file() for name in _PROCESSOR_FILES)


def opened(data: bytes) -> Any:
    """The image of a file's bytes, as PIL has it, in RGB."""
    from PIL import Image

    return Image.open(io.BytesIO(data)).convert("RGB")


class MissingImagesError(EngineError):
    """A request names images that a server does not have. Its arguments are their names."""


def first_difference(found: Sequence[int], wanted: Sequence[int]) -> str:
    """Where the ids that an engine makes of a prompt are not those that it was asked for; empty where they agree."""
    for place, (own, other) in enumerate(zip(found, wanted, strict=False)):
        if own != other:
            return f"token {place} of the prompt is {own}, and not {other}"
    return "" if len(found) == len(wanted) else f"there are {len(found)} tokens, and not {len(wanted)}"


class MediaSource(Protocol):
    """Where the bytes of images are. May be passed to other processes."""

    def read(self, name: str) -> bytes:
        """The file of an image. May wait for another node.

        Raises:
            ImageError: there is none of this name.
        """
        ...

    async def get(self, names: Sequence[str]) -> dict[str, bytes]:
        """The files of images by name, without blocking the event loop.

        Raises:
            ImageError: one of them is not there.
        """
        ...


class MediaProcessor:
    """The processor of a vision-language model. Use :meth:`load`.

    Args:
        processor: a ``ProcessorMixin`` of transformers with an image processor.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self._expansions: dict[Size, str] = {}
        self._lock = threading.Lock()

    @classmethod
    def load(cls, path: str | Path, trust_remote_code: bool = False) -> "MediaProcessor | None":
        """That of a model's directory; None where the model takes text alone.

        Raises:
            ConfigError: the directory has a processor that cannot be loaded; says what is missing.
        """
        if not has_processor(path):
            return None
        try:
            processor = _load(str(path), trust_remote_code)
        except Exception as error:
            raise ConfigError(
                f"model.path: the processor of images in {path} cannot be loaded: {error}. `pip install "
                "'agentrl-core[vision]'` brings the packages that most processors need"
            ) from error
        if getattr(processor, "image_processor", None) is None or not getattr(processor, "image_token", None):
            return None
        return cls(processor)

    @property
    def placeholder(self) -> str:
        """What stands for an image in a rendered conversation."""
        return str(self.processor.image_token)

    @cached_property
    def reserved(self) -> tuple[int, ...]:
        """Ids that only images may bring into a prompt, in ascending order: engines never sample them."""
        tokenizer, processor = self.processor.tokenizer, self.processor
        added = set(tokenizer.get_added_vocab().values())
        ids = set(tokenizer.encode(self.placeholder + self.expansion(Size(64, 64)), add_special_tokens=False)) & added
        for kind in ("image", "video", "audio"):
            ids |= {each for each in getattr(processor, f"{kind}_token_ids", None) or () if each in added}
        return tuple(sorted(ids))

    def expansion(self, size: Size) -> str:
        """The text that takes the placeholder's place for an image of this size."""
        known = self._expansions.get(size)
        if known is None:
            from PIL import Image

            try:
                with self._lock:
                    found = self._processed([Image.new("RGB", size)], return_text_replacement_offsets=True)
                [[offsets]] = found["text_replacement_offsets"]
            except Exception as error:
                raise ImageError(
                    f"the model's processor, {type(self.processor).__name__}, refuses an image of "
                    f"{size.width}x{size.height} pixels: {error}"
                ) from error
            known = self._expansions[size] = str(offsets["replacement"])
        return known

    def expanded(self, text: str, images: Sequence[str]) -> str:
        """A rendered text with the expansions of these images, by name, in the places of its placeholders.

        Raises:
            ImageError: it has another number of placeholders.
        """
        pieces = text.split(self.placeholder)
        if len(pieces) != len(images) + 1:
            raise ImageError(
                f"the text has {len(pieces) - 1} placeholders of images, and there are {len(images)} images"
            )
        whole = [pieces[0]]
        for name, piece in zip(images, pieces[1:], strict=True):
            whole += self.expansion(size_of(name)), piece
        return "".join(whole)

    def inputs(self, images: Sequence[Any]) -> dict[str, Any]:
        """What the model's forward takes of some images of one conversation, PIL images in their order: tensors such as
        ``pixel_values`` and ``image_grid_thw``."""
        with self._lock:
            found = self._processed(images, return_tensors="pt")
        text = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
        return {name: value for name, value in found.items() if name not in text}

    def whole(self, text: str, images: Sequence[Any]) -> dict[str, Any]:
        """All that the model's forward takes of one rendered text with its PIL images, as the processor makes it."""
        with self._lock:
            return dict(self._processed(images, text, return_tensors="pt"))

    def _processed(self, images: Sequence[Any], text: str | None = None, **options: Any) -> Mapping[str, Any]:
        text = self.placeholder * len(images) if text is None else text
        # Of one conversation: some processors would take a flat list for one image each of several.
        result: Mapping[str, Any] = self.processor(text=[text], images=[list(images)] if images else None, **options)
        return result


def _load(path: str, trust_remote_code: bool) -> Any:
    from transformers import AutoProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import processor_class_from_name
    from transformers.utils import is_torchvision_available

    options = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    if is_torchvision_available():
        return AutoProcessor.from_pretrained(path, **options)
    # Processors that also take videos ask for torchvision, which images do not need: these are resized by PIL then.
    files = (Path(path) / name for name in (*_PROCESSOR_FILES, "tokenizer_config.json"))
    configs = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]
    name = next((config["processor_class"] for config in configs if config.get("processor_class")), "")
    cls = processor_class_from_name(name)
    if cls is None or "video_processor" not in cls.get_attributes():
        return AutoProcessor.from_pretrained(path, **options)

    class ImagesOnly(cls):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    from transformers import AutoImageProcessor

    parts = {
        "image_processor": AutoImageProcessor.from_pretrained(path, **options),
        "tokenizer": AutoTokenizer.from_pretrained(path, **options),
    }
    settings, _ = cls.get_processor_dict(path, local_files_only=True)
    return ImagesOnly.from_args_and_dict([parts.get(name) for name in cls.get_attributes()], settings)


class MediaCache(Generic[_T]):
    """What was read or made of images, by name: the most recently used, up to a number of bytes. For any thread.

    Args:
        most: bytes.
        size: of a value, in bytes.
    """

    def __init__(self, most: int, size: Callable[[_T], int]) -> None:
        self._most, self._size_of = most, size
        self._size = 0
        self._kept: OrderedDict[str, _T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str) -> _T | None:
        """None where it is not kept."""
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
            return self._kept.get(name)

    def put(self, name: str, value: _T) -> _T:
        """Keep the value, and let go of others; returns it."""
        with self._lock:
            if name not in self._kept:
                self._kept[name] = value
                self._size += self._size_of(value)
            while self._size > self._most and len(self._kept) > 1:
                self._size -= self._size_of(self._kept.popitem(last=False)[1])
        return value
