"""What the entry points name."""

from agentrl_core.api import PluginSpec
from agentrl_tools_sandbox.config import CodeTestsConfig, PythonConfig, RemotePythonConfig, ShellConfig

CODE_TESTS = PluginSpec(
    kind="reward_function",
    name="code_tests",
    api_version=1,
    summary="runs the answer's Python code against the tests of the row, in a local sandbox",
    config=CodeTestsConfig,
    factory="agentrl_tools_sandbox.code_tests:CodeTests",
)
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
