"""The tool agent whose context is summarised where it is nearly full.

    processing_tools | interacting ──┬── enough is left ─> generating
                                     └── too little ─────> compacting ──> generating, in a new row

The policy writes the summary, as a turn that is trained. The new row begins with the prompt, the summary, and the last
turn with its answers, which the old row had no room for.
"""

import logging
from collections.abc import Sequence
from typing import Any

from agentrl_core.api import AgentLoopContext, AgentLoopOutput, Message, Termination
from agentrl_loop_tool_agent.config import CompactingToolAgentConfig
from agentrl_loop_tool_agent.loop import CUT, Episode, State, ToolAgentLoop

logger = logging.getLogger(__name__)
HEADING = "Summary of your work so far:"
"""Stands before the summary in the new row."""
POSTPONED = "[shown after the summary]"
"""What the old row shows in place of the tool messages that only the new one has."""


class CompactingEpisode(Episode):
    """An episode that goes on in a new row where its context is nearly full."""

    config: CompactingToolAgentConfig

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.compactions = 0
        self.cut_summaries = 0
        self._answers: list[Message] = []
        self._first = len(self.raw_prompt)

    def extend(self, messages: Sequence[Message]) -> State | None:
        """Compact the context first, where these messages would leave too little of it."""
        left = self.trajectory.remaining - sum(self._num_tokens(message) for message in messages)
        if left >= self.config.compact_below or self.compactions == self.config.max_compactions:
            return super().extend(messages)
        self._answers = list(messages)
        return self.compacting

    async def compacting(self) -> State | None:
        """Ask for a summary, and begin a row with it and the answers that are still to be shown."""
        # A template may refuse a call without a response.
        postponed = [answer | {"content": POSTPONED} for answer in self._answers if answer["role"] == "tool"]
        conversation = [*self.trajectory.messages, *self._answers]
        instruction: Message = {"role": "user", "content": self.config.summary_instruction}
        if not self.trajectory.add_messages([*postponed, instruction]):
            return super().extend(self._answers)
        longest = min(
            self.config.max_summary_tokens, self.sampling_params.get("max_tokens") or self.trajectory.remaining
        )
        self.turn = await self.trajectory.generate({**self.sampling_params, "max_tokens": longest})
        if self.turn.finish_reason == "abort" or not self.turn.token_ids:
            return self.terminated(self.turn.termination)
        self.compactions += 1
        summary = self.turn.content or self.turn.text
        if self.turn.finish_reason == "length":
            self.cut_summaries += 1
            summary = f"{summary}\n{CUT['right']}"
        prompt = self._prompt(summary)
        self.start([*prompt, *self._kept(conversation)])
        self._first = len(prompt)
        return self.generating if self.trajectory.remaining > 0 else self.terminated(Termination.LENGTH)

    def finish(self) -> list[AgentLoopOutput]:
        rows = super().finish()
        for row in rows:
            row.metrics |= {"compactions": float(self.compactions), "cut_summaries": float(self.cut_summaries)}
        return rows

    def _prompt(self, summary: str) -> list[Message]:
        """The row's messages with the summary; in the last user message, because some templates refuse two of them."""
        text = f"{HEADING}\n{summary}"
        *before, last = self.raw_prompt
        if last["role"] != "user":
            return [*self.raw_prompt, {"role": "user", "content": text}]
        content = last["content"]
        joined = f"{content}\n\n{text}" if isinstance(content, str) else [*content, {"type": "text", "text": text}]
        return [*before, last | {"content": joined}]

    def _kept(self, conversation: Sequence[Message]) -> Sequence[Message]:
        """The end of the conversation, from a turn of the policy on; the prompt is not part of it."""
        start = max(self._first, len(conversation) - max(self.config.keep_messages, len(self._answers) + 1))
        while start > self._first and conversation[start]["role"] != "assistant":
            start -= 1
        return conversation[start:]

    def _num_tokens(self, message: Message) -> int:
        """Tokens of the content of a message, without what the chat template writes around it."""
        content = message["content"]
        parts = [{"text": content}] if isinstance(content, str) else content
        return sum(
            self.renderer.image_tokens(part["image"]) if part.get("type") == "image"
            else len(self.renderer.encode(part.get("text", "")))
            for part in parts
        )  # fmt: skip


class CompactingToolAgentLoop(ToolAgentLoop):
    """The tool agent, with summaries in place of a full context."""

    episode = CompactingEpisode

    def __init__(self, config: CompactingToolAgentConfig, context: AgentLoopContext) -> None:
        super().__init__(config, context)
        if config.max_compactions and config.compact_below >= context.max_response_length:
            logger.warning(
                "compacting_tool_agent: compact_below=%d is not less than rollout.max_response_length=%d: every turn "
                "is followed by a summary, up to max_compactions=%d. Lower it, or raise rollout.max_response_length",
                config.compact_below, context.max_response_length, config.max_compactions,
            )  # fmt: skip
