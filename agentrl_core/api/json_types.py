"""The one way from a Python annotation to a JSON schema: for tools' parameters and for plugins' options."""

from collections.abc import Callable, Mapping
from typing import Any


def json_type(hint: Any, section: Callable[[type], dict[str, Any]] | None = None) -> dict[str, Any]:
    """The JSON schema of values of an annotation, by pydantic, without titles and references.

    Args:
        hint: an evaluated annotation.
        section: makes the schema of a dataclass; None: as pydantic does.

    Raises:
        TypeError: the annotation has no JSON type.
    """
    from pydantic import PydanticUserError, TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema

    class Generator(GenerateJsonSchema):
        def dataclass_schema(self, schema: Any) -> dict[str, Any]:
            return section(schema["cls"]) if section is not None else super().dataclass_schema(schema)

    try:
        schema = TypeAdapter(hint).json_schema(schema_generator=Generator)
    except PydanticUserError as error:
        raise TypeError(f"{hint!r} has no JSON type: {str(error).splitlines()[0]}") from error
    inlined: dict[str, Any] = _inlined(schema, schema.pop("$defs", {}), ())
    return inlined


def _inlined(schema: Any, definitions: Mapping[str, Any], within: tuple[str, ...]) -> Any:
    """The schema with definitions in place of references to them: chat templates and models follow none."""
    if isinstance(schema, list):
        return [_inlined(item, definitions, within) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in within:
            raise TypeError(f"{name} refers to itself, which a schema without references cannot express")
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return {**_inlined(definitions[name], definitions, (*within, name)), **rest}
    kept = {key: value for key, value in schema.items() if key != "title" or not isinstance(value, str)}
    return {key: _inlined(value, definitions, within) for key, value in kept.items()}
