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


@dataclass
class MultiAgentConfig(ToolAgentConfig):
    trained: list[str] | None = option(
        None,
        help="names of the agents that are trained; the rows of the others are only recorded; null: all agents",
    )


SUMMARY_INSTRUCTION = (
    "The context is nearly full. Summarise the work so far for yourself: what was found, what was tried without "
    "success, and what is to be done next. You will go on with the task and this summary alone. Do not call a tool now."
)


@dataclass
class CompactingToolAgentConfig(ToolAgentConfig):
    compact_below: int = option(
        512,
        ge=1,
        unit="tokens",
        help="ask for a summary when less than this would be left in the row; the instruction and the summary must fit "
        "into it",
    )
    max_compactions: int = option(
        3, ge=0, help="summaries per trajectory; each one begins a row with a new rollout.max_response_length"
    )
    max_summary_tokens: int = option(256, ge=1, unit="tokens", help="longest summary; a longer one is cut and used")
    summary_instruction: str = option(SUMMARY_INSTRUCTION, help="user message that asks the policy for the summary")
    keep_messages: int = option(
        0,
        ge=0,
        unit="messages",
        help="last messages that the new row repeats after the summary, extended back to the turn of the policy that "
        "they answer; the last turn and its answers are always repeated",
    )
