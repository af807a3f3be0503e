"""The images that a trajectory shows: from what tools, environments and loops give, to names in messages."""

import asyncio
from collections.abc import Sequence
from typing import Any

from agentrl_core.api import EngineError, ImageError, Message
from agentrl_core.api.message_parts import image_part
from agentrl_core.api.tree import images_of
from agentrl_core.config.schema import ImagesConfig
from agentrl_core.engine_kit.images import read_image, shown_by
from agentrl_core.engine_kit.media import is_name
from agentrl_core.plugins.boundary import boundary
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.runs.media import RunImages

NO_IMAGES = "the model of model.path takes text alone (its directory has no processor of images), or the engine does"


class SessionImages:
    """The images of one trajectory.

    Args:
        media: of the run; None: it shows none.
        limits: ``model.images``.
        report: of the trajectory, which counts them.
    """

    def __init__(self, media: RunImages | None, limits: ImagesConfig, report: TrajectoryResult) -> None:
        self._media, self._limits, self._report = media, limits, report
        self._answered = (0, 0)
        """Nodes of the tree, and images of answers that are in none of them: those of the calls of one turn."""

    async def part(self, value: Any) -> dict[str, Any]:
        """See :meth:`TrajectorySession.image`."""
        if self._media is None:
            raise ImageError(NO_IMAGES)
        if is_name(value):
            await self._media.get([value])
            return image_part(value)
        # Pillow lets go of Python's lock while it decodes.
        image = await asyncio.to_thread(read_image, value, max_pixels=self._limits.max_pixels)
        # Nobody in the trajectory is to blame: it is retried, and no policy reads of a full disk.
        with boundary(EngineError, f"the image {image.name} cannot be kept:", keep=(ImageError,)):
            await self._media.put([image])
        self._report.count("images")
        return image_part(image.name)

    async def data(self, name: str) -> bytes:
        """See :meth:`TrajectorySession.image_bytes`."""
        if self._media is None:
            raise ImageError(NO_IMAGES)
        return (await self._media.get([name]))[name]

    async def named(self, messages: Sequence[Message]) -> list[Message]:
        """Messages whose images have names.

        Raises:
            ImageError: one cannot be read or shown.
        """
        return [
            {**message, "content": await self._parts(content)}
            if isinstance(content := message.get("content"), list | tuple)
            else message
            for message in messages
        ]

    async def content(self, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        """The content of an answer, with names; refuses more images than a conversation may have.

        Raises:
            ImageError: as :meth:`named`.
        """
        if isinstance(content, str):
            return content
        most, count = self._limits.max_count, sum(shown_by(part) is not None for part in content)
        nodes = self._report.tree.nodes
        count_of_nodes, waiting = self._answered
        waiting = waiting if count_of_nodes == len(nodes) else 0
        # Of the path that grew last.
        before = waiting + (len(images_of(nodes[-1].path)) if nodes else 0)
        if before + count > most and self._media is not None:
            raise ImageError(
                f"no more than {most} images can be shown in a conversation (model.images.max_count); it has {before}"
            )
        self._answered = len(nodes), waiting + count
        return await self._parts(content)

    async def _parts(self, parts: Sequence[Any]) -> list[Any]:
        return [part if (value := shown_by(part)) is None else await self.part(value) for part in parts]
