"""The images of rows: read and named before a run, read again when their rows are sampled."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl_core.api import DataError, HttpError, ImageError, Message, fetch
from agentrl_core.api.message_parts import content_of, image_part
from agentrl_core.config.schema import ImagesConfig
from agentrl_core.controller.event_loop import run_alone
from agentrl_core.data.rows import SOURCES, Row
from agentrl_core.engine_kit.images import MOST_BYTES, Image, read_image, shown_by, web_address
from agentrl_core.engine_kit.media import size_of

COLUMNS = ("images", "image")
OTHER_MEDIA = ("video", "videos", "audio", "audios")
MARK = "<image>"
FETCH_SECONDS = 30.0


class RowImages:
    """Gives the images of a row their names.

    Args:
        limits: ``model.images``.
        obstacle: why the run can show none; empty: it can.
        folders: where relative paths may begin.
    """

    def __init__(self, limits: ImagesConfig, obstacle: str, folders: Sequence[Path]) -> None:
        self._limits, self.obstacle, self._folders = limits, obstacle, folders

    def named(self, row: Row, where: str) -> Row:
        """The row with names in place of its images, and under :data:`SOURCES` what they are made of.

        Raises:
            DataError: an image cannot be read or is too large, there are too many, or prompt and images do not fit.
        """
        filled = [name for name in COLUMNS if row.get(name) is not None and not _is_empty(row[name])]
        if len(filled) > 1:
            raise DataError(f"{where}: it has images in the columns {' and '.join(filled)}; use one of them")
        given = row[filled[0]] if filled else None
        values = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
        messages, has_column = row["raw_prompt"], any(row.get(name) is not None for name in COLUMNS)
        if not values and not any(_has_images(message) for message in messages):
            if has_column and not self.obstacle:
                # A row of images that has lost them.
                _placed(messages, [], where)
            return row
        if self.obstacle:
            raise DataError(f"{where}: it has images, but {self.obstacle}")
        messages = _placed(messages, values, where) if has_column else messages
        sources: dict[str, Any] = {}
        named = [self._message(message, sources, f"{where}, message {n}") for n, message in enumerate(messages)]
        self._check(list(sources), sum(len(_shown(message)) for message in named), where)
        row = {name: value for name, value in row.items() if name not in COLUMNS}
        return {**row, "raw_prompt": named, "images": list(sources), SOURCES: sources}

    def of_episode(self, messages: Sequence[Message], where: str) -> list[Message]:
        """The first messages of an episode with names in place of their images, to see what the run makes of them.

        Raises:
            DataError: as :meth:`named`.
        """
        if not any(_has_images(message) for message in messages):
            return list(messages)
        if self.obstacle:
            raise DataError(f"{where}: it shows images, but {self.obstacle}")
        try:
            # What an episode shows is no path, and no address is fetched for it.
            named = [
                {**message, "content": [self._part_of_episode(part) for part in message["content"]]}
                if _has_images(message) else message
                for message in messages
            ]  # fmt: skip
        except ImageError as error:
            raise DataError(f"{where}: {error}") from error
        count = sum(len(_shown(message)) for message in named)
        if count > self._limits.max_count:
            raise DataError(f"{where}: {count} images, more than model.images.max_count={self._limits.max_count}")
        return named

    def _part_of_episode(self, part: Any) -> Any:
        if (value := shown_by(part)) is None:
            return part
        return image_part(read_image(value, max_pixels=self._limits.max_pixels).name)

    def _message(self, message: Message, sources: dict[str, Any], where: str) -> Message:
        if not isinstance(message.get("content"), list):
            return message
        parts = []
        for number, part in enumerate(message["content"]):
            if (value := shown_by(part)) is None:
                parts.append(part)
                continue
            try:
                image, source = self._read(value)
            except (ImageError, HttpError) as error:
                raise DataError(f"{where}, part {number}: {error}") from error
            sources[image.name] = source
            parts.append(image_part(image.name))
        return {**message, "content": parts}

    def _read(self, value: Any) -> tuple[Image, Any]:
        """The image, and what it can be read from again."""
        address = web_address(value)
        if address is not None and self._limits.urls:
            value = run_alone(fetch(address, timeout=FETCH_SECONDS, limit=MOST_BYTES))
        image = read_image(value, folders=self._folders, max_pixels=self._limits.max_pixels)
        while isinstance(value, Mapping) and not value.get("bytes"):
            value = value.get("path")
        # A path costs nothing; of other forms the file is kept, which is no larger than what the row had.
        return image, value if isinstance(value, str) and len(value) < 4096 and "base64," not in value else image

    def _check(self, names: Sequence[str], count: int, where: str) -> None:
        if count > self._limits.max_count:
            raise DataError(f"{where}: {count} images, more than model.images.max_count={self._limits.max_count}")
        pixels, most = sum(size.width * size.height for size in map(size_of, names)), self._limits.max_row_pixels
        if most is not None and pixels > most:
            raise DataError(
                f"{where}: its images have {pixels:,} pixels together, more than model.images.max_row_pixels={most:,}; "
                "raise it, or set model.images.max_pixels to scale them down"
            )

    def read_again(self, name: str, source: Any, where: str) -> Image:
        """The image of a row that is sampled now.

        Raises:
            DataError: it has changed since it got its name, or is gone.
        """
        if isinstance(source, Image):
            return source
        try:
            image = read_image(source, folders=self._folders, max_pixels=self._limits.max_pixels)
        except ImageError as error:
            raise DataError(f"{where}: {error}") from error
        if image.name != name:
            raise DataError(f"{where}: {source} has changed since the run started. Do not write to the data of a run")
        return image


def _is_empty(value: Any) -> bool:
    return isinstance(value, list | tuple) and not value


def _has_images(message: Message) -> bool:
    return isinstance(message.get("content"), list) and any(shown_by(part) is not None for part in message["content"])


def _shown(message: Message) -> list[Any]:
    content = message.get("content")
    return [part for part in content if shown_by(part) is not None] if isinstance(content, list) else []


def _placed(messages: Sequence[Message], values: Sequence[Any], where: str) -> list[Message]:
    """The messages with the images of a column in their places: where a text has ``<image>``, or a part of the type
    ``image`` says nothing else; where there is neither, before the text of the first user message."""
    rest = iter(values)
    places = 0

    def next_part() -> dict[str, Any]:
        nonlocal places
        places += 1
        return image_part(next(rest, None))

    def parts_of_text(text: str) -> list[str | dict[str, Any]]:
        first, *others = text.split(MARK)
        found: list[str | dict[str, Any]] = [first]
        for other in others:
            found += next_part(), other
        return found

    def placed(number: int, message: Message) -> Message:
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": content_of(parts_of_text(content))} if MARK in content else message
        parts: list[Any] = []
        for place, part in enumerate(content or []):
            text = part.get("text") if isinstance(part, Mapping) else None
            if not isinstance(text, str | None):
                raise DataError(
                    f"{where}, message {number}, part {place}: the text is {text!r:.100}; allowed: a string"
                )
            if isinstance(part, Mapping) and shown_by(part) == {}:
                parts.append(next_part())
            elif text is not None and MARK in text:
                parts += content_of([*parts_of_text(text), image_part("")])[:-1]
            else:
                parts.append(part)
        return {**message, "content": parts}

    found = [placed(number, message) for number, message in enumerate(messages)]
    if not places and values:
        at = next((number for number, each in enumerate(found) if each.get("role") == "user"), None)
        if at is None:
            raise DataError(f"{where}: it has images, and no user message that could show them")
        text = found[at].get("content") or ""
        after = [text] if isinstance(text, str) else text
        found[at] = {**found[at], "content": content_of([*map(image_part, values), *after])}
        places = len(values)
    if places != len(values):
        raise DataError(
            f"{where}: the prompt has {places} places of images ({MARK}, or parts of the type image), and the column "
            f"images has {len(values)}; there must be as many"
        )
    return found


def obstacle(model: str, engine: str, able: Sequence[str], has_capability: bool) -> str:
    """Why a run can show no images; empty: it can.

    Args:
        model: why its model can be shown none; empty: it can.
        engine: name of the run's.
        able: engines that are installed and have the capability.
        has_capability: this one has.
    """
    if model:
        return f"the model of model.path can be shown none: {model}. Choose another model, or remove the images"
    if not has_capability:
        return f"the engine {engine!r} lacks the capability 'images'; engines with it: {', '.join(able) or 'none'}"
    return ""
