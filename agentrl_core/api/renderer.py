"""The interface of renderers: from messages to tokens, and from what the policy sampled back to messages.

The default one, ``chat_template``, fills the model's chat template and reads turns with ``rollout.tool_parser``.
Another one suits a format whose control tokens carry meaning, or a family whose template rewrites history.

A renderer keeps no state between trajectories. One object serves all trajectories of an agent-loop worker, on its event
loop: its methods are plain ones and must be quick on turns of any length. ``parse`` never raises on what a model wrote.
Text of users, tools and environments is text: a renderer encodes what looks like a control token in it as ordinary
characters.

    class MyRenderer(Renderer):
        stop_token_ids = (2,)

        def render(self, messages, tools=(), *, generation_prompt=False):
            text = self.chat.render(messages, tools, generation_prompt=generation_prompt)
            return Rendered(self.chat.encode(text), text)

        def parse(self, ids, tools):
            text = self.chat.decode([id for id in ids if id not in self.stop_token_ids])
            return ParsedTurn(text, text=text)

        def bridge(self, so_far, added, *, generation_prompt=True):
            return None  # every message starts a new row
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from agentrl_core.api.agent_loop import ChatRenderer, Message
from agentrl_core.api.tool_parser import ParsedText, ToolParser
from agentrl_core.api.tree import Node, ids_of


class Rendered(NamedTuple):
    """Tokens that the policy did not sample, and their text as a person reads it.

    ``assumed``: they were not taken from the whole conversation, so :meth:`Renderer.check` is to look at them.
    ``images``: names of the images whose tokens are among them, in order. ``collapsed``: the ids with one placeholder
    for each of these; empty without images.
    """

    ids: list[int]
    text: str
    assumed: bool = False
    images: Sequence[str] = ()
    collapsed: Sequence[int] = ()


@dataclass(frozen=True)
class ParsedTurn(ParsedText):
    """One turn of the policy.

    Args:
        text: all of it, decoded without the stop token.
        fields: further fields of the assistant's message, as the family's chat templates read them (``thinking``).
    """

    text: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Conversation:
    """A trajectory so far.

    Args:
        messages: all of them; the last one is the turn that the policy has just sampled, as :class:`ParsedTurn` said.
        tools: function schemas that the model is shown.
        path: the nodes so far, from the prompt that the model sees to the newest one.
        generation_prompt: the last text that was rendered ended with a generation prompt.
        trajectory_id: for log lines.
    """

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]]
    path: Sequence[Node]
    generation_prompt: bool = True
    trajectory_id: str = ""

    @property
    def ids(self) -> list[int]:
        """All tokens."""
        return ids_of(self.path)

    @property
    def text(self) -> str:
        """All text."""
        return "".join(node.text for node in self.path)

    @property
    def turn_ids(self) -> list[int]:
        """What the policy sampled last; empty where a context is last."""
        return list(self.path[-1].ids) if self.path[-1].kind == "turn" else []


@dataclass(frozen=True)
class RendererContext:
    """What a renderer gets when it is built.

    Args:
        chat: the model's tokenizer and chat template.
        tokenizer: the transformers tokenizer of ``model.path``.
        parser: of ``rollout.tool_parser``; None where no tools are configured.
        model_path: directory of the model.
        template_kwargs: ``model.chat_template_kwargs``.
        base: the renderer ``chat_template`` of this model, for one that changes only a part of what it does.
    """

    chat: ChatRenderer
    tokenizer: Any
    parser: ToolParser | None = None
    model_path: str = ""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    base: "Renderer | None" = None


class Renderer(ABC):
    """Renders and parses. Built ``factory(config, context)`` with :class:`RendererContext`."""

    def __init__(self, config: Any, context: RendererContext) -> None:
        self.config = config
        self.context = context
        self.chat = context.chat

    @property
    @abstractmethod
    def stop_token_ids(self) -> Sequence[int]:
        """Ids that end a turn of the policy."""

    @abstractmethod
    def render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, generation_prompt: bool = False
    ) -> Rendered:
        """A whole conversation.

        Raises:
            TemplateError: it cannot be rendered.
        """

    @abstractmethod
    def parse(self, ids: Sequence[int], tools: Sequence[dict[str, Any]]) -> ParsedTurn:
        """One turn of the policy, with its stop token if it sampled one. ``error_spans`` are places in ``text``."""

    @abstractmethod
    def bridge(
        self, so_far: Conversation, added: Sequence[Message], *, generation_prompt: bool = True
    ) -> Rendered | None:
        """What follows the tokens so far when these messages are added; they include no turn of the policy.

        None where the tokens so far are no beginning of the new prompt, because history is rewritten: then
        ``rollout.template_break`` decides. The result closes a turn that was cut off.
        """

    def check(self, so_far: Conversation) -> bool:
        """Whether :meth:`bridge` was right; called once, at the end of a trajectory that used ``assumed`` tokens."""
        return True

    def lengths(self, prompts: Iterable[tuple[Sequence[Message], Sequence[dict[str, Any]]]]) -> list[int]:
        """Tokens of each prompt (messages, tools) with its generation prompt."""
        return [len(self.render(messages, tools, generation_prompt=True).ids) for messages, tools in prompts]

    @cached_property
    def stop_texts(self) -> dict[int, str]:
        """The text of each stop token."""
        return {stop: self.chat.decode([stop]) for stop in self.stop_token_ids}
