"""The yardstick: the same trajectories, token for token, from a loop without a framework.

Plain asyncio, one coroutine per trajectory. It renders once per turn, encodes only the text that is new (a prompt once
for all its samples), and has none of the things that a run needs: no deadlines, no checks, no mask, no records, no
lifecycle of tools, no routing.
"""

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from agentrl_core.api import InferenceEngine, SamplingParams, Tool

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class LeanLoop:
    """Runs the rows of one batch."""

    def __init__(self, tokenizer: Tokenizer, template: str, engine: InferenceEngine, tool: Tool, stop: str) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._template = environment.from_string(template)
        self._tokenizer = tokenizer
        self._engine = engine
        self._tool = tool
        self._stop = stop
        self._stop_id: int = tokenizer.token_to_id(stop)
        self._prompts: dict[str, list[int]] = {}

    async def run_all(self, rows: Sequence[dict[str, Any]], max_tokens: int) -> list[tuple[list[int], float]]:
        """Ids (prompt and response) and reward of every row."""
        return await asyncio.gather(*(self._run(row, max_tokens) for row in rows))

    async def _run(self, row: dict[str, Any], max_tokens: int) -> tuple[list[int], float]:
        request_id = f"train-1-{row['prompt_index']}-{row['sample_index']}-0"
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(self._stop_id,))
        messages = list(row["raw_prompt"])
        text = self._render(messages)
        if text not in self._prompts:
            self._prompts[text] = self._encode(text)
        ids = self._prompts[text]
        while True:
            output = await self._engine.generate(ids, params, request_id)
            ids = ids + list(output.token_ids)
            turn = self._tokenizer.decode(output.token_ids[:-1], skip_special_tokens=False)
            text += turn + self._stop
            calls = [json.loads(call) for call in _CALL.findall(turn)]
            if not calls:
                break
            content = turn[: turn.index("<tool_call>")].strip()
            messages.append({"role": "assistant", "content": content, "tool_calls": [{"function": c} for c in calls]})
            for call in calls:
                result = await self._tool.execute(request_id, call["arguments"])
                messages.append({"role": "tool", "content": result.response.text})
            full = self._render(messages)
            ids = ids + self._encode(full[len(text) :])
            text = full
        await self._engine.close_session(request_id)
        answer = turn.rpartition("####")[2].strip()
        return ids, float(answer == row["reward_model"]["ground_truth"])

    def _render(self, messages: list[dict[str, Any]]) -> str:
        return self._template.render(messages=messages, tools=[self._tool.schema], add_generation_prompt=True)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids
