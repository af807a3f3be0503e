"""Options of the tools."""

from dataclasses import dataclass

from agentrl_core.api import option


@dataclass
class ShownConfig:
    documents: int = option(3, ge=1, le=100, help="documents that a call returns")
    max_characters: int = option(2000, ge=10, unit="characters", help="text that the model sees of each document")
    description: str = option(
        "Searches a collection of documents and returns the ones that fit a query best.",
        help="what the model is told about the tool",
    )


@dataclass(kw_only=True)
class SearchConfig(ShownConfig):
    index: str = option(path=True, help="directory that `agentrl search-index` made")


@dataclass(kw_only=True)
class RemoteSearchConfig(ShownConfig):
    url: str = option(help="address of the retriever, with its path: http://127.0.0.1:8000/retrieve")
    timeout: float = option(20.0, gt=0, unit="seconds", help="time limit of a request, its queue included")
    max_concurrent: int = option(32, ge=1, help="concurrent requests of each agent-loop worker")
    max_body_bytes: int = option(4 * 2**20, ge=1, unit="bytes", help="longest answer of the retriever, decompressed")
