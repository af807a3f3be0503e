"""A renderer for every chat template, a policy that speaks by script, and hosts for it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import EngineError, ParsedText, PolicySpan, SamplingParams, TokenOutput, ToolCall, ToolParser
from agentrl_core.data.renderer import HFChatRenderer
from agentrl_core.rollout.identity import TrajectoryKey
from agentrl_core.rollout.trajectory import TrajectoryBuilder, TrajectoryLimits
from agentrl_core.testing.tiny_model import tiny_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
EXTRA_TOKENS = (
    "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>",
    "<end_of_turn>", "<|end|>", "<|User|>", "<|Assistant|>", "<|user|>", "<|assistant|>", "<|system|>",
    "<|observation|>", "[gMASK]", "<sop>",
)  # fmt: skip
EOS = {
    "mistral": "</s>",
    "llama3": "<|eot_id|>",
    "gemma": "</s>",
    "phi": "<|endoftext|>",
    "deepseek": "</s>",
    "chatglm": "<|user|>",
    "plain": "</s>",
}


def make_renderer(template: str, **kwargs: Any) -> HFChatRenderer:
    """The renderer of ``templates/<template>.jinja``."""
    text = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    tokenizer = tiny_tokenizer(
        text, extra_tokens=EXTRA_TOKENS, eos_token=EOS.get(template, "<|im_end|>"), bos_token="<s>"
    )
    return HFChatRenderer(tokenizer, kwargs)


class TagParser(ToolParser):
    """``<tool_call>{"name": …, "arguments": …}</tool_call>``, and nothing else."""

    def __init__(self) -> None:
        super().__init__(None, None)  # type: ignore[arg-type]

    def parse(self, text: str) -> ParsedText:
        content, *parts = text.split("<tool_call>")
        calls, errors = [], []
        for part in parts:
            try:
                call = json.loads(part.partition("</tool_call>")[0])
                calls.append(ToolCall(call["name"], call["arguments"]))
            except (ValueError, KeyError) as error:
                errors.append(f"unreadable call: {error}")
        return ParsedText(content.strip(), calls, errors)


class Policy:
    """Answers by script and keeps every request.

    Args:
        renderer: encodes the texts; special tokens in them are recognised.
        turns: texts, or whole outputs.
    """

    def __init__(self, renderer: HFChatRenderer, turns: Sequence[str | TokenOutput | Exception]) -> None:
        self.renderer = renderer
        self.turns = list(turns)
        self.requests: list[tuple[list[int], SamplingParams, str]] = []

    async def __call__(self, prompt_ids: list[int], params: SamplingParams, request_id: str) -> TokenOutput:
        self.requests.append((prompt_ids, params, request_id))
        if not self.turns:
            raise EngineError("nothing more was scripted")
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        return turn if isinstance(turn, TokenOutput) else self.output(turn, params.max_tokens)

    def output(self, text: str, max_tokens: int = 10_000, version: int = 7) -> TokenOutput:
        ids = self.renderer.encode(text)[:max_tokens]
        reason = "stop" if ids and ids[-1] in self.renderer.stop_token_ids else "length"
        log_probs = [-(position + 1) / 100 for position in range(len(ids))]
        return TokenOutput(ids, log_probs, reason, [PolicySpan(version, 0, len(ids))])


KEY = TrajectoryKey(run_seed=0, split="train", step=1, prompt=2, sample=3)
SCHEMA = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Calculates.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}


class Conversation:
    """A builder and the policy behind it."""

    def __init__(
        self,
        turns: Sequence[str | TokenOutput | Exception],
        *,
        template: str | HFChatRenderer = "qwen2",
        messages: Sequence[dict[str, Any]] = ({"role": "user", "content": "question"},),
        tools: Sequence[dict[str, Any]] = (SCHEMA,),
        response: int = 10_000,
        context: int = 20_000,
        template_break: Any = "fork",
        **kwargs: Any,
    ) -> None:
        self.renderer = make_renderer(template, **kwargs) if isinstance(template, str) else template
        self.policy = Policy(self.renderer, turns)
        self.builder = TrajectoryBuilder(
            KEY, messages, tools, self.renderer, TagParser(), TrajectoryLimits(response, context, template_break),
            self.policy,
        )  # fmt: skip

    @property
    def ids(self) -> list[int]:
        return self.builder.row.prompt_ids + self.builder.row.response_ids

    @property
    def text(self) -> str:
        return self.renderer.decode(self.ids)


@pytest.fixture
def conversation() -> Callable[..., Conversation]:
    return Conversation


@pytest.fixture
def render_with() -> Callable[..., HFChatRenderer]:
    return make_renderer


@pytest.fixture
def tag_parser() -> TagParser:
    return TagParser()


