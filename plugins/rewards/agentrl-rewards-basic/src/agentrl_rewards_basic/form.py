"""Reward functions for the form of an answer: JSON of a schema, tags in order."""

import json
import re
from typing import Any, ClassVar

from jsonschema import SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry

from agentrl_core.api import RewardFunctionContext, RewardResult, RewardTrajectory
from agentrl_rewards_basic.config import JsonSchemaConfig, TagsConfig
from agentrl_rewards_basic.rows import answer_text, row_of, without_fence


class JsonSchema:
    """1.0 if the answer is JSON that the schema accepts, ``format_score`` if it is other JSON, else 0.0.

    The schema is the row's ``extra_info.json_schema`` (a mapping or JSON text), or else the option ``schema``. The
    answer may be in a Markdown code fence. NaN and Infinity are not JSON. References to other documents are not
    fetched.

    Raises:
        ValueError: there is no schema, or it is not valid.
    """

    # A schema's patterns may take exponential time on a text that the policy chose.
    isolation: ClassVar[str] = "process"

    def __init__(self, config: JsonSchemaConfig, context: RewardFunctionContext) -> None:
        self.config = config
        self.name = context.name
        self._validator = None if config.schema is None else self._compile(config.schema, "the option schema")

    def __call__(self, trajectory: RewardTrajectory) -> RewardResult:
        validator = self._validator_of(trajectory)
        try:
            text = without_fence(answer_text(trajectory, self.config.tag) or "")
            value = json.loads(text, parse_constant=_no_constant)
            answer = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
            valid = validator.is_valid(value)
        except (ValueError, RecursionError):
            return RewardResult(0.0, answer="")
        return RewardResult(1.0 if valid else self.config.format_score, answer=answer)

    def _validator_of(self, trajectory: RewardTrajectory) -> Validator:
        schema: Any = trajectory.extra_info.get("json_schema")
        where = f"extra_info.json_schema of {row_of(trajectory)}"
        if schema is None and self._validator is None:
            raise ValueError(f"{self.name}: no {where}, and no option schema; set one of them")
        return self._validator if schema is None else self._compile(schema, where)  # type: ignore[return-value]

    def _compile(self, schema: Any, where: str) -> Validator:
        try:
            schema = json.loads(schema) if isinstance(schema, str) else schema
            cls = validator_for(schema)
            cls.check_schema(schema)
        except (ValueError, TypeError, SchemaError) as error:
            message = error.message if isinstance(error, SchemaError) else error
            raise ValueError(f"{self.name}: {where} is not a JSON schema: {message}") from error
        return cls(schema, registry=Registry())


class Tags:
    """1.0 if the last turn consists of the tags, each once and in order, else 0.0.

    Only space may stand between and around ``<tag>…</tag>``. The texts inside hold none of the tags.
    """

    isolation: ClassVar[str] = "inline"

    def __init__(self, config: TagsConfig, context: RewardFunctionContext) -> None:
        if not config.tags:
            raise ValueError(f"{context.name}: the option tags is empty; name at least one tag")
        names = [re.escape(tag) for tag in config.tags]
        # Possessive, so that a text without the form is rejected in one pass.
        inside = rf"(?:(?!</?(?:{'|'.join(names)})>).)*+"
        parts = [rf"<{name}>{inside}</{name}>" for name in names]
        if config.prefilled:
            parts[0] = parts[0].removeprefix(f"<{names[0]}>")
        self._form = re.compile(r"\s*+" + r"\s*+".join(parts) + r"\s*+", re.DOTALL)

    def __call__(self, trajectory: RewardTrajectory) -> float:
        return float(self._form.fullmatch(trajectory.last_text) is not None)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
