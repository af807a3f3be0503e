import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import ConfigError, ToolContext, ToolError
from agentrl_tool_mcp.config import McpConfig, ServerConfig
from agentrl_tool_mcp.tool import McpTool

SERVER = Path(__file__).parent / "notes_server.py"


@pytest.fixture
def notes() -> ServerConfig:
    """A server over stdio, one process for each session."""
    return ServerConfig(command=[sys.executable, str(SERVER)])


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The same server over HTTP, one process for all sessions; its answers are events or, by parameter, JSON."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, str(SERVER), str(port), getattr(request, "param", "events")],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "running on" in line:
            break
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()
    process.stderr.close()


def stdio_servers() -> list[str]:
    """Ids of the stdio servers that this process started and that still run."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in children if Path(f"/proc/{pid}/cmdline").read_text().endswith("notes_server.py\0")]


@pytest.fixture
def running() -> Callable[[], Awaitable[list[str]]]:
    """Waits for the servers that are being started ahead; returns the ids of all that run."""

    async def wait() -> list[str]:
        await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name().startswith("open MCP server")))
        return stdio_servers()

    return wait


@pytest.fixture
def talk() -> Callable[..., list[str]]:
    """Makes calls as ``(instance, function, arguments)``; returns texts, and errors as ``ErrorClass: text``."""

    def run(servers: dict[str, ServerConfig], *calls: tuple[str, str, dict[str, Any]], **options: Any) -> list[str]:
        async def one(tool: McpTool, instance: str, function: str, arguments: dict[str, Any]) -> str:
            try:
                return (await tool.execute(instance, arguments, function=function)).response.text
            except (ToolError, ConfigError) as error:
                return f"{type(error).__name__}: {error}"

        async def main() -> list[str]:
            tool = McpTool(McpConfig(servers, **options), ToolContext("mcp"))
            texts = [await one(tool, *call) for call in calls]
            for instance in {instance for instance, _, _ in calls}:
                await tool.release(instance)
            await tool.close()
            return texts

        texts = asyncio.run(main())
        assert not stdio_servers()
        return texts

    return run
