from collections.abc import Mapping
from typing import Any

import pytest

from agentrl_core.api import RewardTrajectory
from agentrl_testing.contracts import RewardFunctionCase, RewardFunctionContract, ToolCase, ToolContract
from agentrl_tools_sandbox.config import CodeTestsConfig, PythonConfig, ShellConfig
from agentrl_tools_sandbox.plugin import CODE_TESTS, PYTHON, SHELL


class TestPython(ToolContract):
    @pytest.fixture(params=[False, True], ids=["a sandbox per call", "a sandbox per trajectory"])
    def plugin(self, request: pytest.FixtureRequest, any_boundary: Mapping[str, Any]) -> ToolCase:
        config = PythonConfig(keep_state=request.param, start_timeout=60.0, **any_boundary)
        return ToolCase(PYTHON, config=config, arguments={"code": "print(6 * 7)"}, expected="42")


class TestShell(ToolContract):
    @pytest.fixture
    def plugin(self, any_boundary: Mapping[str, Any]) -> ToolCase:
        return ToolCase(
            SHELL,
            config=ShellConfig(start_timeout=60.0, **any_boundary),
            function="shell",
            arguments={"command": "cat greeting; date >> greeting"},
            create_kwargs={"files": {"greeting": "hello"}},
            expected="hello",
        )


class TestCodeTests(RewardFunctionContract):
    @pytest.fixture
    def plugin(self, any_boundary: Mapping[str, Any]) -> RewardFunctionCase:
        answers = {"```python\nprint(input())\n```": 1.0, "```\nprint(1)\n```": 0.0}
        tests = {"inputs": ["2"], "outputs": ["2\n"]}
        trajectories = [(RewardTrajectory([], text, text, text, tests), score) for text, score in answers.items()]
        return RewardFunctionCase(CODE_TESTS, config=CodeTestsConfig(**any_boundary), trajectories=trajectories)
