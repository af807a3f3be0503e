"""The interface of tools.

Lifecycle, per trajectory: ``create`` once, ``execute`` for every call, ``calc_reward`` once at the end, ``release``
always, even after a cancellation. A tool object serves many trajectories at once and tells them apart by
``instance_id``; all methods run on one event loop, so blocking work belongs into a thread or into a process of its
own (``isolation = "process"``, where a call that passes its deadline is killed).

    class Calculator(Tool):
        schema = function_schema("calculator", "Evaluates arithmetic.", {"expression": {"type": "string"}})

        async def execute(self, instance_id, parameters, **kwargs):
            return ToolResult(ToolResponse(str(evaluate(parameters["expression"]))))

What ``execute`` raises, and a call that passes its deadline, is an observation that the model reads. What ``create``
raises, a ToolUnavailableError of any method, and an error of an engine from ``context.engines`` fail the trajectory,
which starts again from a fresh state. ``calc_reward`` returns a float or None.

A tool may offer several functions: it overrides ``schemas``, and ``execute`` gets ``function``, the name of the called
one.

A plain typed function is a tool too: :class:`FunctionTool` makes the schema from its signature and docstring.
"""

import inspect
import re
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from agentrl_core.api.engine_client import Engines
from agentrl_core.api.errors import ToolError
from agentrl_core.api.json_types import json_type
from agentrl_core.api.message_parts import content_of, image_part, shown_parts

Isolation = Literal["inline", "process"]


@dataclass(frozen=True)
class ToolResponse:
    """What the model sees of a call.

    Args:
        text: what it reads; left empty, the texts of ``parts``.
        images: what it is shown after the text, if it is a vision-language model: ``pathlib.Path``, bytes, data URLs,
            PIL images or arrays [height, width, 3] of uint8.
        parts: texts and images in the order in which the model sees them, in place of ``text`` and ``images``. A data
            URL is here a dict, ``{"type": "image", "image": …}``; other images may be one.
    """

    text: str
    images: Sequence[Any] = ()
    parts: Sequence[Any] = ()

    def __post_init__(self) -> None:
        for name in ("images", "parts"):
            if not isinstance(value := getattr(self, name), list | tuple):
                raise TypeError(f"ToolResponse.{name} is a {type(value).__name__}; allowed is a list")
        # In its process: an image that leaves it as it is becomes a text.
        parts = [part if isinstance(part, str | Mapping) else image_part(part) for part in self.parts]
        object.__setattr__(self, "parts", parts)
        if self.parts and not self.text:
            object.__setattr__(self, "text", "\n".join(part for part in self.parts if isinstance(part, str)))

    @property
    def content(self) -> str | list[dict[str, Any]]:
        """The content of the message that the model sees: a text, or a list of parts where there are images."""
        return content_of(self.parts or [self.text, *map(image_part, self.images)])


class ToolResult(NamedTuple):
    """What ``execute`` returns.

    Args:
        response: what the model sees.
        reward: for this call; used by reward managers with the capability ``tool_rewards``. None: none.
        metrics: numbers by name, logged as means over calls.
        done: the trajectory ends with this call.
    """

    response: ToolResponse
    reward: float | None = None
    metrics: dict[str, float] = {}
    done: bool = False


@dataclass(frozen=True)
class ToolContext:
    """What a tool gets when it is built.

    Args:
        name: the name under which the run knows it.
        seed: of the run.
        engines: clients of the configured engines, by name; none in a child process.
        shows_images: the model can be shown images; False: a response with one is an error that the model reads.
    """

    name: str
    seed: int = 0
    engines: Engines = field(default_factory=Engines)
    shows_images: bool = False


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

    @property
    def schemas(self) -> Sequence[dict[str, Any]]:
        """The schemas of all functions that the tool offers to the model."""
        return (self.schema,)

    @abstractmethod
    async def execute(self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any) -> ToolResult:
        """One call. May raise: the model then sees the error as an observation.

        Raises:
            ToolUnavailableError, EngineError: the fault is the infrastructure's, not the model's; the trajectory is
                retried.
        """

    async def calc_reward(self, instance_id: str, **calc_reward_kwargs: Any) -> float | None:
        """A reward for the final state, or None. Called once when the trajectory ends."""
        return None

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """The trajectory has ended, completed or failed."""
        return None

    async def close(self) -> None:
        """The worker ends: stop what all trajectories shared. Not called in a child process."""
        return None


