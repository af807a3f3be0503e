"""The content of messages that show images: a list of parts, of which each is a text or an image."""

from collections.abc import Mapping, Sequence
from typing import Any

IMAGE_TYPES = ("image", "image_url", "input_image")
"""Of parts that show an image, in the forms of OpenAI, Anthropic, MCP and transformers."""


def image_part(value: Any) -> dict[str, Any]:
    """The part that shows an image.

    Args:
        value: its name, or what it is made of.
    """
    return {"type": "image", "image": value}


def content_of(parts: Sequence[str | dict[str, Any]]) -> str | list[dict[str, Any]]:
    """The content of texts and of parts that are images: one text where all of them are texts."""
    if all(isinstance(part, str) for part in parts):
        return "".join(map(str, parts))
    found = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [part for part in found if part.get("type") != "text" or part.get("text")]


def shown_parts(value: Any) -> list[str | dict[str, Any]] | None:
    """The texts and images of a value that shows images: a PIL image, a list of texts and PIL images, or a list of
    parts, each of the type ``text`` or one of :data:`IMAGE_TYPES`. None for any other value."""
    items = list(value) if isinstance(value, list | tuple) else [value]
    parts: list[str | dict[str, Any]] = []
    for item in items:
        kind = item.get("type") if isinstance(item, Mapping) else None
        if kind == "text" and isinstance(item.get("text"), str):
            parts.append(item["text"])
        elif kind in IMAGE_TYPES and any(key in item for key in ("image", "image_url", "source")):
            parts.append(dict(item))
        elif hasattr(item, "getexif") and hasattr(item, "convert"):
            parts.append(image_part(item))
        elif isinstance(item, str):
            parts.append(item)
        else:
            return None
    shows = not all(isinstance(part, str) for part in parts)
    return parts if shows or (parts and all(isinstance(item, Mapping) for item in items)) else None


def text_of(message: Mapping[str, Any]) -> str:
    """The content of a message as text; an image is ``<image>``."""
    content = message.get("content")
    if not isinstance(content, list):
        return str(content or "")
    parts = [part if isinstance(part, Mapping) else {"text": part} for part in content]
    return "".join("<image>" if part.get("type") == "image" else str(part.get("text", part)) for part in parts)
