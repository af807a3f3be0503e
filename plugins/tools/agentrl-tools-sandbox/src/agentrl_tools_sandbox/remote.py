"""Python code in a sandbox service, over HTTP.

It speaks what SandboxFusion's ``POST /run_code`` speaks: ``{"code", "language", "run_timeout"}`` is answered with
``{"status": "Success" | "Failed" | "SandboxError", "message", "run_result": {"status": "Finished" | "Error" |
"TimeLimitExceeded", "return_code", "stdout", "stderr"}}``.
"""

import asyncio
from typing import Any

import httpx

from agentrl_core.api import Tool, ToolContext, ToolError, ToolResult, ToolUnavailableError, function_schema
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
            async with (
                asyncio.timeout(self.config.answer_timeout),
                self._slots,
                httpx.AsyncClient(timeout=None) as client,
            ):
                answer = await client.post(self._url, json=body)
            answer.raise_for_status()
            reply = answer.json()
            if reply["status"] not in ("Success", "Failed"):
                raise ToolUnavailableError(f"{self._url}: {reply['status']}: {reply.get('message', '')}")
            run = reply["run_result"]
            late = run["status"] == "TimeLimitExceeded"
            text = (run.get("stdout") or "") + (run.get("stderr") or "")
        except (TimeoutError, httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            what = f"{type(error).__name__}: {error}".rstrip(": ")
            raise ToolUnavailableError(f"no usable answer from {self._url}: {what}") from error
        half = self.config.max_output // 2
        if len(text) > 2 * half:
            text = f"{text[:half]}\n[{len(text) - 2 * half} characters were cut]\n{text[-half:]}"
        return result({"text": text, "late": late, "failed": late or reply["status"] == "Failed"}, self.config.timeout)
