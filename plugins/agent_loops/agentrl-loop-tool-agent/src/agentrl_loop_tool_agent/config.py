"""Options of the tool agent."""

from dataclasses import dataclass
from typing import Literal

from agentrl_core.api import option


@dataclass
class ToolAgentConfig:
    max_assistant_turns: int | None = option(None, ge=1, unit="turns", help="turns of the policy; null: no limit")
    max_user_turns: int | None = option(
        None, ge=0, unit="turns", help="answers of the interaction that are shown to the policy; null: no limit"
    )
    max_parallel_calls: int = option(
        4, ge=1, unit="calls", help="tool calls of one turn that are run; the others get an observation that says so"
    )
    max_tool_response_tokens: int = option(256, ge=1, unit="tokens", help="longest tool message; the rest is cut")
    tool_response_truncation: Literal["left", "right", "middle"] = option(
        "right", help="side that is cut: left keeps the tail, right keeps the head, middle keeps both ends"
    )
    max_invalid_calls: int | None = option(
        3, ge=1, unit="turns", help="turns in a row whose calls all failed, after which it ends; null: no limit"
    )
