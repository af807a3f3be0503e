"""The reward function on a server."""

import asyncio
import json
import math
import os
import ssl
from dataclasses import asdict
from typing import Any, ClassVar

import httpx
import jsonschema

from agentrl_core.api import RewardError, RewardFunctionContext, RewardResult, RewardTrajectory
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
        # Reading the certificates takes longer than a call.
        self._tls = ssl.create_default_context()

    async def __call__(self, trajectory: RewardTrajectory) -> RewardResult:
        body = json.dumps(asdict(trajectory), default=_plain)
        async with httpx.AsyncClient(verify=self._tls, timeout=None, headers=self._headers) as client:
            for attempt in range(self.config.attempts):
                if attempt:
                    await asyncio.sleep(self.config.backoff * 2 ** (attempt - 1))
                try:
                    async with asyncio.timeout(self.config.attempt_timeout):
                        response = await client.post(self.config.url, content=body)
                except (httpx.TransportError, TimeoutError) as error:
                    problem = str(error) or f"{type(error).__name__} after {self.config.attempt_timeout:g} s"
                    continue
                if response.is_success:
                    return self._result(response.text)
                problem = f"status {response.status_code}: {response.text[:200]}"
                if response.status_code != 429 and response.status_code < 500:
                    break
        raise RewardError(f"{self.config.url} gave no score in {attempt + 1} attempts; the last: {problem}")

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
