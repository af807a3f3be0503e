"""Where requests wait while the engine takes none."""

import asyncio


class Gate:
    """Open unless somebody has closed it. Several may; it opens when the last of them opens it."""

    def __init__(self) -> None:
        self._closed_by: set[str] = set()
        self._waiting: dict[str, asyncio.Future[bool]] = {}

    def close(self, reason: str) -> None:
        """Nobody passes from now on."""
        self._closed_by.add(reason)

    def open(self, reason: str) -> None:
        """Take back :meth:`close`."""
        self._closed_by.discard(reason)
        if not self._closed_by:
            for turn in self._waiting.values():
                if not turn.done():
                    turn.set_result(True)

    async def enter(self, name: str) -> bool:
        """Wait until the gate is open. False where ``name`` was turned away meanwhile."""
        while self._closed_by:
            turn = self._waiting[name] = asyncio.get_running_loop().create_future()
            try:
                if not await turn:
                    return False
            finally:
                del self._waiting[name]
        return True

    def turn_away(self, name: str) -> bool:
        """Whether ``name`` was waiting."""
        turn = self._waiting.get(name)
        if turn is None or turn.done():
            return False
        turn.set_result(False)
        return True

    @property
    def waiting(self) -> list[str]:
        """Who waits."""
        return list(self._waiting)
