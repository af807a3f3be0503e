"""The default renderer: the model's chat template, and a parser of text.

New messages are rendered alone where the template was proven to append only, otherwise with the whole conversation,
which is compared with the text so far; only the new text is encoded.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from agentrl_core.api import (
    Conversation,
    Message,
    NoConfig,
    ParsedTurn,
    Rendered,
    Renderer,
    RendererContext,
    ToolParser,
)
from agentrl_core.config.schema import ModelConfig, RendererSlot
from agentrl_core.data.bridge import turn_end
from agentrl_core.data.renderer import HFChatRenderer
from agentrl_core.engine_kit.media import MediaProcessor, images_in


def build_renderer(slot: RendererSlot, model: ModelConfig, parser: ToolParser | None) -> Renderer:
    """The renderer of a run.

    Raises:
        TemplateError: there is no tokenizer, or it has no chat template.
        PluginError: the plugin cannot be built.
    """
    chat = HFChatRenderer.from_config(model)
    base = ChatTemplateRenderer.of(chat, parser)
    context = RendererContext(chat, chat.tokenizer, parser, str(model.path), model.chat_template_kwargs, base)
    return cast(Renderer, slot.build(context))


def media_of(renderer: Renderer) -> MediaProcessor | None:
    """What the processor of a renderer's model says of images; None where the model takes text alone."""
    return getattr(renderer.chat, "media", None)


def reserved_of(renderer: Renderer) -> frozenset[int]:
    """Ids that only images bring into a prompt."""
    media = media_of(renderer)
    return frozenset() if media is None else frozenset(media.reserved)


class ChatTemplateRenderer(Renderer):
    """Fills the chat template; the parser reads the text of a turn."""

    chat: HFChatRenderer

    @classmethod
    def of(cls, chat: HFChatRenderer, parser: ToolParser | None = None) -> "ChatTemplateRenderer":
        """The renderer over a tokenizer that is loaded already."""
        return cls(NoConfig(), RendererContext(chat, chat.tokenizer, parser))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self.chat.stop_token_ids

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, generation_prompt: bool = False
    ) -> Rendered:
        if images := images_in(messages):
            text = self.chat.render(messages, tools, generation_prompt=generation_prompt)
            return self._rendered(text, images)
        if generation_prompt:
            text, ids = self.chat.render_prompt(messages, tools)
        else:
            text = self.chat.render(messages, tools)
            ids = self.chat.encode(text)
        return Rendered(ids, self.chat.shown(text))

    def _rendered(self, text: str, images: Sequence[str], assumed: bool = False) -> Rendered:
        if not images:
            return Rendered(self.chat.encode(text), self.chat.shown(text), assumed)
        # The samples of a group share their prompt.
        ids = self.chat.encode_prompt(self.chat.expanded(text, images))
        return Rendered(ids, self.chat.shown(text), assumed, images, self.chat.encode_prompt(text))

    def parse(self, ids: Sequence[int], tools: Sequence[dict[str, Any]]) -> ParsedTurn:
        text = self.chat.decode(ids[:-1] if self._stop(ids) else ids)
        if self.context.parser is None or not tools:
            return ParsedTurn(text, text=text)
        found = self.context.parser.parse_turn(text, tools)
        # Without a readable call the text stays whole, so that the history still shows what was written.
        content = found.content if found.calls else text
        return ParsedTurn(content, found.calls, found.errors, found.reasoning, found.error_spans, text)

    def bridge(
        self, so_far: Conversation, added: Sequence[Message], *, generation_prompt: bool = True
    ) -> Rendered | None:
        def whole() -> str | None:
            messages = [*so_far.messages, *added]
            full = self.chat.render(messages, so_far.tools, generation_prompt=generation_prompt)
            return self._suffix(so_far, full)

        suffix = self.chat.bridge.text(
            so_far.messages[-1],
            added,
            generation_prompt=generation_prompt,
            stopped=bool(self._stop(so_far.turn_ids)),
            whole=whole,
        )
        framed = suffix is not None
        if suffix is None and (suffix := whole()) is None:
            return None
        return self._rendered(suffix, images_in(added), framed)

    def check(self, so_far: Conversation) -> bool:
        """One whole rendering shows whether what followed each turn was right."""
        sampled = so_far.messages[-1].get("role") == "assistant"
        prompted = so_far.generation_prompt and not sampled
        whole = self.chat.shown(self.chat.render(so_far.messages, so_far.tools, generation_prompt=prompted))
        right = self.chat.bridge.is_rendering_of(whole, so_far, self.chat.shown)
        if not right:
            self.chat.bridge.distrust(so_far.trajectory_id)
        return right

    def lengths(self, prompts: Iterable[tuple[Sequence[Message], Sequence[dict[str, Any]]]]) -> list[int]:
        def texts() -> Iterator[str]:
            for messages, tools in prompts:
                text = self.chat.render(messages, tools, generation_prompt=True)
                yield self.chat.expanded(text, images_in(messages))

        return self.chat.lengths(texts())

    def _stop(self, ids: Sequence[int]) -> str:
        """The text of the stop token at the end; empty without one."""
        return self.stop_texts.get(ids[-1], "") if ids else ""

    def _suffix(self, so_far: Conversation, full: str) -> str | None:
        """The text that ``full`` adds to what is there; None where the template has rewritten history."""
        if (suffix := self.chat.after(full, so_far.text)) is not None:
            return suffix
        # The template writes the last turn in its own words (spacing of a call, say). What follows the turn is the
        # template's in any case, and what the policy wrote stays as sampled.
        stop_text, messages = self._stop(so_far.turn_ids), so_far.messages
        before = messages[:-1] if messages[-1].get("role") == "assistant" else messages
        rendered = self.chat.render(before, so_far.tools, generation_prompt=so_far.generation_prompt)
        alone = self.chat.render(messages, so_far.tools)
        if not alone.startswith(rendered) or not full.startswith(rendered):
            return None
        rest, stops = full[len(rendered) :], list(self.stop_texts.values())
        if (found := turn_end(alone[len(rendered) :], rest, stops, messages[-1])) is None:
            return None
        end, stop = found
        # The token that ended the turn is there already if the policy sampled it; where nothing ends a turn, it may be
        # the head of what follows.
        return rest[end:].removeprefix(stop or stop_text) if stop_text else rest[end:]
