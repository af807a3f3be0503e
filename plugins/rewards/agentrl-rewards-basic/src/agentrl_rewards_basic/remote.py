"""The reward function on a server."""

import asyncio
import json
import math
import os
from dataclasses import asdict
from typing import Any, ClassVar

import httpx
import jsonschema

from agentrl_core.api import (
    HttpError,
    RewardError,
    RewardFunctionContext,
    RewardResult,
    RewardTrajectory,
    fetch,
)
from agentrl_rewards_basic.config import RemoteConfig

_NUMBERS = {"type": "object", "additionalProperties": {"type": "number"}}
_LIST = {"type": "array", "items": {"type": "number"}}
_RESULT = {
    "type": "object",
    "required": ["score"],
    "additionalProperties": False,
    "properties": {
        "score": {"type": "number"},
        "metrics": _NUMBERS,
        "components": _NUMBERS,
        "turn_rewards": _LIST,
        "token_rewards": _LIST,
        "answer": {"type": ["string", "null"]},
    },
}
_ANSWER = jsonschema.Draft202012Validator({"if": {"type": "object"}, "then": _RESULT, "else": {"type": "number"}})


class Remote:
    """POSTs the trajectory as JSON, all fields of ``RewardTrajectory``, and takes the score from the answer.

    The answer is a JSON number, or an object with the fields of ``RewardResult``. A connection that fails, no answer
    within ``attempt_timeout``, and the statuses 429 and 5xx are tried again, ``attempts`` times in all, with pauses of
    ``backoff``, 2 ``backoff``, 4 ``backoff``, … seconds. The slot's ``timeout`` bounds all attempts together.

    Raises:
        RewardError: the last attempt failed, another status, or an answer of another form; names the URL.
    """

    isolation: ClassVar[str] = "inline"

    def __init__(self, config: RemoteConfig, context: RewardFunctionContext) -> None:
        self.config = config
        if httpx.URL(config.url).userinfo:
            raise ValueError(f"{context.name}: the URL holds a password, which errors would show; use token_env")
        self._headers = {"content-type": "application/json"}
        if config.token_env is not None:
            if config.token_env not in os.environ:
                raise ValueError(f"{context.name}: token_env names {config.token_env}, which is not set; export it")
            self._headers["authorization"] = f"Bearer {os.environ[config.token_env]}"

    async def __call__(self, trajectory: RewardTrajectory) -> RewardResult:
        body = json.dumps(asdict(trajectory), default=_plain)
        for attempt in range(self.config.attempts):
            if attempt:
                await asyncio.sleep(self.config.backoff * 2 ** (attempt - 1))
            try:
                answer = await fetch(
                    self.config.url,
                    content=body,
                    headers=self._headers,
                    timeout=self.config.attempt_timeout,
                    timeout_option="attempt_timeout",
                    limit=self.config.max_body_bytes,
                )
            except HttpError as error:
                problem = error
                if error.status is not None and error.status != 429 and error.status < 500:
                    break
            else:
                return self._result(answer.decode(errors="replace"))
        raise RewardError(f"no score in {attempt + 1} attempts; the last: {problem}")

    def _result(self, text: str) -> RewardResult:
        try:
            value = json.loads(text, parse_int=_finite, parse_float=_finite, parse_constant=_finite)
            _ANSWER.validate(value)
        except (ValueError, RecursionError, jsonschema.ValidationError) as error:
            message = error.message if isinstance(error, jsonschema.ValidationError) else error
            raise RewardError(
                f"{self.config.url} answered {text[:200]!r}: {message}; allowed are a finite number and an object "
                'like {"score": 1.0} with the fields of RewardResult'
            ) from error
        return RewardResult(**value) if isinstance(value, dict) else RewardResult(value)


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text} is not a finite number")
    return float(text)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
