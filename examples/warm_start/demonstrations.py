"""An agent loop that plays demonstrations: with the loss `sft`, a run trains on them instead of on its own samples."""

from typing import Any

from agentrl_core.api import AgentLoopBase, AgentLoopOutput, DataError, Message, Termination, TrajectorySession


class Demonstration(AgentLoopBase):
    """Returns the messages of a row's column `demonstration`; without one, the ground truth as the only answer.

    The tokens of the assistant's messages have mask 1, those of tools and users 0. The model is not asked.
    """

    capabilities = frozenset({"tools", "rewards"})

    async def run(
        self,
        sampling_params: dict[str, Any],
        *,
        session: TrajectorySession,
        raw_prompt: list[Message],
        demonstration: list[Message] | None = None,
        **row: Any,
    ) -> AgentLoopOutput:
        chat, tools = self.context.renderer, await session.open_tools()
        answers = demonstration or [{"role": "assistant", "content": str(row["reward_model"]["ground_truth"])}]
        messages, text = list(raw_prompt), chat.render(raw_prompt, tools, generation_prompt=True)
        prompt, segments = text, list[tuple[int, str]]()
        for message, following in zip(answers, [*answers[1:], None], strict=True):
            messages.append(message)
            prompts_next = following is not None and following["role"] == "assistant"
            longer = chat.render(messages, tools, generation_prompt=prompts_next)
            sampled = message["role"] == "assistant"
            if sampled:
                # The policy ends its turn with the stop token; the line break after it is the template's.
                longer = longer.rstrip()
            if not longer.startswith(text):
                raise DataError(f"the chat template rewrites the history at a message of role {message['role']!r}")
            segments.append((int(sampled), longer[len(text) :]))
            text = longer
        pieces = [(mask, chat.encode(added)) for mask, added in segments]
        ids = [id for _, piece in pieces for id in piece]
        return AgentLoopOutput(
            prompt_ids=chat.encode(prompt),
            response_ids=ids,
            response_mask=[mask for mask, piece in pieces for _ in piece],
            response_logprobs=None,
            termination=Termination.COMPLETED if len(ids) <= self.context.max_response_length else Termination.SKIPPED,
            num_turns=len(messages),
            reward_score=1.0,
            messages=messages,
            prompt_text=prompt,
            segments=segments,
        )
