"""What the entry points name."""

from agentrl_core.api import PluginSpec
from agentrl_tools_sandbox.config import PythonConfig, RemotePythonConfig, ShellConfig

PYTHON = PluginSpec(
    kind="tool",
    name="python",
    api_version=1,
    summary="runs Python code in a local sandbox",
    config=PythonConfig,
    factory="agentrl_tools_sandbox.python_tool:PythonTool",
)
REMOTE_PYTHON = PluginSpec(
    kind="tool",
    name="remote_python",
    api_version=1,
    summary="runs Python code in a sandbox service over HTTP",
    config=RemotePythonConfig,
    factory="agentrl_tools_sandbox.remote:RemotePythonTool",
)
SHELL = PluginSpec(
    kind="tool",
    name="shell",
    api_version=1,
    summary="runs shell commands and file operations in a local sandbox, a working directory per trajectory",
    config=ShellConfig,
    factory="agentrl_tools_sandbox.shell_tool:ShellTool",
)
