"""What a chat template writes between two turns of the policy, without rendering the conversation again.

Where a template only appends, the text that follows a turn is the same frame each time, filled with the texts of the
new messages: the frame is found once, by rendering a short conversation with markers in their place. A frame is used
only where no probe of ``template_check`` saw the template rewrite history at messages of that role, where filling it
gave what the template gives for awkward texts, and where it gave what the whole conversation did when it was first met.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl_core.api import ChatRenderer, Conversation, Message, TemplateError
from agentrl_core.data.template_check import check_template

logger = logging.getLogger(__name__)
Slot = tuple[int, str]
"""A text that varies: number of the new message, or of the turn's call before 0, and the field."""
_FIELDS = frozenset({"role", "content", "name", "tool_call_id"})
_QUESTION: Message = {"role": "user", "content": "question"}
_AWKWARD = ("", "7", '{"a": [1]}', " \n\"a\" 'b' <c> & {d} {{ e }} \\ é\t\n ")
_FORMS: tuple[Callable[[str], str], ...] = (
    lambda text: text,
    str.strip,
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
)
"""How templates write a content: as it is, trimmed, or within JSON."""


@dataclass(frozen=True)
class Shape:
    """What one frame serves: roles of the new messages, texts that vary, does a generation prompt follow."""

    roles: tuple[str, ...]
    slots: tuple[Slot, ...]
    generation_prompt: bool


@dataclass(frozen=True)
class Frame:
    """The text after a turn, in pieces; between two pieces stands a text that varies."""

    stop: str
    pieces: tuple[str, ...]
    slots: tuple[Slot, ...]
    form: Callable[[str], str]

    def fill(self, texts: Mapping[Slot, str]) -> str:
        filled = [self.pieces[0]]
        for slot, piece in zip(self.slots, self.pieces[1:], strict=True):
            filled += self.form(texts[slot]) if slot[1] == "content" else texts[slot], piece
        return "".join(filled)


