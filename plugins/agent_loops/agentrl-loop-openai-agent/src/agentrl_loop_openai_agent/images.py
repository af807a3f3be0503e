"""The images of a conversation, in the forms in which the protocols send them and by name as they are recorded."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_core.api import HttpError, ImageError, Message, TrajectorySession, fetch
from agentrl_core.engine_kit.images import MOST_BYTES, data_url, shown_by, web_address

FETCH_SECONDS = 30.0


class ShownImages:
    """Gives the images of requests their names. A client sends its history again and again; each image is read once.

    Args:
        session: keeps the images.
    """

    def __init__(self, session: TrajectorySession) -> None:
        self._session = session
        self._known: dict[bytes, dict[str, Any]] = {}

    async def named(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with names in place of their images.

        Raises:
            ImageError: one cannot be read or fetched, there are too many, or the model takes text alone.
        """
        contents = [content for message in messages if isinstance(content := message.get("content"), list)]
        count, most = sum(shown_by(part) is not None for parts in contents for part in parts), self._session.max_images
        if most is not None and count > most:
            # Before they are read: a small file can hold many pixels.
            raise ImageError(f"the conversation has {count} images, more than model.images.max_count={most}")
        found = []
        for index, message in enumerate(messages):
            if isinstance(content := message.get("content"), list):
                where = f"messages[{index}].content"
                parts = [await self._named(f"{where}[{number}]", part) for number, part in enumerate(content)]
                message = {**message, "content": parts}
            found.append(message)
        return found

    async def _named(self, where: str, part: Mapping[str, Any]) -> Mapping[str, Any]:
        value = shown_by(part)
        if value is None:
            return part
        if isinstance(value, Mapping):
            value = value.get("url")
        if not isinstance(value, str) or not value:
            raise ImageError(f"{where}: the image has neither data nor an address; files by id are not supported")
        key = hashlib.sha256(value.encode("utf-8", "surrogatepass")).digest()
        if key not in self._known:
            try:
                self._known[key] = await self._session.image(await self._fetched(value))
            except (ImageError, HttpError) as error:
                raise ImageError(f"{where}: {error}") from error
        return self._known[key]

    async def _fetched(self, value: str) -> str | bytes:
        address = web_address(value) if self._session.fetch_images else None
        if address is None:
            return value
        # Who writes to an agent may choose the address.
        return await fetch(address, timeout=FETCH_SECONDS, limit=MOST_BYTES, public_only=True)


async def as_sent(messages: Sequence[Message], session: TrajectorySession) -> list[Message]:
    """Messages with images by name, such as a row's prompt, as an OpenAI client sends them.

    Raises:
        ImageError: there is no image of a name.
    """

    async def sent(part: Any) -> Any:
        name = shown_by(part)
        if name is None:
            return part
        return {"type": "image_url", "image_url": {"url": data_url(name, await session.image_bytes(name))}}

    return [
        {**message, "content": [await sent(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
