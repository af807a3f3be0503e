"""Options of the OpenAI agent."""

from dataclasses import dataclass
from typing import Any, Literal

from agentrl_core.api import option


@dataclass
class OpenAIAgentConfig:
    agent: str = option(
        code=True,
        help="the async function: 'package.module:function', or 'file.py:function' relative to the config file",
    )
    kwargs: dict[str, Any] = option(default_factory=dict, help="further arguments of the function")
    host: str = option("127.0.0.1", help="address that the endpoint listens on; agents elsewhere need another one")
    max_body_bytes: int = option(32 * 2**20, ge=1, unit="bytes", help="longest request, with its images")
    max_connections: int = option(4096, ge=1, help="connections at a time, per worker; more are closed")
    unenforced: Literal["refuse", "accept"] = option(
        "refuse",
        help="what to do with requests for a response_format that the engine cannot enforce, for a forced tool call or "
        "chat_template_kwargs: answer with status 400, or sample as if they did not ask",
    )
    max_branches: int = option(64, ge=1, help="branches per trajectory; a request that needs one more is refused")
