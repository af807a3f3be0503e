"""An MCP server for the tests: over stdio, or with a port over HTTP."""

import os
import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("notes")
kept: list[str] = []


@server.tool()
def add(text: str, times: int = 1) -> str:
    """Adds a note."""
    kept.extend([text] * times)
    return f"{len(kept)} notes"


@server.tool()
def variable(name: str) -> str:
    """An environment variable of the server."""
    return os.environ.get(name, "none")


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ToolError("no such note")


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
def process() -> str:
    """The server's process."""
    return str(os.getpid())


@server.tool()
def long(size: int) -> str:
    """A long text."""
    return "x" * size


@server.tool(name="notes.change")
def change() -> str:
    """Takes `add` away."""
    server.remove_tool("add")
    return "changed"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]), json_response="json" in sys.argv)
    else:
        server.run("stdio")
