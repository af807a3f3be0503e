"""The seam of tools.

Lifecycle, per trajectory: ``create`` once, ``execute`` for every call, ``calc_reward`` once at the end, ``release``
always, even after a cancellation. A tool object serves many trajectories at once and tells them apart by
``instance_id``; all methods run on one event loop, so blocking work belongs into a thread or into a process of its
own (``isolation = "process"``, where a call that passes its deadline is killed).

    class Calculator(Tool):
        schema = function_schema("calculator", "Evaluates arithmetic.", {"expression": {"type": "string"}})

        async def execute(self, instance_id, parameters, **kwargs):
            return ToolResult(ToolResponse(str(evaluate(parameters["expression"]))))

What ``execute`` raises, and a call that passes its deadline, is an observation that the model reads; what ``create``
raises fails the trajectory, which starts again from a fresh state. ``calc_reward`` returns a float or None.

A plain typed function is a tool too: :class:`FunctionTool` makes the schema from its signature and docstring.
"""

import inspect
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

Isolation = Literal["inline", "process"]


@dataclass(frozen=True)
class ToolResponse:
    """What the model sees of a call: text, and for vision models images."""

    text: str
    images: Sequence[Any] = ()


class ToolResult(NamedTuple):
    """What ``execute`` returns: the response, a reward for this call (or None), and metrics."""

    response: ToolResponse
    reward: float | None = None
    metrics: dict[str, float] = {}


@dataclass(frozen=True)
class ToolContext:
    """What a tool gets when it is built.

    Args:
        name: the name under which the run knows it.
        seed: of the run.
    """

    name: str
    seed: int = 0


class Tool(ABC):
    """A tool that the policy may call.

    Attributes:
        schema: OpenAI function schema, ``{"type": "function", "function": {"name", "description", "parameters"}}``.
        isolation: ``inline`` runs on the worker's event loop; ``process`` in a child process that can be killed.
        stateful: keeps state between calls of one trajectory. With ``process`` such a session owns its process.
    """

    schema: dict[str, Any]
    isolation: ClassVar[Isolation] = "inline"
    stateful: ClassVar[bool] = False

    def __init__(self, config: Any, context: ToolContext) -> None:
        self.config = config
        self.context = context

    async def create(self, instance_id: str, **create_kwargs: Any) -> None:
        """A trajectory begins. ``create_kwargs`` come from the row's ``extra_info.tools_kwargs``."""
        return None

    @abstractmethod
    async def execute(self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any) -> ToolResult:
        """One call. May raise: the model then sees the error as an observation."""

    async def calc_reward(self, instance_id: str, **calc_reward_kwargs: Any) -> float | None:
        """A reward for the final state, or None. Called once when the trajectory ends."""
        return None

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """The trajectory has ended, in whatever way."""
        return None


def function_schema(
    name: str, description: str, properties: dict[str, Any], required: Sequence[str] | None = None
) -> dict[str, Any]:
    """An OpenAI function schema; all properties are required unless ``required`` says otherwise."""
    names = list(properties if required is None else required)
    parameters = {"type": "object", "properties": properties, "required": names}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


class FunctionTool(Tool):
    """A tool made of one typed function, sync or async. What it returns is shown to the model as ``str``."""

    isolation: ClassVar[Isolation] = "process"

    def __init__(self, function: Callable[..., Any], context: ToolContext) -> None:
        super().__init__(None, context)
        self.function = function
        self.schema = schema_of(function, context.name)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any) -> ToolResult:
        result = self.function(**parameters)
        if inspect.isawaitable(result):
            result = await result
        if isinstance(result, ToolResult):
            return result
        return ToolResult(result if isinstance(result, ToolResponse) else ToolResponse(str(result)))


def schema_of(function: Callable[..., Any], name: str = "") -> dict[str, Any]:
    """The schema of a typed function; its docstring's first paragraph is the description.

    Raises:
        TypeError: a parameter has no annotation, or one that has no JSON type.
    """
    hints = typing.get_type_hints(function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in hints:
            raise TypeError(f"tool function {function.__name__}: parameter {parameter.name!r} needs a type annotation")
        properties[parameter.name] = _json_type(hints[parameter.name], f"{function.__name__}.{parameter.name}")
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    description = inspect.getdoc(function) or ""
    return function_schema(name or function.__name__, description.split("\n\n")[0], properties, required)


_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def _json_type(hint: Any, where: str) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    if origin is Literal:
        return {"type": _JSON_TYPES[type(args[0])], "enum": list(args)}
    if origin in (typing.Union, types.UnionType):
        inner = [arg for arg in args if arg is not type(None)]
        if len(inner) == 1:
            return _json_type(inner[0], where)
    if hint is list or origin is list:
        return {"type": "array", **({"items": _json_type(args[0], where)} if args else {})}
    if hint is dict or origin is dict:
        return {"type": "object"}
    raise TypeError(f"{where}: {hint!r} has no JSON type; allowed are str, int, float, bool, list, dict, Literal")
