"""A renderer for every chat template, a policy that speaks by script, and hosts for it."""

import functools
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import (
    EngineContext,
    EngineError,
    ParsedText,
    PolicySpan,
    SamplingParams,
    TokenOutput,
    ToolCall,
    ToolParser,
)
from agentrl_core.api.tree import Request
from agentrl_core.config import Config, Slot, load_config
from agentrl_core.controller import LocalRuntime
from agentrl_core.data.chat_template import ChatTemplateRenderer
from agentrl_core.data.renderer import HFChatRenderer
from agentrl_core.data.rows import PromptBatch
from agentrl_core.hosting.tools import HostedTool
from agentrl_core.plugins import resolution
from agentrl_core.plugins.resolution import resolve
from agentrl_core.rollout.identity import TrajectoryKey
from agentrl_core.rollout.manager import AgentLoopManager
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.rollout.session import HostedInteraction, RolloutSession, SessionEnvironment
from agentrl_core.rollout.trajectory import TrajectoryBuilder, TrajectoryLimits
from agentrl_core.rollout.worker import AgentLoopWorker
from agentrl_core.serving.replicas import EngineReplicas
from agentrl_testing.tiny_model import tiny_tokenizer

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
            KEY, messages, tools, ChatTemplateRenderer.of(self.renderer, TagParser()),
            TrajectoryLimits(response, context, template_break), self._sample,
        )  # fmt: skip

    async def _sample(self, *request: Any) -> tuple[TokenOutput, Request]:
        return await self.policy(*request), Request(0, 0.0, 0.0, 0.0)

    @property
    def ids(self) -> list[int]:
        return self.builder.row.prompt_ids + self.builder.row.response_ids

    @property
    def text(self) -> str:
        return self.renderer.decode(self.ids)


@pytest.fixture(scope="session")
def conversation() -> Callable[..., Conversation]:
    return Conversation


@pytest.fixture(scope="session")
def render_with() -> Callable[..., HFChatRenderer]:
    return make_renderer


@pytest.fixture
def tag_parser() -> TagParser:
    return TagParser()


@pytest.fixture(scope="session")
def renderer() -> HFChatRenderer:
    """ChatML with tools; append-only."""
    return make_renderer("qwen2")


class MakeSlot:
    """``make_slot(ToolSlot, source, "Name", timeout=1)``: a resolved slot whose plugin is an object of a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = 0

    def __call__(self, slot: type[Slot], source: str, obj: str, **fields: Any) -> Any:
        self.files += 1
        file = self.folder / f"plugin_{self.files}.py"
        file.write_text(textwrap.dedent(source), encoding="utf-8")
        made = slot(name=f"./{file.name}:{obj}", **fields)
        made.resolved = resolve(slot.kind, made.name, base_dir=self.folder)
        return made

    def registered(self, slot: type[Slot], name: str, **fields: Any) -> Any:
        """The same for an installed plugin, with its default options."""
        plugin = resolve(slot.kind, name)
        made = slot(name=name, **fields)
        made.resolved, made.config = plugin, fields.get("config", plugin.spec.config())
        return made


@pytest.fixture
def make_slot(tmp_path: Path) -> MakeSlot:
    return MakeSlot(tmp_path)


class RecordingServers:
    """Stands in for the engines of a session."""

    def __init__(self, sample: Any = None) -> None:
        self.sample = sample
        self.calls: list[tuple[str, str]] = []

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> TokenOutput:
        output: TokenOutput = await self.sample(list(prompt_ids), params, request_id)
        return output

    async def open_session(self, session_id: str) -> None:
        self.calls.append(("open", session_id))

    async def close_session(self, session_id: str) -> None:
        self.calls.append(("close", session_id))


@pytest.fixture
def make_session(renderer: HFChatRenderer) -> Callable[..., RolloutSession]:
    """A session with these hosted tools and interactions; ``extra_info`` by keyword."""

    def make(
        tools: Sequence[HostedTool] = (),
        interactions: Mapping[str, HostedInteraction] | None = None,
        servers: Any = None,
        key: TrajectoryKey = KEY,
        **extra_info: Any,
    ) -> RolloutSession:
        environment = SessionEnvironment(
            renderer=ChatTemplateRenderer.of(renderer, TagParser()),
            limits=TrajectoryLimits(10_000, 20_000),
            servers=servers or RecordingServers(),
            tools={tool.name: tool for tool in tools},
            interactions=interactions or {},
        )
        return RolloutSession(key, {"extra_info": extra_info}, environment)

    return make


class Rollout:
    """A manager with its workers on the local runtime, and prompts for it."""

    def __init__(self, config: Config, max_model_len: int = 4096) -> None:
        self.config = config
        self.runtime = LocalRuntime()
        context = EngineContext(
            config.model.path, max_model_len=max_model_len, vocab_size=261, nodes=config.rollout.engine.nodes
        )
        self.replicas = EngineReplicas(self.runtime, config, context)
        self.manager = AgentLoopManager(config, self.runtime, self.replicas)
        self.replicas.start()

    @property
    def workers(self) -> list[AgentLoopWorker]:
        return [worker._instance for worker in self.manager._workers]

    @property
    def engines(self) -> list[Any]:
        return [server._instance._engine for server in self.replicas.servers]

    def loop(self, name: str) -> Any:
        """The agent loop of that name in the first worker."""
        return self.workers[0]._loops[name]

    def tool(self, name: str) -> Any:
        """The tool of that name in the first worker."""
        return self.workers[0]._environment.tools[name].tool

    def __call__(self, rows: Sequence[dict[str, Any]], n: int = 1, step: int = 1) -> list[TrajectoryResult]:
        repeated = [
            {**row, "uid": f"p{prompt}", "prompt_index": prompt, "sample_index": sample}
            for prompt, row in enumerate(rows)
            for sample in range(n)
        ]
        prompts = PromptBatch(repeated, step, "train", {"temperature": 1.0})
        return self.manager.generate_sequences(prompts)

    def close(self) -> None:
        self.manager.close()
        self.replicas.close()
        self.runtime.shutdown()


@pytest.fixture(scope="session")
def installed() -> Callable[[], list[Any]]:
    """The installed plugins, searched once for all tests: a search costs more than most tests."""
    return functools.cache(resolution.registrations)


@pytest.fixture
def make_rollout(
    tiny_run: Any, installed: Callable[[], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Rollout]]:
    """A rollout of a tiny run: changes of its configuration by dotted key, files by name."""
    monkeypatch.setattr(resolution, "registrations", installed)
    made: list[Rollout] = []

    def make(changes: Mapping[str, Any], files: Mapping[str, str] | None = None, **fields: Any) -> Rollout:
        for name, source in (files or {}).items():
            (tiny_run.folder / name).write_text(textwrap.dedent(source), encoding="utf-8")
        settings = {"rollout.engine": {"name": "scripted"}, "rollout.max_response_length": 500, **changes}
        made.append(Rollout(load_config(tiny_run(settings)), **fields))
        return made[-1]

    yield make
    for rollout in made:
        rollout.close()


def row(content: str = "question", truth: str = "1", **fields: Any) -> dict[str, Any]:
    """A dataset row."""
    return {
        "raw_prompt": [{"role": "user", "content": content}],
        "data_source": "tests",
        "reward_model": {"ground_truth": truth},
        **fields,
    }


@pytest.fixture
def make_row() -> Callable[..., dict[str, Any]]:
    return row
