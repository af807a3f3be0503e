"""Options of the tool."""

from dataclasses import dataclass

from agentrl_core.api import option


@dataclass
class ServerConfig:
    command: list[str] = option(default_factory=list, help="program and arguments of a server that speaks over stdio")
    url: str | None = option(None, help="address of a server that speaks streamable HTTP")
    env: list[str] = option(
        default_factory=list, help="environment variables that the program gets in addition to PATH, HOME and the like"
    )
    cwd: str | None = option(None, help="working directory of the program; null: that of the run")
    headers: dict[str, str] = option(default_factory=dict, help="HTTP headers; write secrets as ${oc.env:NAME}")
    tools: list[str] = option(default_factory=list, help="tools that the model may call; empty: all of the server")


@dataclass
class McpConfig:
    servers: dict[str, ServerConfig] = option(help="the servers by a name of your choice")
    session: str = option(
        "trajectory",
        choices=("trajectory", "shared"),
        help="trajectory: each has its own session; shared: those of a worker share one, for servers without state",
    )
    ready: int = option(
        0,
        ge=0,
        unit="sessions",
        help="sessions of each server that a worker opens ahead, each for one trajectory (session=trajectory only)",
    )
    prefix: bool = option(False, help="call a function SERVER_TOOL instead of TOOL, for servers with the same names")
    start_timeout: float = option(
        20.0, gt=0, unit="seconds", help="time limit for a session to open and list its tools, its queue included"
    )
    max_body_bytes: int = option(
        4 * 2**20, ge=1, unit="bytes", help="longest answer of a server, and of one at url longest event, decompressed"
    )
    max_starting: int = option(8, ge=1, help="sessions that open concurrently in each agent-loop worker")
