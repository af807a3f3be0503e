"""A shell and file operations in a working directory, in a sandbox for each trajectory."""

from collections.abc import Sequence
from typing import Any

from agentrl_core.api import Tool, ToolContext, ToolError, ToolResult, function_schema
from agentrl_tools_sandbox.config import ShellConfig
from agentrl_tools_sandbox.python_tool import result
from agentrl_tools_sandbox.sandbox import SandboxDied, Sandboxes

_PATH = {"path": {"type": "string", "description": "relative to the working directory"}}
MOST = 1 << 31
"""Of a line's number."""
_LINE = {"type": "integer", "minimum": 1}


class ShellTool(Tool):
    """``shell``, ``read_file``, ``write_file``, ``list_files`` and ``replace_in_file``.

    ``create_kwargs`` may hold ``files``: texts by path, with which the working directory starts.

    Raises:
        PluginRequirementError: no sandbox works here, and ``unsafe`` is not set.
    """

    config: ShellConfig

    def __init__(self, config: ShellConfig, context: ToolContext) -> None:
        super().__init__(config, context)
        self._sandboxes = Sandboxes(config, context)
        self._files: dict[str, dict[str, str]] = {}

    @property
    def schemas(self) -> Sequence[dict[str, Any]]:
        command = {"command": {"type": "string", "description": "for /bin/sh"}}
        lines = {
            "first_line": {**_LINE, "description": "where to begin, counted from 1; default 1"},
            "lines": {**_LINE, "description": "how many lines; default 200"},
        }
        where = {"path": {"type": "string", "description": "relative to the working directory, which is the default"}}
        texts = {name: {"type": "string"} for name in ("old", "new")}
        return (
            function_schema(
                "shell",
                "Runs a command in the working directory and returns its output. Files stay for later calls. "
                f"Time limit: {self.config.timeout:g} s. There is no network.",
                command,
            ),
            function_schema("read_file", "Returns lines of a text file.", _PATH | lines, ["path"]),
            function_schema(
                "write_file", "Creates a text file or replaces it.", _PATH | {"content": {"type": "string"}}
            ),
            function_schema("list_files", "Lists a directory.", where, []),
            function_schema(
                "replace_in_file", "Replaces a text that occurs exactly once in a file by another one.", _PATH | texts
            ),
        )

    async def create(self, instance_id: str, files: dict[str, str] | None = None, **create_kwargs: Any) -> None:
        if files:
            self._files[instance_id] = dict(files)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], function: str = "shell", **execute_kwargs: Any
    ) -> ToolResult:
        request = _request(function, parameters, self.config.timeout)
        try:
            for path, content in self._files.pop(instance_id, {}).items():
                await self._sandboxes.ask(instance_id, {"do": "write", "path": path, "content": content}, keep=True)
            reply = await self._sandboxes.ask(instance_id, request, keep=True)
        except SandboxDied as error:
            reply = {"text": f"The call was ended: {error}. All files of the working directory are lost."}
            reply["failed"] = True
        return result(reply, self.config.timeout)

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        self._files.pop(instance_id, None)
        await self._sandboxes.release(instance_id)


def _request(function: str, parameters: dict[str, Any], timeout: float) -> dict[str, Any]:
    def take(name: str, kind: type = str, default: Any = None) -> Any:
        value = parameters.get(name, default)
        if not isinstance(value, kind) or isinstance(value, bool):
            allowed = "a string" if kind is str else "an integer"
            raise ToolError(f"{function}: {name} is {value!r:.100}; it must be {allowed}")
        if kind is int and not 1 <= value <= MOST:
            raise ToolError(f"{function}: {name} must be 1 to {MOST}")
        return value

    match function:
        case "shell":
            return {"do": "shell", "command": take("command"), "timeout": timeout}
        case "read_file":
            numbers = {name: take(name, int, default) for name, default in (("first_line", 1), ("lines", 200))}
            return {"do": "read", "path": take("path"), **numbers}
        case "write_file":
            return {"do": "write", "path": take("path"), "content": take("content")}
        case "list_files":
            return {"do": "list", "path": take("path", default=".")}
        case "replace_in_file":
            return {"do": "replace", "path": take("path"), "old": take("old"), "new": take("new")}
        case _:
            raise ToolError(f"there is no function {function!r}")