def function_schema(
    name: str, description: str, properties: dict[str, Any], required: Sequence[str] | None = None
) -> dict[str, Any]:
    """An OpenAI function schema; all properties are required unless ``required`` says otherwise."""
    names = list(properties if required is None else required)
    parameters = {"type": "object", "properties": properties, "required": names}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


class FunctionTool(Tool):
    """A tool made of one typed function, sync or async.

    Arguments are converted to the parameters' types, also to dataclasses and pydantic models. The model sees what the
    function returns as ``str``; dicts, lists, tuples, dataclasses and pydantic models as JSON. It is shown a PIL image,
    or a list of texts and PIL images, or of parts as messages have them.
    """

    isolation: ClassVar[Isolation] = "process"

    def __init__(self, function: Callable[..., Any], context: ToolContext) -> None:
        from pydantic import TypeAdapter

        super().__init__(None, context)
        self.function = function
        self.schema = schema_of(function, context.name)
        hints = typing.get_type_hints(function, include_extras=True)
        self._types = {name: TypeAdapter(hints[name]) for name in inspect.signature(function).parameters}

    async def execute(self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any) -> ToolResult:
        result = self.function(**{name: self._converted(name, value) for name, value in parameters.items()})
        if inspect.isawaitable(result):
            result = await result
        if isinstance(result, ToolResult):
            return result
        if isinstance(result, ToolResponse):
            return ToolResult(result)
        if (parts := shown_parts(result)) is not None:
            return ToolResult(ToolResponse("", parts=parts))
        if isinstance(result, dict | list | tuple) or is_dataclass(result) or hasattr(result, "model_dump_json"):
            from pydantic_core import to_json

            return ToolResult(ToolResponse(to_json(result, fallback=_as_text).decode()))
        return ToolResult(ToolResponse(str(result)))

    def _converted(self, name: str, value: Any) -> Any:
        from pydantic import ValidationError

        try:
            return self._types[name].validate_python(value) if name in self._types else value
        except ValidationError as error:
            details = ((each["loc"], each["msg"]) for each in error.errors())
            problems = [f"{'.'.join(map(str, (name, *place)))}: {message}" for place, message in details]
            raise ToolError("; ".join(problems)) from error


def _as_text(value: Any) -> str:
    if hasattr(value, "getexif") and hasattr(value, "convert"):
        raise TypeError("an image within a dict or another list; return it alone, or in a list of texts and images")
    return str(value)


def schema_of(function: Callable[..., Any], name: str = "") -> dict[str, Any]:
    """The schema of a typed function.

    Its docstring's first paragraph describes it; ``name: text`` lines under ``Args:`` and ``:param name: text`` lines
    describe its parameters.

    Raises:
        TypeError: a parameter has no annotation, has one without a JSON type, or is ``*args`` or ``**kwargs``.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    docstring = inspect.getdoc(function) or ""
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        where = f"tool function {function.__name__}: parameter {parameter}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"{where} cannot be passed by name; make it an ordinary parameter")
        if parameter.name not in hints:
            raise TypeError(f"{where} needs a type annotation")
        try:
            properties[parameter.name] = _parameter_type(hints[parameter.name])
        except TypeError as error:
            raise TypeError(f"{where}: {error}") from None
        if text := _described(docstring, parameter.name):
            properties[parameter.name]["description"] = text
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    return function_schema(name or function.__name__, docstring.split("\n\n")[0], properties, required)


def _parameter_type(hint: Any) -> dict[str, Any]:
    """As :func:`json_type`; a value that may be None is described by what else it may be: models leave it out."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = typing.Union[tuple(arm for arm in typing.get_args(hint) if arm is not types.NoneType)]  # noqa: UP007
    return json_type(hint)


def _described(docstring: str, parameter: str) -> str:
    """The description of a parameter in a docstring of Google's or Sphinx's style, on one line."""
    google = rf"^(?P<indent>[ ]+){parameter}[ ]*(\([^)]*\))?:[ ]*(?P<text>.*(\n(?P=indent)[ ]+\S.*)*)"
    sphinx = rf"^:param ([^:]+ )?{parameter}:[ ]*(?P<text>.*(\n[ ]+\S.*)*)"
    _, _, arguments = docstring.partition("Args:\n")
    found = re.search(google, arguments, re.MULTILINE) or re.search(sphinx, docstring, re.MULTILINE)
    return " ".join(found["text"].split()) if found else ""
