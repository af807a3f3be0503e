"""What the entry points name."""

from agentrl_core.api import PluginSpec
from agentrl_tool_search.config import RemoteSearchConfig, SearchConfig

SEARCH = PluginSpec(
    kind="tool",
    name="search",
    api_version=1,
    summary="finds documents of a local corpus, by BM25",
    config=SearchConfig,
    factory="agentrl_tool_search.tool:SearchTool",
)
REMOTE_SEARCH = PluginSpec(
    kind="tool",
    name="remote_search",
    api_version=1,
    summary="finds documents through a retriever over HTTP, as Search-R1's servers are",
    config=RemoteSearchConfig,
    factory="agentrl_tool_search.tool:RemoteSearchTool",
)
