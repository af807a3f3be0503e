"""The model's tokenizer and chat template: the only road from messages to tokens and back."""

import json
import marshal
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerBase

from agentrl_core.api import ChatRenderer, ConfigError, ImageError, Message, TemplateError, TruncationSide
from agentrl_core.config.schema import ModelConfig
from agentrl_core.data.bridge import Bridge
from agentrl_core.data.template_size import check_template_size
from agentrl_core.engine_kit.media import MediaProcessor, parts_of, size_of
from agentrl_core.plugins.boundary import boundary

_MOST_CHARACTERS_PER_TOKEN = 256
_BATCH = 512
K = TypeVar("K")
T = TypeVar("T")
# Divides a control token in a text from outside; encoding leaves it out. It is no character.
_MARK = "\ufdd0"
_TRUSTED = ("system", "developer", "assistant")
NO_PROCESSOR = "transformers finds no processor of images in its directory (preprocessor_config.json)"
_TAILS = ("x", " x", "\n", "\nx")


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of ``model.path`` with the configured chat template.

    Raises:
        TemplateError: there is no tokenizer, or it has no chat template, or one that would fill the memory.
    """
    with boundary(TemplateError, f"model.path: no tokenizer could be loaded from {model.path}:"):
        tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):
        # Without its files transformers makes a tokenizer that knows no words: every text has 0 tokens.
        raise TemplateError(
            f"model.path: {model.path} has no tokenizer files; copy tokenizer.json and its like from where the model "
            "came from"
        )
    if model.chat_template is not None:
        tokenizer.chat_template = Path(model.chat_template).read_text(encoding="utf-8")
    if not tokenizer.chat_template:
        raise TemplateError(
            f"model.path: the tokenizer in {model.path} has no chat template, so messages cannot become tokens; "
            "set model.chat_template to a file with a Jinja template"
        )
    if isinstance(tokenizer.chat_template, str):
        check_template_size(tokenizer.chat_template)
    return cast(PreTrainedTokenizerBase, tokenizer)


def _remember(known: dict[K, T], key: K, value: T) -> T:
    """Keep the value, and no more than 1,024."""
    if len(known) >= 1024:
        known.pop(next(iter(known)))
    known[key] = value
    return value


def _generation_stops(model: Path) -> tuple[int, ...]:
    file = model / "generation_config.json"
    stops = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    return tuple(stops) if isinstance(stops, list) else () if stops is None else (int(stops),)


class HFChatRenderer(ChatRenderer):
    """Renders with ``apply_chat_template`` and encodes with the tokenizer as it is.

    Args:
        tokenizer: with a chat template.
        template_kwargs: passed to every rendering (``model.chat_template_kwargs``).
        media: what the model's processor says of images; None: it takes text alone.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any] | None = None,
        media: MediaProcessor | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.media = media
        self.media_problem = ""
        """Why the processor of a model with images could not be loaded."""
        self._template_kwargs = dict(template_kwargs or {})
        # The Rust tokenizer without its Python wrapper: 3x less time on the short texts that tools return.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._texts: dict[bytes, str] = {}
        self._prompts: dict[str, list[int]] = {}
        self._heads: dict[str, list[int] | None] = {}
        self.model_stops: tuple[int, ...] = ()

    @classmethod
    def from_config(cls, model: ModelConfig) -> "HFChatRenderer":
        """The renderer of ``model``."""
        media, problem = None, ""
        try:
            media = MediaProcessor.load(model.path, model.trust_remote_code)
        except ConfigError as error:
            # It may be trained on text alone.
            problem = error.problems[0]
        renderer = cls(load_tokenizer(model), model.chat_template_kwargs, media)
        renderer.media_problem = problem
        if not renderer.encode("a"):
            raise ConfigError(f"model.path: {model.path} has no tokenizer: copy tokenizer.json and its like there too")
        renderer.model_stops = _generation_stops(Path(model.path))
        return renderer

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a turn: the tokenizer's end-of-sequence token, those of the model's generation config, and the
        special token that the template writes after an answer."""
        eos = self.tokenizer.eos_token_id
        found = [] if eos is None else [int(eos)]
        return tuple(dict.fromkeys([*found, *self.model_stops, *self._template_stop()]))

    def _template_stop(self) -> list[int]:
        answer = "an answer"
        try:
            text = self.render([{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}])
        except TemplateError:
            return []
        after = self.encode(text.rpartition(answer)[2].lstrip())[:1]
        return [token for token in after if token in self.tokenizer.get_added_vocab().values()]

    @cached_property
    def stop_texts(self) -> dict[int, str]:
        """The text of each of the stop tokens."""
        return {stop: self.decode([stop]) for stop in self.stop_token_ids}

    @cached_property
    def bridge(self) -> Bridge:
        """What the template writes between two turns."""
        return Bridge(self, list(self.stop_texts.values()), self.from_outside)

    @property
    def pad_token_id(self) -> int:
        """Id under masked positions; its value never matters."""
        for candidate in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if candidate is not None:
                return int(candidate)
        return 0

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, generation_prompt: bool = False
    ) -> str:
        def failed() -> str:
            return f"the chat template cannot render messages with the roles {[each.get('role') for each in messages]}:"

        shown = [self.from_outside(message) for message in messages]
        if self.media is not None:
            tools = self._without_placeholders(list(tools))
            shown = [self._in_parts(message) for message in shown] if self._wants_parts else shown
        with boundary(TemplateError, failed, describe=str):
            text = cast(str, self._applied(shown, tools, generation_prompt))
        if self.media is not None or any(map(parts_of, messages)):
            self._check_images(text, messages)
        return text

    def _applied(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], generation_prompt: bool) -> Any:
        return self.tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **self._template_kwargs,
        )

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template writes texts only of parts, as some of vision-language models do."""
        question: Message = {"role": "user", "content": "a question"}
        for message, answer in ((question, False), (self._in_parts(question), True)):
            with suppress(Exception):
                if "a question" in self._applied([message], (), False):
                    return answer
        return False

    @staticmethod
    def _in_parts(message: Message) -> Message:
        content = message.get("content")
        return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message

    def _check_images(self, text: str, messages: Sequence[Message]) -> None:
        images = [(message.get("role"), len(parts_of(message))) for message in messages]
        count = sum(number for _, number in images)
        if self.media is None:
            raise TemplateError(
                f"a message of the role {next(role for role, number in images if number)!r} has an image, and the "
                f"model of model.path can be shown none: {self.media_problem or NO_PROCESSOR}"
            )
        if (found := text.count(self.media.placeholder)) != count:
            roles = dict.fromkeys(str(role) for role, number in images if number)
            raise TemplateError(
                f"the chat template writes {found} of the {count} images of messages of the role {', '.join(roles)}; "
                "set model.chat_template to a file with a template that writes them all, in order"
            )

    def expanded(self, text: str, images: Sequence[str]) -> str:
        """A rendered text in which each placeholder is as long as the image takes.

        Raises:
            TemplateError: it has another number of placeholders, or the processor refuses an image.
        """
        if not images or self.media is None:
            return text
        try:
            return self.media.expanded(text, images)
        except ImageError as error:
            raise TemplateError(str(error)) from error

    def image_tokens(self, name: str) -> int:
        return 0 if self.media is None else len(self.encode_prompt(self.media.expansion(size_of(name))))

    def from_outside(self, message: Message) -> Message:
        if message.get("role") not in _TRUSTED and "content" in message:
            message = {**message, "content": self._from_outside(message["content"])}
        return message if self.media is None else cast(Message, self._without_placeholders(message))

    def _from_outside(self, value: Any) -> Any:
        """Templates also write out what is no text: parts of a content without ``text``, and the keys of a mapping."""
        if isinstance(value, str):
            return self._as_text(value)
        if isinstance(value, list):
            return self._apart([self._from_outside(each) for each in value])
        if isinstance(value, dict):
            return {self._from_outside(key): self._from_outside(each) for key, each in value.items()}
        return value

    def _as_text(self, text: str) -> str:
        if not text.isascii():
            # Half of a surrogate pair has no bytes.
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            text = text.replace(_MARK, "\ufffd")
        return self._control_tokens.sub(lambda found: _MARK.join(found[0]), text)

    def _apart(self, parts: list[Any]) -> list[Any]:
        """Parts of which no two neighbours together have what looks like a control token."""
        for number, (one, other) in enumerate(pairwise(parts)):
            match one, other:
                case {"text": str(text)}, {"text": str(following)} if self._control_tokens.search(text + following):
                    parts[number] = {**one, "text": text + _MARK}
        return parts

    def _without_placeholders(self, value: Any) -> Any:
        """The value with texts in which nothing stands for an image, whoever wrote them."""
        if isinstance(value, str):
            return self._placeholders.sub(lambda found: _MARK.join(found[0]), value)
        if isinstance(value, list | tuple):
            return [self._without_placeholders(each) for each in value]
        if isinstance(value, dict):
            return {self._without_placeholders(key): self._without_placeholders(each) for key, each in value.items()}
        return value

    @cached_property
    def _placeholders(self) -> re.Pattern[str]:
        assert self.media is not None, "only models with images have them"
        contents = [self.media.placeholder, *(self.decode([token]) for token in self.media.reserved)]
        return re.compile("|".join(map(re.escape, sorted(contents, key=len, reverse=True))))

    @cached_property
    def _control_tokens(self) -> re.Pattern[str]:
        stops = [self.tokenizer.eos_token_id, *self.model_stops]
        added = self.tokenizer.added_tokens_decoder.items()
        contents = [token.content for id, token in added if len(token.content) > 1 and (token.special or id in stops)]
        return re.compile("|".join(map(re.escape, sorted(contents, key=len, reverse=True))) or r"(?!)")

    def encode(self, text: str) -> list[int]:
        if _MARK in text:
            return [token for piece in text.split(_MARK) for token in self.encode(piece)]
        if self._backend is not None:
            return cast(list[int], self._backend.encode(text, add_special_tokens=False).ids)
        return cast(list[int], self.tokenizer.encode(text, add_special_tokens=False))

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> tuple[str, list[int]]:
        """The prompt's text and ids, remembering the last prompts: the samples of a group share theirs."""
        try:
            key = marshal.dumps([messages, tools], 0)
        except ValueError:
            text = self.render(messages, tools, generation_prompt=True)
        else:
            text = self._texts.get(key) or _remember(
                self._texts, key, self.render(messages, tools, generation_prompt=True)
            )
        return text, self.encode_prompt(text)

    def encode_prompt(self, text: str) -> list[int]:
        """Like :meth:`encode`, remembering the last prompts: the samples of a group share theirs."""
        ids = self._prompts.get(text)
        if ids is None:
            ids = _remember(self._prompts, text, self._encode_after_head(text))
        return list(ids)

    def _encode_after_head(self, text: str) -> list[int]:
        """Like :meth:`encode`; a head that prompts share (system message and tool schemas) is encoded once.

        A head ends with an added token, at which tokenizers split the text before anything else. It is used only
        after a whole prompt was seen to have the ids of its two parts.
        """
        head = self._head_of(text)
        if not head:
            return self.encode(text)
        tail = text[len(head) :]
        known = self._heads.get(head)
        if known is not None:
            return known + self.encode(tail)
        ids = self.encode(text)
        if head not in self._heads:
            # Most heads without a system message are never seen again.
            if len(self._heads) >= 64:
                self._heads.pop(next(iter(self._heads)))
            self._heads[head] = None
        elif (head_ids := self.encode(head)) + self.encode(tail) == ids:
            self._heads[head] = head_ids
        return ids

    def lengths(self, texts: Iterable[str]) -> list[int]:
        """How many tokens :meth:`encode_prompt` makes of each text; many texts at a time, on all cores."""
        texts = iter(texts)
        batches: list[Future[list[int]]] = []
        # The tokenizer does not hold Python's lock: a batch is encoded while ``texts`` makes the next one.
        with ThreadPoolExecutor(1) as encoder:
            while batch := list(islice(texts, _BATCH)):
                batches.append(encoder.submit(self._lengths_of_batch, batch))
                if len(batches) > 1:
                    # No more than two batches of texts are kept.
                    batches[-2].result()
        return [length for lengths in batches for length in lengths.result()]

    def _lengths_of_batch(self, texts: Sequence[str]) -> list[int]:
        # The first two teach the head that the others may share with them.
        return [*(len(self.encode_prompt(text)) for text in texts[:2]), *self._lengths(texts[2:])]

    def _lengths(self, texts: Sequence[str]) -> list[int]:
        if self._backend is None:
            return [len(self.encode(text)) for text in texts]
        heads = [self._head_of(text) for text in texts]
        known = [self._heads.get(head) or [] for head in heads]
        tails = [text[len(head) :] if ids else text for text, head, ids in zip(texts, heads, known, strict=True)]
        encoded = self._backend.encode_batch_fast(tails, add_special_tokens=False)
        return [
            len(ids) + len(self.encode(tail) if _MARK in tail else encoding)
            for ids, tail, encoding in zip(known, tails, encoded, strict=True)
        ]

    def _head_of(self, text: str) -> str:
        """The text up to its first boundary; empty where it has none."""
        boundary = next((token for token in self._boundaries if token in text), "")
        return text[: text.index(boundary) + len(boundary)] if boundary else ""

    @cached_property
    def _boundaries(self) -> tuple[str, ...]:
        """Those tokens at the end of a turn before and after which texts can be encoded separately."""
        if self._backend is None:
            return ()
        added = self.tokenizer.added_tokens_decoder
        contents = [token.content for token in added.values()]

        def divides(token: AddedToken) -> bool:
            if token.rstrip or token.single_word or token.normalized or sum(token.content in c for c in contents) > 1:
                return False
            head = f"x{token.content}"
            return all(self.encode(head + tail) == self.encode(head) + self.encode(tail) for tail in _TAILS)

        return tuple(added[stop].content for stop in self.stop_token_ids if stop in added and divides(added[stop]))

    @staticmethod
    def shown(rendered: str) -> str:
        """A rendered text as a person reads it: without what keeps text from outside apart from control tokens."""
        return rendered.replace(_MARK, "")

    @staticmethod
    def after(rendered: str, shown: str) -> str | None:
        """What a rendered text adds to one that :meth:`shown` gave; None where it does not begin with it."""
        if _MARK not in rendered:
            return rendered[len(shown) :] if rendered.startswith(shown) else None
        if not rendered.replace(_MARK, "").startswith(shown):
            return None
        at = 0
        for piece in rendered.split(_MARK):
            if len(piece) >= len(shown):
                return rendered[at + len(shown) :]
            at, shown = at + len(piece) + len(_MARK), shown[len(piece) :]
        return ""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        if self._backend is not None:
            return cast(str, self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
        return cast(str, self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def truncate(self, text: str, max_tokens: int, side: TruncationSide) -> str:
        # A character is at most four bytes, and a byte at most one token.
        if len(text) * 4 < max_tokens:
            return text
        if len(text) > (max_tokens + 1) * _MOST_CHARACTERS_PER_TOKEN:
            # Megabytes are cut before they are encoded: what stays is longer than the result either way.
            keep = (max_tokens + 1) * _MOST_CHARACTERS_PER_TOKEN
            text = {"left": text[-keep:], "right": text[:keep], "middle": text[:keep] + text[-keep:]}[side]
        ids = self.encode(self._as_text(text))
        if len(ids) <= max_tokens:
            return text
        # A cut inside a character leaves a replacement character, which can take more tokens than were cut.
        for budget in range(max_tokens, 0, -1):
            cut = self._cut(ids, budget, side)
            if len(self.encode(self._as_text(cut))) <= max_tokens:
                return cut
        return ""

    def _cut(self, ids: list[int], budget: int, side: TruncationSide) -> str:
        if side == "left":
            return self.decode(ids[len(ids) - budget :])
        if side == "right":
            return self.decode(ids[:budget])
        head = budget // 2
        return self.decode(ids[:head]) + self.decode(ids[len(ids) - (budget - head) :])
