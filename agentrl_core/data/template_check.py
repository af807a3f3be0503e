"""Can a chat template, or another renderer, serve a multi-turn run? Answered by probing it, before anything starts.

A template is append-only when rendering a longer conversation starts with the rendering of the shorter one. Only then
does the prompt of turn N+1 start with the exact tokens of turn N; otherwise ``rollout.template_break`` decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl_core.api import Message, Renderer, TemplateError, function_schema

_SCHEMA = function_schema("probe_tool", "A probe.", {"value": {"type": "string", "description": "any text"}})
_USER: Message = {"role": "user", "content": "first question"}
_CALL: Message = {
    "role": "assistant",
    "content": "let me look",
    "tool_calls": [
        {
            "type": "function",
            "id": "call00001",
            "function": {"name": "probe_tool", "arguments": {"value": "probe value"}},
        }
    ],
}
_TOOL: Message = {"role": "tool", "name": "probe_tool", "tool_call_id": "call00001", "content": "tool result"}
_THINK: Message = {"role": "assistant", "content": "<think>\nsome thought\n</think>\n\nan answer"}
_PLAIN: Message = {"role": "assistant", "content": "an answer"}
_NEXT: Message = {"role": "user", "content": "second question"}


class Template(Protocol):
    """What can be probed: a :class:`ChatRenderer`, or the text of a renderer."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, generation_prompt: bool = False
    ) -> str: ...


@dataclass(frozen=True)
class RenderedText:
    """The text that a renderer writes, which need not be that of the model's chat template."""

    renderer: Renderer

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, generation_prompt: bool = False
    ) -> str:
        return self.renderer.render(messages, tools, generation_prompt=generation_prompt).text


@dataclass(frozen=True)
class TemplateReport:
    """What a chat template can do.

    Args:
        system: takes a system message.
        tools: renders tool schemas.
        tool_role: takes tool messages.
        breaks: transitions at which history is rewritten, each with the text where it first differs.
        rewrites: roles of the messages at which that happens.
    """

    system: bool
    tools: bool
    tool_role: bool
    breaks: tuple[str, ...]
    errors: tuple[str, ...] = ()
    rewrites: frozenset[str] = frozenset()

    @property
    def append_only(self) -> bool:
        return not self.breaks


def check_template(renderer: Template) -> TemplateReport:
    """Probe the template of a renderer.

    Raises:
        TemplateError: it cannot even render one user message.
    """
    plain = renderer.render([_USER], generation_prompt=True)
    errors: list[str] = []

    def renders(messages: list[Message], tools: list[dict[str, Any]]) -> str | None:
        try:
            return renderer.render(messages, tools)
        except TemplateError as error:
            errors.append(str(error))
            return None

    system = renders([{"role": "system", "content": "be brief"}, _USER], [])
    with_tools = renders([_USER], [_SCHEMA])
    with_role = renders([_USER, _CALL, _TOOL], [_SCHEMA])
    shows_tools = with_tools is not None and "probe_tool" in with_tools and "probe_tool" not in plain
    tool_role = with_role is not None and "tool result" in with_role
    breaks = _unfaithful(renderer)
    transitions: list[tuple[str, list[Message], list[Message], list[dict[str, Any]]]] = []
    transitions.append(("a user message after an answer", [_USER, _PLAIN], [_NEXT], []))
    transitions.append(("a user message after an answer with reasoning", [_USER, _THINK], [_NEXT], []))
    if tool_role:
        transitions.append(("a tool message after a call", [_USER, _CALL], [_TOOL], [_SCHEMA]))
        thought = {**_CALL, "content": f"{_THINK['content']}, let me look"}
        transitions.append(("a tool message after a call with reasoning", [_USER, thought], [_TOOL], [_SCHEMA]))
        later = [_USER, _CALL, _TOOL, _PLAIN]
        transitions.append(("a user message after a tool was used", later, [_NEXT], [_SCHEMA]))
    rewrites = {"user", "tool"} if breaks else set()
    for name, before, added, tools in transitions:
        if found := _break(renderer, name, before, added, tools):
            breaks.append(found)
            rewrites.add(added[0]["role"])
    return TemplateReport(system is not None, shows_tools, tool_role, tuple(breaks), tuple(errors), frozenset(rewrites))


def _unfaithful(renderer: Template) -> list[str]:
    """Answers that the template does not write into the history as the policy gave them."""
    prompt = renderer.render([_USER], generation_prompt=True)
    answers = [
        ("an answer", _PLAIN, "an answer", []),
        ("reasoning", _THINK, "some thought", []),
        ("text beside a call", _CALL, "let me look", [_SCHEMA]),
    ]
    found: list[str] = []
    for name, message, text, tools in answers:
        try:
            rendered = renderer.render([_USER, message], tools)
        except TemplateError:
            continue
        if text not in rendered:
            found.append(f"{name}: dropped from the history")
        elif message is _PLAIN and not rendered.startswith(prompt):
            found.append(f"{name}: its turn does not begin in the history as it was prompted, with {prompt[-40:]!r}")
    return found


def _break(
    renderer: Template, name: str, before: list[Message], added: list[Message], tools: list[dict[str, Any]]
) -> str:
    try:
        short, long = renderer.render(before, tools), renderer.render([*before, *added], tools)
    except TemplateError as error:
        return f"{name}: {error}"
    if long.startswith(short):
        return ""
    at = next((i for i, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), min(len(short), len(long)))
    if at >= max(short.rfind(text) + len(text) for text in ("an answer", "probe value")):
        # Only what closes the conversation has gone, such as a last end-of-sequence token.
        return ""
    return f"{name}: history changes from {short[at : at + 40]!r} to {long[at : at + 40]!r}"


def require_tool_role(renderer: Template) -> None:
    """Refuse a template that cannot carry tool messages.

    Raises:
        TemplateError: with what the template said, and what to do.
    """
    reason = ""
    try:
        if str(_TOOL["content"]) not in renderer.render([_USER, _CALL, _TOOL], [_SCHEMA], generation_prompt=True):
            reason = "the content of tool messages does not appear in its output"
    except TemplateError as error:
        reason = str(error)
    if reason:
        raise TemplateError(
            f"the run has tools, but the model's chat template rejects the tool role: {reason}; set "
            "model.chat_template to a file with a template that renders role 'tool', or choose another rollout.renderer"
        )
