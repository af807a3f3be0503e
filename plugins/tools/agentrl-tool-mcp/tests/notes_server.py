"""An MCP server for the tests: over stdio, or with a port over HTTP."""

import base64
import io
import os
import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import AudioContent, ImageContent, TextContent
from PIL import Image

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


@server.tool()
def picture(broken: bool = False) -> list[TextContent | ImageContent | AudioContent]:
    """Shows a note with its picture."""
    file = io.BytesIO()
    Image.new("RGB", (4, 3), "red").save(file, "PNG")
    data = base64.b64encode(b"nonsense" if broken else file.getvalue()).decode()
    return [
        TextContent(type="text", text="the note:"),
        TextContent(type="text", text="milk"),
        ImageContent(type="image", data=data, mime_type="image/png"),
        AudioContent(type="audio", data=data, mime_type="audio/wav"),
        TextContent(type="text", text="that is all"),
    ]


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
