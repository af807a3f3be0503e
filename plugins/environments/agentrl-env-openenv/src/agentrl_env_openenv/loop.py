"""An agent loop that plays the tokens of traces; the model is not asked."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from agentrl_core.api import AgentLoopBase, AgentLoopOutput, ConfigError, Message, Termination, TrajectorySession


class TrainingTraceLoop(AgentLoopBase):
    """Returns the column ``token_rows`` of a row that ``agentrl openenv-trace read`` wrote, with its reward."""

    async def run(
        self,
        sampling_params: dict[str, Any],
        *,
        session: TrajectorySession,
        raw_prompt: list[Message],
        token_rows: Sequence[dict[str, Any]] = (),
        trace_reward: float | None = None,
        **row: Any,
    ) -> list[AgentLoopOutput]:
        if not token_rows:
            raise ConfigError("training_trace: a row has no token_rows. Make rows with `agentrl openenv-trace read`")
        decode, longest = self.context.renderer.decode, self.context.max_response_length
        fits = all(len(each["response_ids"]) <= longest for each in token_rows)
        outputs = [
            AgentLoopOutput(
                **each,
                termination=Termination.COMPLETED if fits else Termination.SKIPPED,
                reward_score=trace_reward,
                messages=raw_prompt,
                prompt_text=decode(each["prompt_ids"]),
                error=None if fits else f"longer than rollout.max_response_length={longest}",
            )
            for each in token_rows
        ]
        for output in outputs:
            ids = iter(output.response_ids)
            for mask, part in groupby(output.response_mask):
                output.segments.append((mask, decode([next(ids) for _ in part])))
        texts = [text for output in outputs for mask, text in output.segments if mask]
        for output in outputs:
            output.turn_texts, output.full_text = texts, "".join(text for _, text in output.segments)
        return outputs
