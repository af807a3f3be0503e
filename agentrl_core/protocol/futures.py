"""The result of a non-blocking call to a worker group, usable as an argument of the next one."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from agentrl_core.protocol.dataproto import DataProto

T = TypeVar("T")


class GroupFuture(Generic[T]):
    """What the ranks of one call will return.

    ``parts`` holds one handle per rank (the backend's own kind), ``fetch`` waits for the handles' values and
    ``collect`` makes one result of them.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        fetch: Callable[[Sequence[Any]], list[Any]],
        collect: Callable[[list[Any]], T],
    ) -> None:
        self.parts = list(parts)
        self._fetch = fetch
        self._collect = collect
        self._result: list[T] = []

    def get(self) -> T:
        """Waits for all ranks; the result is collected once. Raises what the call raised."""
        if not self._result:
            self._result.append(self._collect(self._fetch(self.parts)))
        return self._result[0]


class DataProtoFuture(GroupFuture[DataProto]):
    """A batch that is still being made: rank i's part goes straight to rank i of the next group of the same size.

    ``rows`` is the number of rows if the parts are what `DataProto.chunk` would make of them; None: they are not.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        fetch: Callable[[Sequence[Any]], list[Any]],
        collect: Callable[[list[Any]], DataProto],
        rows: int | None = None,
    ) -> None:
        super().__init__(parts, fetch, collect)
        self.rows = rows

    def passes_through(self, chunks: int) -> bool:
        """Whether ``chunks`` workers can take the parts as they are, so that nobody fetches them in between."""
        return self.rows is not None and chunks == len(self.parts)
