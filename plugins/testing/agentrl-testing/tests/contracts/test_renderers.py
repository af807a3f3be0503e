import dataclasses
import json
import random

import pytest

from agentrl_core.api import ParsedText, Rendered, ToolCall, ToolParser
from agentrl_core.data.chat_template import ChatTemplateRenderer
from agentrl_core.data.plugin import CHAT_TEMPLATE
from agentrl_testing.contracts import RendererCase, RendererContract
from agentrl_testing.tiny_model import renderer_context


class Tags(ToolParser):
    """``<tool_call>{"name": …, "arguments": …}</tool_call>``, and nothing else."""

    def __init__(self):
        super().__init__(None, None)

    def parse(self, text):
        content, *parts = text.split("<tool_call>")
        calls, errors = [], []
        for part in parts:
            body, closing, _ = part.partition("</tool_call>")
            try:
                call = json.loads(body if closing else "")
                calls.append(ToolCall(call["name"], call["arguments"]))
            except (ValueError, KeyError, TypeError) as error:
                errors.append(f"unreadable call: {error}")
        return ParsedText(content.strip() if calls else text, calls, errors)


class TestChatTemplate(RendererContract):
    @pytest.fixture
    def plugin(self):
        return RendererCase(CHAT_TEMPLATE, context=renderer_context(parser=Tags()))


class NoStop(ChatTemplateRenderer):
    stop_token_ids = ()


class Random(ChatTemplateRenderer):
    def render(self, messages, tools=(), *, generation_prompt=False):
        ids, _, _ = super().render(messages, tools, generation_prompt=generation_prompt)
        ids = [*ids, random.randrange(200)]
        return Rendered(ids, self.chat.decode(ids))


class Short(ChatTemplateRenderer):
    def lengths(self, prompts):
        return [length - 1 for length in super().lengths(prompts)]


class Trusting(ChatTemplateRenderer):
    """Control tokens in what users say are control tokens."""

    def render(self, messages, tools=(), *, generation_prompt=False):
        ids, text, _ = super().render(messages, tools, generation_prompt=generation_prompt)
        return Rendered(self.chat.encode(text), text)


class Stops(ChatTemplateRenderer):
    """The stop token is part of the answer."""

    def parse(self, ids, tools):
        text = self.chat.decode(ids)
        return dataclasses.replace(super().parse(ids, tools), text=text, content=text)


class Deaf(ChatTemplateRenderer):
    def parse(self, ids, tools):
        return super().parse(ids, [])


class Silent(ChatTemplateRenderer):
    """Drops what it cannot read."""

    def parse(self, ids, tools):
        parsed = super().parse(ids, tools)
        return parsed if parsed.calls else dataclasses.replace(parsed, content="", errors=[])


class Raises(ChatTemplateRenderer):
    def parse(self, ids, tools):
        if ids[-1:] != [self.stop_token_ids[0]]:
            raise ValueError("not ended")
        return super().parse(ids, tools)


class Forgets(ChatTemplateRenderer):
    def bridge(self, so_far, added, *, generation_prompt=True):
        return super().bridge(so_far, [{**each, "content": ""} for each in added], generation_prompt=generation_prompt)


class LeavesOpen(ChatTemplateRenderer):
    def bridge(self, so_far, added, *, generation_prompt=True):
        found = super().bridge(so_far, added, generation_prompt=generation_prompt)
        stop = self.stop_token_ids[-1]
        ids = [id for at, id in enumerate(found.ids) if at or id not in self.stop_token_ids]
        assert stop
        return Rendered(ids, self.chat.decode(ids))


BROKEN = {
    "test_stop_tokens_have_a_text": [NoStop],
    "test_a_rendering_is_its_ids_and_their_text": [Random],
    "test_lengths_are_those_of_the_prompts": [Short],
    "test_what_others_say_is_text": [Trusting],
    "test_an_answer_is_its_content": [Stops],
    "test_a_call_comes_back_as_written": [Deaf, Stops],
    "test_a_call_that_is_cut_off_is_never_lost": [Silent],
    "test_anything_can_be_read": [Raises],
    "test_what_follows_a_turn_is_what_the_whole_conversation_says": [Forgets],
    "test_a_turn_that_was_cut_off_is_closed": [LeavesOpen],
}


def test_every_check_catches_a_broken_renderer(spec, catches) -> None:
    context = renderer_context(parser=Tags())
    cases = {
        check: [RendererCase(spec("renderer", cls), context=context) for cls in broken]
        for check, broken in BROKEN.items()
    }
    catches(RendererContract, cases)