class Bridge:
    """Writes what follows a turn.

    Args:
        renderer: with the template of the policy.
        stops: texts that end a turn.
        as_shown: a message as the template gets it, where its text cannot become a control token.
    """

    def __init__(self, renderer: ChatRenderer, stops: Sequence[str], as_shown: Callable[[Message], Message]) -> None:
        self._renderer = renderer
        self._stops = stops
        self._as_shown = as_shown
        self._rewrites = check_template(renderer).rewrites
        self._start = len(renderer.render([_QUESTION]))
        self._frames: dict[Shape, Frame | None] = {}
        self._proven: set[Shape] = set()
        self._trusted = True

    def text(
        self,
        turn: Message,
        added: Sequence[Message],
        *,
        generation_prompt: bool,
        stopped: bool,
        whole: Callable[[], str | None],
    ) -> str | None:
        """The text after the turn; None where only the whole conversation can tell.

        Args:
            turn: the last message, the policy's.
            added: what follows it.
            generation_prompt: the policy answers next.
            stopped: the policy sampled the token that ends its turn.
            whole: the same by way of the whole conversation; called for the first turn of a shape.
        """
        if not self._trusted or turn.get("role") != "assistant" or not added:
            return None
        texts = self._texts(turn, added)
        if texts is None:
            return None
        shape = Shape(tuple(message["role"] for message in added), tuple(texts), generation_prompt)
        if shape not in self._frames:
            self._frames[shape] = self._frame(shape)
        frame = self._frames[shape]
        if frame is None:
            return None
        suffix = frame.fill(texts)
        suffix = suffix if stopped else frame.stop + suffix
        if shape not in self._proven:
            if suffix != whole():
                self._frames[shape] = None
                return None
            self._proven.add(shape)
        return suffix

    def is_rendering_of(self, whole: str, so_far: Conversation, shown: Callable[[str], str]) -> bool:
        """Whether a rendering of the whole conversation has the pieces of the row, each at its place.

        A turn may stand there as it was sampled, or as the template writes it alone (spacing of a call, say).

        Args:
            whole: as ``shown`` gave it, like the pieces.
            shown: a rendered text as a person reads it.
        """
        messages = so_far.messages
        turns = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
        first = len(turns) - sum([node.kind == "turn" for node in so_far.path])
        if first < 0:  # somebody has removed messages
            return False
        turns = turns[first:]
        at = 0
        for number, node in enumerate(so_far.path):
            text = node.text
            written: str | None = text
            following = ""
            if node.kind == "turn":
                message = turns.pop(0)
                if number + 1 == len(so_far.path):
                    break
                following = so_far.path[number + 1].text
                if not whole.startswith(text + following, at):
                    written = self._written_alone(text, messages[message:], so_far.tools)
            if written is None or not whole.startswith(shown(written) + following, at):
                return False
            at += len(shown(written))
        return True

    def _written_alone(self, said: str, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str | None:
        """A turn as the template writes it between a question and what follows it."""
        end = next((n for n, each in enumerate(messages) if n and each.get("role") == "assistant"), len(messages))
        try:
            before = self._renderer.render([_QUESTION], tools, generation_prompt=True)
            alone = self._renderer.render([_QUESTION, messages[0]], tools)
            text = self._renderer.render([_QUESTION, *messages[:end]], tools, generation_prompt=True)
        except TemplateError:
            return None
        if not alone.startswith(before) or not text.startswith(before):
            return None
        rest = text[len(before) :]
        found = turn_end(alone[len(before) :], rest, self._stops, messages[0])
        if found is None:
            return None
        end, stop = found
        sampled = next((each for each in self._stops if said.endswith(each)), "")
        stop = stop or sampled
        return rest[:end] + (stop if sampled and rest.startswith(stop, end) else "")

    def distrust(self, trajectory: str) -> None:
        """The whole conversation of a trajectory was rendered in other words: no frame is used any more."""
        self._trusted = False
        logger.warning(
            "trajectory %s: the chat template renders the whole conversation in other words than turn by turn. It was "
            "trained as the model saw it, and rollout/template_mismatches counts it; this process renders whole "
            "conversations from now on, which takes longer", trajectory,
        )  # fmt: skip

    def _texts(self, turn: Message, added: Sequence[Message]) -> dict[Slot, str] | None:
        """The texts that vary; None where a message holds something else."""
        texts: dict[Slot, str] = {}
        for number, call in enumerate(turn.get("tool_calls") or (), 1):
            texts[-number, "name"] = call["function"]["name"]
        for number, message in enumerate(added):
            if not _FIELDS.issuperset(message) or message.get("role") in self._rewrites:
                return None
            for field, text in self._as_shown(message).items():
                if not isinstance(text, str):
                    return None
                if field != "role":
                    texts[number, field] = text
        return texts

    def _frame(self, shape: Shape) -> Frame | None:
        # Nine characters: some templates accept no other id.
        markers = {slot: f"zq{number:05d}qz" for number, slot in enumerate(shape.slots)}
        try:
            stop, text = self._rendered(shape, markers)
            parts = re.split(r"zq(\d{5})qz", text)
            slots = tuple(shape.slots[int(number)] for number in parts[1::2])
            for form in _FORMS:
                frame = Frame(stop, tuple(parts[::2]), slots, form)
                if all(self._fits(frame, shape, markers, text) for text in _AWKWARD):
                    return frame
        except (TemplateError, LookupError):
            pass
        return None

    def _fits(self, frame: Frame, shape: Shape, markers: Mapping[Slot, str], text: str) -> bool:
        texts = {slot: text if slot[1] == "content" else marker for slot, marker in markers.items()}
        return self._rendered(shape, texts) == (frame.stop, frame.fill(texts))

    def _rendered(self, shape: Shape, texts: Mapping[Slot, str]) -> tuple[str, str]:
        """The text that ends a turn, and what follows it.

        Raises:
            TemplateError: the template refuses such messages.
            LookupError: it ends turns with none of the stops.
        """
        turn: Message = {"role": "assistant", "content": "answer"}
        added: list[dict[str, Any]] = [{"role": role} for role in shape.roles]
        ids = [texts[slot] for slot in shape.slots if slot[1] == "tool_call_id"]
        calls: list[dict[str, Any]] = []
        for slot in shape.slots:
            if slot[0] >= 0:
                added[slot[0]][slot[1]] = texts[slot]
            else:
                id = ids[len(calls)] if len(calls) < len(ids) else f"call{len(calls):05d}"
                calls.append({"type": "function", "id": id, "function": {"name": texts[slot], "arguments": {}}})
        if calls:
            turn["tool_calls"] = calls
        messages = [_QUESTION, turn, *added]
        rest = self._renderer.render(messages, generation_prompt=shape.generation_prompt)[self._start :]
        stop = min((stop for stop in self._stops if stop in rest), key=rest.find, default="")
        if not stop:
            raise LookupError
        return stop, rest[rest.index(stop) + len(stop) :]


def turn_end(turn: str, rest: str, stops: Sequence[str], message: Message) -> tuple[int, str] | None:
    """Where a turn ends in a rendering, and the text with which the template ends it; None: it is not there as such.

    Args:
        turn: rendered without what follows it.
        rest: rendered with what follows it.
        message: the turn.
    """
    stop = min((stop for stop in stops if stop in turn), key=turn.find, default="")
    end = rest.find(stop) if stop else len(turn) if rest.startswith(turn) else -1
    if end < 0:
        return None
    letters, calls = "".join(str(message.get("content") or "").split()), message.get("tool_calls") or ()
    kept = letters in "".join(rest[:end].split()) and all(call["function"]["name"] in rest[:end] for call in calls)
    return (end, stop) if kept else None
