"""Python code in a sandbox."""

from typing import Any

from agentrl_core.api import Tool, ToolContext, ToolError, ToolResponse, ToolResult, function_schema
from agentrl_tools_sandbox.config import PythonConfig
from agentrl_tools_sandbox.sandbox import SandboxDied, Sandboxes

CODE = {"code": {"type": "string", "description": "the code; print what you want to see"}}


class PythonTool(Tool):
    """Runs code and shows what it printed, with the value of a last expression and the traceback of an error.

    Raises:
        PluginRequirementError: no sandbox works here, and ``unsafe`` is not set.
    """

    config: PythonConfig

    def __init__(self, config: PythonConfig, context: ToolContext) -> None:
        super().__init__(config, context)
        self._sandboxes = Sandboxes(config, context)
        kept = "are kept" if config.keep_state else "are not kept"
        self.schema = function_schema(
            "python",
            f"Runs Python code and returns its output. Variables and files {kept} between calls. "
            f"Time limit: {config.timeout:g} s. There is no network.",
            CODE,
        )

    async def execute(self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any) -> ToolResult:
        code = parameters.get("code")
        if not isinstance(code, str):
            raise ToolError('python takes one argument, the string "code"')
        request = {"do": "python", "code": code, "timeout": self.config.timeout}
        try:
            reply = await self._sandboxes.ask(instance_id, request, self.config.keep_state)
        except SandboxDied as error:
            lost = " Its variables and files are lost." if self.config.keep_state else ""
            reply = {"text": f"The code was ended: {error}.{lost}", "failed": True}
        return result(reply, self.config.timeout)

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        await self._sandboxes.release(instance_id)


def result(reply: dict[str, Any], timeout: float) -> ToolResult:
    """What the model sees of a reply, and its metrics: calls whose code failed, calls that were too late."""
    if "error" in reply:
        raise ToolError(str(reply["error"]))
    late, failed = bool(reply.get("late")), bool(reply.get("failed"))
    notes = [reply["text"].rstrip("\n")] if reply["text"] else []
    if late:
        notes.append(f"[stopped after {timeout:g} s]")
    elif isinstance(reply.get("code"), int) and reply["code"]:
        notes.append(f"[exit code {reply['code']}]")
    text = "\n".join(notes) or "[no output]"
    return ToolResult(ToolResponse(text), metrics={"failed": float(failed), "timed_out": float(late)})
