"""Python code in a sandbox service, over HTTP.

It speaks what SandboxFusion's ``POST /run_code`` speaks: ``{"code", "language", "run_timeout"}`` is answered with
``{"status": "Success" | "Failed" | "SandboxError", "message", "run_result": {"status": "Finished" | "Error" |
"TimeLimitExceeded", "return_code", "stdout", "stderr"}}``.
"""

import asyncio
from typing import Any

from agentrl_core.api import (
    BodyTooLargeError,
    HttpError,
    Tool,
    ToolContext,
    ToolError,
    ToolResult,
    ToolUnavailableError,
    fetch_json,
    function_schema,
)
from agentrl_tools_sandbox.config import RemotePythonConfig
from agentrl_tools_sandbox.python_tool import CODE, result


class RemotePythonTool(Tool):
    """Sends each call's code to the service. Nothing is kept between calls."""

    config: RemotePythonConfig

    def __init__(self, config: RemotePythonConfig, context: ToolContext) -> None:
        super().__init__(config, context)
        self.schema = function_schema(
            "python", f"Runs Python code and returns its output. Time limit: {config.timeout:g} s.", CODE
        )
        self._url = f"{config.url.rstrip('/')}/run_code"
        self._slots = asyncio.Semaphore(config.max_concurrent)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any) -> ToolResult:
        code = parameters.get("code")
        if not isinstance(code, str):
            raise ToolError('python takes one argument, the string "code"')
        body = {"code": code, "language": "python", "run_timeout": self.config.timeout}
        try:
            reply = await fetch_json(
                self._url,
                json=body,
                timeout=self.config.answer_timeout,
                timeout_option="answer_timeout",
                limit=self.config.max_body_bytes,
                slots=self._slots,
            )
            if reply["status"] not in ("Success", "Failed"):
                raise ToolUnavailableError(f"{self._url}: {reply['status']}: {reply.get('message', '')}"[:1000])
            run = reply["run_result"]
            late = run["status"] == "TimeLimitExceeded"
            text = "".join(run.get(name) or "" for name in ("stdout", "stderr"))
        except BodyTooLargeError as error:
            # A program that prints without end is the model's fault: a retry would do the same.
            raise ToolError(f"the output of the code is too long: {error}") from error
        except (HttpError, KeyError, TypeError, AttributeError) as error:
            what = str(error) if isinstance(error, HttpError) else f"{self._url}: {type(error).__name__}: {error}"
            raise ToolUnavailableError(f"no usable answer from the sandbox service {what}") from error
        half = self.config.max_output // 2
        if len(text) > 2 * half:
            text = f"{text[:half]}\n[{len(text) - 2 * half} characters were cut]\n{text[-half:]}"
        return result({"text": text, "late": late, "failed": late or reply["status"] == "Failed"}, self.config.timeout)
