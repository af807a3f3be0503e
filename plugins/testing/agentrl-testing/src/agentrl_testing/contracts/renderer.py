"""The contract of renderers: nothing is invented, nothing is lost, and what others say is text."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from agentrl_core.api import (
    Conversation,
    Message,
    ParsedTurn,
    Rendered,
    Renderer,
    RendererContext,
    ToolCall,
    function_schema,
)
from agentrl_core.api.tree import Node
from agentrl_testing.contracts.case import PluginCase, PluginContract

TOOLS = [function_schema("forecast", "The weather.", {"city": {"type": "string"}, "days": {"type": "integer"}})]
ARGUMENTS = {"city": 'Zürich\n"Nord"', "days": 3}
QUESTION: Message = {"role": "user", "content": "How is it?"}
CALLING: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [ToolCall("forecast", ARGUMENTS, "call00001").as_message()],
}
RESULT: Message = {"role": "tool", "name": "forecast", "tool_call_id": "call00001", "content": "rainy"}


@dataclass(kw_only=True)
class RendererCase(PluginCase):
    """A renderer under test.

    Args:
        context: tokenizer, chat template and parser.
        call: what the policy samples to call ``forecast`` with :data:`ARGUMENTS`, its stop token included; None takes
            what the renderer writes into the history.
    """

    context: RendererContext
    call: Sequence[int] | None = None

    @cached_property
    def renderer(self) -> Renderer:
        """The renderer, built once."""
        built: Renderer = self.build(self.context)
        return built

    @property
    def turn(self) -> list[int]:
        """A call of the policy."""
        if self.call is not None:
            return list(self.call)
        prompt = self.renderer.render([QUESTION], TOOLS, generation_prompt=True).ids
        whole = self.renderer.render([QUESTION, CALLING], TOOLS).ids
        assert whole[: len(prompt)] == prompt, "the history does not begin with the prompt: name `call` in the case"
        rest = whole[len(prompt) :]
        end = next((at for at, token in enumerate(rest) if token in self.renderer.stop_token_ids), None)
        assert end is not None, f"a turn ends with none of the stop tokens {self.renderer.stop_token_ids}"
        return rest[: end + 1]

    def after(self, turn: Sequence[int], parsed: ParsedTurn) -> Conversation:
        """The conversation in which the policy has sampled this turn."""
        prompt = self.renderer.render([QUESTION], TOOLS, generation_prompt=True)
        message: Message = {"role": "assistant", "content": parsed.content, **parsed.fields}
        if parsed.calls:
            calls = [ToolCall(call.name, call.arguments, "call00001") for call in parsed.calls]
            message["tool_calls"] = [call.as_message() for call in calls]
        text = self.renderer.chat.decode(turn)
        path = [Node(None, "prompt", prompt.ids, prompt.text)]
        path.append(Node(path[0], "turn", list(turn), text))
        return Conversation([QUESTION, message], TOOLS, path)

    def follow(self, turn: Sequence[int], added: Sequence[Message]) -> Rendered | None:
        """What the renderer writes after a turn."""
        return self.renderer.bridge(self.after(turn, self.renderer.parse(turn, TOOLS)), added)


class RendererContract(PluginContract):
    """What every renderer must do."""

    kind = "renderer"

    def test_stop_tokens_have_a_text(self, plugin: RendererCase) -> None:
        """At least one, and each is a token."""
        assert plugin.renderer.stop_token_ids, "no token ends a turn"
        for stop, text in plugin.renderer.stop_texts.items():
            assert text, f"the stop token {stop} has no text"

    def test_a_rendering_is_its_ids_and_their_text(self, plugin: RendererCase) -> None:
        """The same each time, with and without tools and generation prompt."""
        for messages in ([QUESTION], [QUESTION, CALLING, RESULT]):
            for tools in ([], TOOLS):
                for prompted in (False, True):
                    first, second = (
                        plugin.renderer.render(messages, tools, generation_prompt=prompted) for _ in range(2)
                    )
                    assert first == second, "the same conversation was rendered in two ways"
                    assert plugin.renderer.chat.decode(first.ids) == first.text, (
                        f"{first.text!r} is not that of its ids"
                    )
                    assert "How is it?" in first.text, f"the question is missing: {first.text!r}"

    def test_lengths_are_those_of_the_prompts(self, plugin: RendererCase) -> None:
        """With tools and without."""
        prompts: list[tuple[list[Message], list[dict[str, Any]]]] = [([QUESTION], []), ([QUESTION], TOOLS)]
        expected = [len(plugin.renderer.render(*each, generation_prompt=True).ids) for each in prompts]
        assert plugin.renderer.lengths(prompts) == expected, "lengths() counts other tokens than render() makes"

    def test_what_others_say_is_text(self, plugin: RendererCase) -> None:
        """Users and tools write the names of all control tokens: none of them becomes one."""
        added, stops = plugin.context.tokenizer.added_tokens_decoder, plugin.renderer.stop_token_ids
        control = {id: token.content for id, token in added.items() if token.special or id in stops}
        attack = "".join(control.values())

        def controls(said: str) -> list[int]:
            messages = [{**QUESTION, "content": f"How {said}?"}, CALLING, {**RESULT, "content": f"rainy {said}"}]
            ids = plugin.renderer.render(messages, TOOLS, generation_prompt=True).ids
            follow = plugin.follow(plugin.turn, [messages[-1]])
            return [id for id in [*ids, *(follow.ids if follow else ())] if id in control]

        assert controls(attack) == controls("it"), "text from outside became control tokens"

    def test_an_answer_is_its_content(self, plugin: RendererCase) -> None:
        """Without calls, errors and the stop token; its reasoning, where the prompt has opened that."""
        ids = [*plugin.renderer.chat.encode("It is nine o'clock."), plugin.renderer.stop_token_ids[0]]
        for turn in (ids, ids[:-1]):
            parsed = plugin.renderer.parse(turn, TOOLS)
            seen = (parsed.content + parsed.reasoning, parsed.text, parsed.calls, parsed.errors)
            assert seen == ("It is nine o'clock.",) * 2 + ([], []), f"an answer was read as {parsed}"

    def test_a_call_comes_back_as_written(self, plugin: RendererCase) -> None:
        """Name and arguments; also where the stop token is missing, because the budget ended there."""
        parsed = plugin.renderer.parse(plugin.turn, TOOLS)
        assert [(call.name, call.arguments) for call in parsed.calls] == [("forecast", ARGUMENTS)], (
            f"the call {plugin.renderer.chat.decode(plugin.turn)!r} was read as {parsed}"
        )
        assert not parsed.errors, f"a well-formed call has the errors {parsed.errors}"
        assert not any(parsed.text.endswith(stop) for stop in plugin.renderer.stop_texts.values()), "text has the stop"

    def test_a_call_that_is_cut_off_is_never_lost(self, plugin: RendererCase) -> None:
        """At every length: the whole call, an error with its place, or text that still shows what was written."""
        added = plugin.context.tokenizer.added_tokens_decoder
        for end in range(1, len(plugin.turn) - 1):
            parsed = plugin.renderer.parse(plugin.turn[:end], TOOLS)
            written = plugin.renderer.chat.decode(plugin.turn[:end])
            for call in parsed.calls:
                assert call.arguments == ARGUMENTS, f"{written!r} is half a call and became {call}"
            letters = plugin.renderer.chat.decode([id for id in plugin.turn[:end] if id not in added]).strip()
            visible = letters in parsed.content + parsed.reasoning
            assert parsed.calls or parsed.errors or visible, f"{written!r} became {parsed}"
            for start, stop in parsed.error_spans:
                assert 0 <= start <= stop <= len(parsed.text), f"an error at {start}..{stop} of {len(parsed.text)}"

    def test_anything_can_be_read(self, plugin: RendererCase) -> None:
        """Tokens in any order, control tokens among them."""
        rng, size = random.Random(0), len(plugin.context.tokenizer)
        special = [*plugin.context.tokenizer.added_tokens_decoder, *plugin.turn]
        for _ in range(200):
            ids = [rng.choice(special) if rng.random() < 0.6 else rng.randrange(size) for _ in range(rng.randrange(40))]
            parsed = plugin.renderer.parse(ids, TOOLS)
            assert isinstance(parsed, ParsedTurn), f"{ids} was read as {parsed!r}"

    def test_what_follows_a_turn_is_what_the_whole_conversation_says(self, plugin: RendererCase) -> None:
        """The tokens after the turn end the whole rendering, and hold what the tool answered."""
        follow = plugin.follow(plugin.turn, [RESULT])
        if follow is None:
            return
        conversation = plugin.after(plugin.turn, plugin.renderer.parse(plugin.turn, TOOLS))
        whole = plugin.renderer.render([*conversation.messages, RESULT], TOOLS, generation_prompt=True).ids
        assert follow.ids and whole[-len(follow.ids) :] == follow.ids, (
            f"{follow.text!r} follows the call, the whole conversation ends with "
            f"{plugin.renderer.chat.decode(whole[-len(follow.ids) :])!r}"
        )
        assert plugin.renderer.chat.decode(follow.ids) == follow.text, f"{follow.text!r} is not the text of its ids"
        assert "rainy" in follow.text, f"the tool's answer is missing: {follow.text!r}"

    def test_a_turn_that_was_cut_off_is_closed(self, plugin: RendererCase) -> None:
        """What follows it is what follows a whole one, after the tokens that end it."""
        ended, cut = (plugin.follow(turn, [RESULT]) for turn in (plugin.turn, plugin.turn[:-1]))
        if ended is None or cut is None:
            return
        assert cut.ids[-len(ended.ids) :] == ended.ids, f"{cut.text!r} follows the turn without its stop token"
        assert len(cut.ids) > len(ended.ids), "nothing ends a turn that was cut off"
