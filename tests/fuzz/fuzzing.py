"""Hostile input: a corpus with its mutations, and any JSON.

``FUZZ_EXAMPLES`` sets how many examples each test tries; ``make fuzz`` runs many.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

fuzz = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "25")), deadline=None, suppress_health_check=list(HealthCheck)
)
CORPUS = Path(__file__).parent / "corpus"
PIECES = [
    *"\"'{}[]:,\n\t\0\\#&*-$%",
    *(
        "${",
        "${oc.env:HOME}",
        "${data",
        "*a",
        "&a ",
        "<<: *a",
        "!!python/name:os.system ",
        "null",
        "true",
        "1e999",
        "-1",
    ),
    *(".nan", "NaN", "9" * 400, "[" * 3000, '{"a":' * 3000, "\ufeff", "\ud7ff", "\u2028", "é", '"\\ud800"'),
    *("<|im_end|>", "../../etc/passwd", "x" * 5000),
]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(PIECES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def corpus(kind: str) -> list[str]:
    """The texts of one kind, each tried as it is and mutated."""
    return [file.read_text(encoding="utf-8") for file in sorted((CORPUS / kind).iterdir())]


@st.composite
def mutated(draw: st.DrawFn, texts: Sequence[str]) -> str:
    """One of the texts with pieces cut out, put in, or taken from another one."""
    text = draw(st.sampled_from(texts))
    for _ in range(draw(st.integers(0, 4))):
        other = draw(st.sampled_from(texts))
        start = draw(st.integers(0, len(other)))
        copied = other[start : start + draw(st.integers(0, 60))]
        piece = draw(st.sampled_from([*PIECES, "", copied]) | st.text(max_size=5))
        at = draw(st.integers(0, len(text)))
        text = text[:at] + piece + text[at + draw(st.sampled_from([0, 0, 1, 7, 40])) :]
    return text


@st.composite
def changed(draw: st.DrawFn, value: Any, leaves: st.SearchStrategy[Any] = json_values) -> Any:
    """A JSON value with some of its parts replaced, left out or wrapped."""
    action = draw(st.sampled_from(["keep", "keep", "keep", "keep", "keep", "replace", "wrap"]))
    if action != "keep":
        return draw(leaves) if action == "replace" else [value]
    if isinstance(value, dict):
        return {key: draw(changed(item, leaves)) for key, item in value.items() if draw(st.integers(0, 19))}
    if isinstance(value, list):
        return [draw(changed(item, leaves)) for item in value]
    return value


def outcome(call: Callable[[], Any], *errors: type[Exception]) -> Any:
    """What a call returns, or its error if it is one of ours; any other error fails the test."""
    try:
        return call()
    except errors as error:
        assert str(error), "an error without a message"
        return error
