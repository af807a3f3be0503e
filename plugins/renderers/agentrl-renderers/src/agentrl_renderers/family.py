"""A model family of PyPI's ``renderers`` package, which renders and parses without the chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from renderers import config_from_name, create_renderer
from renderers.base import ParsedToolCall, ToolCallParseStatus

from agentrl_core.api import (
    ChatRenderer,
    ConfigError,
    Conversation,
    Message,
    ParsedTurn,
    Rendered,
    Renderer,
    RendererContext,
    TemplateError,
    ToolCall,
)
from agentrl_renderers.config import FamilyConfig


class _Tokenizer:
    """The tokenizer as the package sees it: what users and tools say stays text when it is encoded."""

    def __init__(self, tokenizer: Any, chat: ChatRenderer) -> None:
        self._tokenizer = tokenizer
        self._chat = chat

    def __getattr__(self, name: str) -> Any:
        if name == "__call__":
            # The package would encode with it, for offsets that nothing here needs.
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **_: Any) -> list[int]:
        return self._chat.encode(text)


class FamilyRenderer(Renderer):
    """Renders, parses and bridges as the package does."""

    config: FamilyConfig

    def __init__(self, config: FamilyConfig, context: RendererContext) -> None:
        super().__init__(config, context)
        options = {**context.template_kwargs, **config.options}
        try:
            settings = type(config_from_name(config.family))(**options)
            self._family = create_renderer(_Tokenizer(context.tokenizer, context.chat), settings)
        except Exception as error:
            raise ConfigError(
                f"rollout.renderer.config: the renderers package has no renderer {config.family!r} with the options "
                f"{options} for the tokenizer of {context.model_path}: {error}"
            ) from error
        question: list[Message] = [{"role": "user", "content": "question"}]
        bare = self._ids(question, (), False)
        self._prompt = self._ids(question, (), True)[len(bare) :]

    @property
    def stop_token_ids(self) -> Sequence[int]:
        return tuple(self._family.get_stop_token_ids())

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, generation_prompt: bool = False
    ) -> Rendered:
        ids = self._ids(messages, tools, generation_prompt)
        return Rendered(ids, self.chat.decode(ids))

    def _ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], prompted: bool) -> list[int]:
        shown = [self.chat.from_outside(message) for message in messages]
        try:
            ids: list[int] = self._family.render_ids(shown, tools=list(tools) or None, add_generation_prompt=prompted)
        except Exception as error:
            roles = [message.get("role") for message in messages]
            raise TemplateError(
                f"the renderer {self.config.family!r} cannot render messages with the roles {roles}: {error}"
            ) from error
        return ids

    def parse(self, ids: Sequence[int], tools: Sequence[dict[str, Any]]) -> ParsedTurn:
        text = self.chat.decode(ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids)
        try:
            parsed = self._family.parse_response(list(ids), tools=list(tools) or None, prompt_ids=self._prompt)
        except Exception as error:  # noqa: BLE001 - a defect of the package must not end a trajectory
            return ParsedTurn(text, errors=[f"Error: this turn cannot be read: {error}"], text=text)
        calls = [
            ToolCall(call.name, call.arguments)
            for call in parsed.tool_calls
            if call.status is ToolCallParseStatus.OK and call.name and isinstance(call.arguments, dict)
        ]
        wrong = [call for call in parsed.tool_calls if call.status is not ToolCallParseStatus.OK]
        errors = [f"Error: invalid tool call: {call.status.value.replace('_', ' ')}" for call in wrong]
        reasoning = parsed.reasoning_content or ""
        # Without a readable call the text stays whole, so that the history still shows what was written.
        content = parsed.content if calls or not errors else text
        fields = {"reasoning_content": reasoning} if reasoning and content != text else {}
        return ParsedTurn(content, calls, errors, reasoning, self._places(ids, wrong, text), text, fields)

    def _places(self, ids: Sequence[int], calls: Sequence[ParsedToolCall], text: str) -> list[tuple[int, int]]:
        """The characters of these calls; empty where the package names no tokens for one."""
        places = []
        for call in calls:
            if call.token_span is None:
                return []
            start, end = (min(len(self.chat.decode(ids[:at])), len(text)) for at in call.token_span)
            places.append((start, max(start, end)))
        return places

    def bridge(
        self, so_far: Conversation, added: Sequence[Message], *, generation_prompt: bool = True
    ) -> Rendered | None:
        ids, turn = so_far.ids, so_far.turn_ids
        if not turn:
            return None
        shown = [self.chat.from_outside(message) for message in added]
        found = self._family.bridge_to_next_turn(
            ids[: len(ids) - len(turn)], turn, shown, tools=list(so_far.tools) or None
        )
        if found is None or list(found.token_ids[: len(ids)]) != ids:
            return None
        rest = list(found.token_ids[len(ids) :])
        if not generation_prompt:
            if rest[len(rest) - len(self._prompt) :] != self._prompt:
                return None
            rest = rest[: len(rest) - len(self._prompt)]
        return Rendered(rest, self.chat.decode(rest))
