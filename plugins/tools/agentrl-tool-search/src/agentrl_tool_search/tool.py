"""Search tools: the model gives a query and sees documents."""

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl_core.api import (
    ConfigError,
    HttpError,
    Tool,
    ToolContext,
    ToolError,
    ToolResponse,
    ToolResult,
    ToolUnavailableError,
    fetch_json,
    function_schema,
)
from agentrl_tool_search.config import RemoteSearchConfig, SearchConfig, ShownConfig
from agentrl_tool_search.index import open_index


class _Search(Tool):
    config: ShownConfig

    def __init__(self, config: ShownConfig, context: ToolContext) -> None:
        super().__init__(config, context)
        query = {"query": {"type": "string", "description": "what to look for"}}
        self.schema = function_schema("search", config.description, query)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any) -> ToolResult:
        query = parameters.get("query")
        if not isinstance(query, str) or not query.strip():
            raise ToolError('search takes one argument, the non-empty string "query"')
        texts = await self.find(query)
        shown = [f"[{number}] {self._cut(text)}" for number, text in enumerate(texts, start=1)]
        return ToolResult(
            ToolResponse("\n\n".join(shown) or "[no documents found]"), metrics={"hits": float(len(texts))}
        )

    @abstractmethod
    async def find(self, query: str) -> Sequence[str]:
        """Documents, best first."""

    def _cut(self, text: str) -> str:
        limit = self.config.max_characters
        return text if len(text) <= limit else f"{text[:limit]} [the rest was cut]"


class SearchTool(_Search):
    """Searches an index of ``agentrl search-index``.

    Raises:
        ConfigError: there is no such index.
    """

    config: SearchConfig

    def __init__(self, config: SearchConfig, context: ToolContext) -> None:
        super().__init__(config, context)
        self._index = open_index(Path(config.index))

    async def find(self, query: str) -> Sequence[str]:
        return [hit.text for hit in await asyncio.to_thread(self._index.search, query, self.config.documents)]


class RemoteSearchTool(_Search):
    """Asks a retriever over HTTP.

    It posts ``{"queries": [query], "topk": …, "return_scores": true}`` and expects
    ``{"result": [[{"document": {"contents": …}, "score": …}, …]]}``.
    """

    config: RemoteSearchConfig

    def __init__(self, config: RemoteSearchConfig, context: ToolContext) -> None:
        super().__init__(config, context)
        if not config.url.startswith(("http://", "https://")):
            raise ConfigError(f"url: {config.url!r} is not an address such as http://127.0.0.1:8000/retrieve")
        self._slots = asyncio.Semaphore(config.max_concurrent)

    async def find(self, query: str) -> Sequence[str]:
        body = {"queries": [query], "topk": self.config.documents, "return_scores": True}
        try:
            answer = await fetch_json(
                self.config.url,
                json=body,
                timeout=self.config.timeout,
                limit=self.config.max_body_bytes,
                slots=self._slots,
            )
            (hits,) = answer["result"]
            # Without scores, as some servers answer, a hit is the document itself.
            texts = [hit.get("document", hit)["contents"] for hit in hits]
            if wrong := [text for text in texts if not isinstance(text, str)]:
                raise TypeError(f"the contents {wrong[0]!r:.100} are no text")
            return texts[: self.config.documents]
        except (HttpError, ValueError, KeyError, TypeError, AttributeError) as error:
            found = isinstance(error, HttpError)
            what = str(error) if found else f"{self.config.url}: {type(error).__name__}: {error}"
            raise ToolUnavailableError(f"no usable answer from the retriever {what}") from error
