"""Images from outside, of any form, made into files that every part of a run reads the same way.

A file is kept byte for byte where it is an upright PNG or JPEG in RGB within the limits; everything else becomes such a
PNG: other formats, transparency (on white), photos with a rotation, images that are larger than ``max_pixels``.
"""

import base64
import binascii
import io
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from agentrl_core.api.errors import ImageError
from agentrl_core.api.message_parts import IMAGE_TYPES
from agentrl_core.engine_kit.media import Size, name_of

MOST_BYTES = 64 << 20
"""Of the file of one image."""
MOST_PIXELS = 50_000_000
"""Of one image, before it is scaled down."""
MOST_SIDE = 999_999
"""Pixels of a row or column of an image, which its name has room for."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_PNG_END = b"IEND\xaeB`\x82"
_ORIENTATION = 0x0112
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)
_WEB = ("http://", "https://")
_FORMS = "a pathlib.Path, bytes, a data URL, base64, {'bytes': …}, {'path': …} or a PIL image"


class Image(NamedTuple):
    """An image that a model can be shown.

    Args:
        name: see :mod:`agentrl_core.engine_kit.media`.
        data: of a PNG or JPEG file, in RGB.
    """

    name: str
    data: bytes

    @property
    def kind(self) -> str:
        """``png`` or ``jpeg``."""
        return self.name.rpartition(".")[2]

    @property
    def data_url(self) -> str:
        """The image as text."""
        return data_url(self.name, self.data)


def data_url(name: str, data: bytes) -> str:
    """An image as text.

    Args:
        name: whose ending says the format.
    """
    return f"data:image/{name.rpartition('.')[2]};base64,{base64.b64encode(data).decode()}"


def read_image(value: Any, *, folders: Sequence[Path] = (), max_pixels: int | None = None) -> Image:
    """Read an image.

    Args:
        value: a path, bytes, a data URL, base64, a dict with one of these under ``bytes``, ``path`` or ``url``, a PIL
            image, or an array [height, width, 3] of uint8.
        folders: where a relative path may begin; none: texts that are paths are refused, for values that others chose.
        max_pixels: larger images are scaled down to so many; None: they stay as they are.

    Raises:
        ImageError: it cannot be read, has an animation, or is too large.
    """
    # The image first: to look whether it is an array, too, copies its pixels, and raises where they are damaged.
    if hasattr(value, "getexif") and hasattr(value, "convert"):
        _check(value)
        return _made(value, max_pixels)
    if hasattr(value, "__array_interface__"):
        image = _of_array(value)
        _check(image)
        return _made(image, max_pixels)
    return _of_file(source_bytes(value, folders), max_pixels)


def shown_by(part: Any) -> Any:
    """What the image of a message's part is made of, in the forms of OpenAI, Anthropic, MCP and transformers; None for
    a part that is no image."""
    if not isinstance(part, Mapping) or part.get("type") not in IMAGE_TYPES:
        return None
    source = part.get("source")
    if isinstance(source, Mapping):
        # Anthropic.
        return source.get("data") or source.get("url") or {}
    keys = ("image", "image_url", "url", "path", "bytes", "base64", "data")
    return next((part[key] for key in keys if part.get(key) is not None), {})


def web_address(value: Any) -> str | None:
    """The address of an image that must be fetched; None for one that is here."""
    while isinstance(value, Mapping):
        value = next((value[key] for key in ("url", "image_url", "path") if value.get(key)), None)
    return value if isinstance(value, str) and value.startswith(_WEB) else None


def source_bytes(value: Any, folders: Sequence[Path]) -> bytes:
    """The bytes of the file that a value stands for.

    Raises:
        ImageError: as :func:`read_image`.
    """
    if isinstance(value, Mapping):
        found = next((value[key] for key in ("bytes", "path", "url", "image_url", "image") if value.get(key)), None)
        if found is None:
            raise ImageError(f"found {value!r:.100}; allowed: {_FORMS}")
        return source_bytes(found, folders)
    if isinstance(value, os.PathLike):
        # Code of this process made it: a text of a model, a client or a row is none.
        text = os.fspath(value)
        data = _read(_path(text, folders) or Path(text))
    elif isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
    elif not isinstance(value, str):
        raise ImageError(f"found a {type(value).__name__}; allowed: {_FORMS}")
    elif value.startswith(_WEB):
        raise ImageError(f"{value:.200}: addresses are not fetched; set model.images.urls=true if they may be")
    elif found := _DATA_URL.match(value):
        data = _decoded(value[found.end() :])
    elif (path := _path(value, folders)) is not None:
        data = _read(path)
    elif folders and "." in value:
        # Which base64 has none of.
        raise ImageError(f"{value:.200}: no such file, looked for in {', '.join(map(str, folders))}")
    else:
        data = _decoded(value)
    if len(data) > MOST_BYTES:
        raise ImageError(f"the file has {len(data):,} bytes; at most {MOST_BYTES:,} are read")
    return data


def _path(value: str, folders: Sequence[Path]) -> Path | None:
    if len(value) > 4096 or "\0" in value:
        return None
    for folder in folders:
        path = folder / value.removeprefix("file://")
        try:
            if path.is_file():
                return path
        except OSError:
            # Too long for a name.
            return None
    return None


def _read(path: Path) -> bytes:
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise ImageError(f"{path}: the file has {size:,} bytes; at most {MOST_BYTES:,} are read")
        return path.read_bytes()
    except OSError as error:
        raise ImageError(f"{path}: cannot be read: {error}") from error


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"{text[:60]!r} is no image; allowed: {_FORMS}") from error


def _pil() -> Any:
    try:
        from PIL import Image as pil
    except ImportError as error:
        raise ImageError("images need Pillow: pip install 'agentrl-core[vision]'") from error
    pil.init()
    return pil


def _of_array(value: Any) -> Any:
    try:
        return _pil().fromarray(value)
    except (TypeError, ValueError, KeyError) as error:
        raise ImageError(f"an array that is no image: {error}; allowed: uint8 of [height, width, 3]") from error


def _check(image: Any) -> None:
    """Refuse an image that is too large, or an animation, before its pixels are read."""
    size = Size(*image.size)
    if not size.width or not size.height:
        raise ImageError(f"the image has {size.width}x{size.height} pixels")
    if size.width * size.height > MOST_PIXELS:
        raise ImageError(
            f"the image has {size.width}x{size.height} pixels; at most {MOST_PIXELS // 1_000_000} million are read. "
            "Make it smaller"
        )
    if max(size) > MOST_SIDE:
        raise ImageError(
            f"the image has {size.width}x{size.height} pixels; at most {MOST_SIDE:,} are read in a row or a column"
        )
    # A phone keeps a second picture behind the photo, which is no animation.
    if getattr(image, "format", None) != "MPO" and getattr(image, "n_frames", 1) > 1:
        raise ImageError(f"the image has {image.n_frames} frames; animations are not shown. Choose one of them")


def _of_file(data: bytes, max_pixels: int | None) -> Image:
    pil = _pil()
    try:
        image = pil.open(io.BytesIO(data), formats=FORMATS)
        _check(image)
        image.load()
    except ImageError:
        raise
    except Exception as error:
        # Pillow's readers raise what the damage leads to.
        raise ImageError(f"not an image that can be read: {type(error).__name__}: {error}") from error
    size = Size(*image.size)
    fits = max_pixels is None or size.width * size.height <= max_pixels
    plain = image.mode == "RGB" and image.format in ("PNG", "JPEG") and "transparency" not in image.info
    # Pillow does without the end of a PNG, other readers may not.
    whole = image.format != "PNG" or _PNG_END in data[-64:]
    if fits and plain and whole and image.getexif().get(_ORIENTATION, 1) == 1:
        return Image(name_of(data, size, image.format.lower()), data)
    return _made(image, max_pixels)


def _made(image: Any, max_pixels: int | None) -> Image:
    """A PNG in RGB."""
    pil = _pil()
    from PIL import ImageOps

    try:
        image = ImageOps.exif_transpose(image)
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            over = image.convert("RGBA")
            image = pil.new("RGB", image.size, "white")
            image.paste(over, mask=over.getchannel("A"))
        elif image.mode.startswith("I;16") or image.mode in ("I", "F"):
            raise ImageError(f"the image has the mode {image.mode}, more than 8 bits a channel; convert it")
        image = image.convert("RGB")
        if max_pixels is not None and image.width * image.height > max_pixels:
            factor = (max_pixels / (image.width * image.height)) ** 0.5
            size = max(1, int(image.width * factor)), max(1, int(image.height * factor))
            image = image.resize(size, pil.Resampling.LANCZOS)
        file = io.BytesIO()
        image.save(file, "PNG", compress_level=1)
    except ImageError:
        raise
    except Exception as error:
        raise ImageError(f"not an image that can be shown: {type(error).__name__}: {error}") from error
    return Image(name_of(file.getvalue(), Size(*image.size), "png"), file.getvalue())
