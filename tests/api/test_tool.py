"""Tools made of plain functions: what the model is told about them, and what it sees of their results."""

import asyncio
import json
from typing import Any, Literal

import pytest

from agentrl_core.api import FunctionTool, ToolContext, schema_of


def search(query: str, limit: int | float = 5, tags: list[str] | None = None) -> Any:
    """Searches the notes.

    Args:
        query: words to look for,
            most important first.
        limit (int): how many hits.

    Returns:
        query: not a parameter.
    """
    return {"hits": [query, limit], "größe": 1}


def test_the_docstring_of_a_function_describes_its_parameters_to_the_model() -> None:
    properties = schema_of(search)["function"]["parameters"]["properties"]
    assert properties["query"] == {"type": "string", "description": "words to look for, most important first."}
    assert properties["limit"] == {
        "anyOf": [{"type": "integer"}, {"type": "number"}],
        "description": "how many hits.",
    }
    assert properties["tags"] == {"type": "array", "items": {"type": "string"}}
    assert schema_of(search)["function"]["description"] == "Searches the notes."


def test_sphinx_docstrings_describe_parameters_too() -> None:
    def pick(side: Literal["left", "right"]) -> str:
        """Picks.

        :param side: where to pick
            from.
        """
        return side

    (side,) = schema_of(pick)["function"]["parameters"]["properties"].values()
    assert side == {"type": "string", "enum": ["left", "right"], "description": "where to pick from."}


def test_parameters_that_a_model_cannot_pass_by_name_are_refused() -> None:
    def more(*more: int) -> None: ...
    def named(**named: int) -> None: ...
    def first(first: int, /) -> None: ...

    for function, text in ((more, r"\*more"), (named, r"\*\*named"), (first, "first")):
        with pytest.raises(TypeError, match=rf"tool function {function.__name__}: parameter {text}: int cannot be"):
            schema_of(function)


def test_a_parameter_without_a_json_type_is_named() -> None:
    def hash_of(data: bytes) -> str:
        return str(data)

    with pytest.raises(TypeError, match=r"hash_of: parameter data: bytes: <class 'bytes'> has no JSON type"):
        schema_of(hash_of)


def test_the_model_sees_a_dict_as_json() -> None:
    result = asyncio.run(FunctionTool(search, ToolContext("search")).execute("1", {"query": "a"}))
    assert json.loads(result.response.text) == {"hits": ["a", 5], "größe": 1}
    assert "größe" in result.response.text
