"""Tools made of plain functions: what the model is told about them, and what it sees of their results."""

import asyncio
import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from PIL import Image
from pydantic import BaseModel, Field

from agentrl_core.api import FunctionTool, ToolContext, ToolError, schema_of
from agentrl_core.api.message_parts import image_part


@dataclass
class Tree:
    children: "list[Tree]"


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
    class Node:
        pass

    def hash_of(node: Node) -> str:
        return str(node)

    hash_of.__annotations__["node"] = Node
    with pytest.raises(TypeError, match=r"hash_of: parameter node: .*Node'> has no JSON type"):
        schema_of(hash_of)


@dataclass
class Place:
    """A place on the map."""

    x: int
    y: int = 0


class Trip(BaseModel):
    stops: list[Place]
    title: str = Field("holidays", description="its name")


def plan(
    trip: Trip, start: Place, mode: Literal["walk", "ride"] = "walk", budget: int | str | None = None,
    days: Annotated[int, Field(ge=1, description="how long")] = 1,
) -> Any:  # fmt: skip
    """Plans a trip.

    Args:
        start: where it begins
    """
    return {"start": start, "first": trip.stops[0].x, "trip": trip}


def test_dataclasses_and_pydantic_models_become_objects_without_references() -> None:
    properties = schema_of(plan)["function"]["parameters"]["properties"]
    place = {"x": {"type": "integer"}, "y": {"type": "integer", "default": 0}}
    assert properties["start"] == {
        "type": "object", "properties": place, "required": ["x"], "description": "where it begins",
    }  # fmt: skip
    assert properties["trip"]["properties"]["stops"]["items"]["properties"] == place
    assert properties["trip"]["properties"]["title"] == {
        "type": "string", "default": "holidays", "description": "its name",
    }  # fmt: skip
    assert properties["mode"] == {"type": "string", "enum": ["walk", "ride"]}
    assert properties["budget"] == {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    assert properties["days"] == {"type": "integer", "minimum": 1, "description": "how long"}


def test_arguments_are_converted_and_results_are_json() -> None:
    tool = FunctionTool(plan, ToolContext("plan"))
    arguments = {"trip": {"stops": [{"x": "3"}]}, "start": {"x": 1}}
    result = json.loads(asyncio.run(tool.execute("1", arguments)).response.text)
    assert result == {
        "start": {"x": 1, "y": 0}, "first": 3, "trip": {"stops": [{"x": 3, "y": 0}], "title": "holidays"},
    }  # fmt: skip


def test_an_argument_of_the_wrong_type_is_an_error_that_names_its_place() -> None:
    tool = FunctionTool(plan, ToolContext("plan"))
    with pytest.raises(ToolError, match=r"^trip\.stops\.0\.x: Input should be a valid integer"):
        asyncio.run(tool.execute("1", {"trip": {"stops": [{"x": "far"}]}, "start": {"x": 1}}))
    with pytest.raises(ToolError, match=r"^mode: Input should be 'walk' or 'ride'$"):
        asyncio.run(tool.execute("1", {"trip": {"stops": []}, "start": {"x": 1}, "mode": "fly"}))


def test_a_type_that_refers_to_itself_is_refused() -> None:
    def walk(tree: Tree) -> str:
        return str(tree)

    with pytest.raises(TypeError, match="walk: parameter tree: .*Tree refers to itself"):
        schema_of(walk)


def test_the_model_sees_a_dict_as_json() -> None:
    result = asyncio.run(FunctionTool(search, ToolContext("search")).execute("1", {"query": "a"}))
    assert json.loads(result.response.text) == {"hits": ["a", 5], "größe": 1}
    assert "größe" in result.response.text


RED = Image.new("RGB", (4, 3), "red")


@pytest.mark.parametrize(
    ("returned", "content"),
    [
        (RED, [image_part(RED)]),
        ([RED], [image_part(RED)]),
        (("a", RED, "b"), [{"type": "text", "text": "a"}, image_part(RED), {"type": "text", "text": "b"}]),
        ([image_part(RED), {"type": "text", "text": "b"}], [image_part(RED), {"type": "text", "text": "b"}]),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        # Data, and no image.
        (["a", "b"], '["a","b"]'),
        ([], "[]"),
        ([{"type": "image", "title": "a cat"}], '[{"type":"image","title":"a cat"}]'),
        ([{"type": "text", "text": "a"}, 3], '[{"type":"text","text":"a"},3]'),
    ],
    ids=range(9),
)
def test_a_function_shows_the_images_that_it_returns(returned: Any, content: Any) -> None:
    def look() -> Any:
        """Looks."""
        return returned

    result = asyncio.run(FunctionTool(look, ToolContext("look")).execute("i", {}))
    assert result.response.content == content


@pytest.mark.parametrize(
    "within", [lambda image: {"picture": image}, lambda image: [image, None], lambda image: [[image]]]
)
def test_an_image_within_another_value_is_not_written_out(within: Any) -> None:
    def look() -> Any:
        """Looks."""
        return within(Image.new("RGB", (8, 8)))

    with pytest.raises(Exception, match="an image within a dict or another list; return it alone"):
        asyncio.run(FunctionTool(look, ToolContext("look")).execute("i", {}))
