"""A head that prompts share is encoded once, and no id ever differs because of it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

from agentrl_core.data.renderer import HFChatRenderer
from agentrl_testing.tiny_model import tiny_tokenizer

STOP = "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEXTS = st.text(st.sampled_from("ab é\n<|>_"), max_size=12) | st.sampled_from([STOP, f" {STOP} ", "<|im_start|>"])


class CountingRenderer(HFChatRenderer):
    """Knows how many characters were encoded."""

    encoded = 0

    def encode(self, text: str) -> list[int]:
        self.encoded += len(text)
        return super().encode(text)


def sentencepiece_like(stop: AddedToken) -> PreTrainedTokenizerFast:
    """Puts a space before the first word of a text, so that a text's end is not encoded like a text of its own."""
    words = {word: number for number, word in enumerate(["<unk>", "▁x", "x", "▁a", "a", "b", "▁", "\n"])}
    tokenizer = Tokenizer(models.BPE(words, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=stop)
    fast.chat_template = TEMPLATE
    return fast


RENDERERS = {
    "byte level": HFChatRenderer(tiny_tokenizer(TEMPLATE)),
    "prepends a space": HFChatRenderer(sentencepiece_like(AddedToken(STOP, normalized=False, special=True))),
    "strips to the right": HFChatRenderer(
        sentencepiece_like(AddedToken(STOP, normalized=False, rstrip=True, special=True))
    ),
}


@pytest.mark.parametrize("name", RENDERERS)
@given(heads=st.lists(TEXTS, min_size=1, max_size=2), tails=st.lists(TEXTS, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_ids_of_a_prompt_are_those_of_its_text(name: str, heads: list[str], tails: list[str]) -> None:
    renderer = RENDERERS[name]
    for tail in tails:
        for head in heads:
            text = head + STOP + tail
            assert renderer.encode_prompt(text) == renderer.encode(text)


@pytest.mark.parametrize("name", RENDERERS)
@given(heads=st.lists(TEXTS, min_size=1, max_size=2), tails=st.lists(TEXTS, min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_lengths_of_many_prompts_are_those_of_each(name: str, heads: list[str], tails: list[str]) -> None:
    texts = [head + STOP + tail for tail in tails for head in heads] + tails
    assert RENDERERS[name].lengths(texts) == [len(RENDERERS[name].encode(text)) for text in texts]


def test_a_shared_head_is_encoded_once() -> None:
    renderer = CountingRenderer(tiny_tokenizer(TEMPLATE))
    head = "<|im_start|>system\n" + "many words " * 200 + STOP
    for number in range(20):
        renderer.encode_prompt(f"{head}\n<|im_start|>user\nquestion {number}{STOP}")
    # The first two prompts whole, the second in its parts too.
    assert renderer.encoded < 4 * len(head)


def test_a_changed_answer_does_not_change_what_is_remembered() -> None:
    renderer = HFChatRenderer(tiny_tokenizer(TEMPLATE))
    for number in range(4):
        text = f"<|im_start|>system\nbe kind{STOP}\n{number % 2}"
        renderer.encode_prompt(text).append(-1)
        assert renderer.encode_prompt(text) == renderer.encode(text)
