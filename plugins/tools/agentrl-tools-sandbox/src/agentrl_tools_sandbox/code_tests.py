"""A reward function that runs the answer's code against tests, in a sandbox."""

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from agentrl_core.api import RewardFunctionContext, RewardResult, RewardTrajectory, ToolContext
from agentrl_tools_sandbox.config import CodeTestsConfig
from agentrl_tools_sandbox.sandbox import SandboxDied, Sandboxes

Test = tuple[str, str | None]
"""Input and expected output of a program; or assertions and None."""
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_RUN = """
import sys as _sys, io as _io
_sys.stdin = _io.StringIO({stdin!r})
exec(compile({code!r}, "<answer>", "exec"), {{"__name__": "__main__"}})
"""
_ASSERT = """
_names = {{"__name__": "answer"}}
exec(compile({code!r}, "<answer>", "exec"), _names)
exec(compile({tests!r}, "<tests>", "exec"), _names)
print()
print({mark!r})
"""


class CodeTests:
    """Runs the last Python block of the policy's last turn against the tests of the row.

    Tests are ``extra_info.tests`` of the row, or else its ground truth: a text of Python assertions, or
    ``{"inputs": [...], "outputs": [...]}`` of a program that reads stdin, also as JSON text. Outputs are equal if
    their lines are, without spaces at their ends. Expected outputs never enter the sandbox; assertions do, and code
    that looks for them can cheat.

    The score is 1 if all tests pass, or with ``partial`` the share that does; 0 without a block. Metrics: ``passed``,
    the share that passed, and ``no_code``.

    Raises:
        ValueError: the row has no tests, or tests in another form.
        ToolUnavailableError: no sandbox started.
    """

    isolation: ClassVar[str] = "inline"

    def __init__(self, config: CodeTestsConfig, context: RewardFunctionContext) -> None:
        self._config = config
        self._sandboxes = Sandboxes(config, ToolContext(context.name))
        self._runs = 0

    async def __call__(self, trajectory: RewardTrajectory) -> RewardResult:
        tests = list(tests_of(trajectory))[: self._config.max_tests]
        longest = max(len((expected or "").encode()) for _, expected in tests)
        if longest > self._config.max_output:
            raise ValueError(f"code_tests: a test expects {longest} bytes of output; raise max_output")
        *_, code = [None, *_BLOCK.findall(trajectory.last_text)]
        if code is None:
            return RewardResult(0.0, metrics={"passed": 0.0, "no_code": 1.0})
        self._runs += 1
        instance, passed = f"{id(self)}-{self._runs}", 0
        try:
            for test in tests:
                right = await self._passes(instance, code, test)
                passed += right
                if not right and not self._config.partial:
                    break
        finally:
            await self._sandboxes.release(instance)
        share = passed / len(tests)
        score = share if self._config.partial else float(passed == len(tests))
        return RewardResult(score, metrics={"passed": share, "no_code": 0.0})

    async def _passes(self, instance: str, code: str, test: Test) -> bool:
        given, expected = test
        # What is printed last shows that all assertions were reached, also by code that ends its process.
        mark = secrets.token_hex(16)
        program = (
            _ASSERT.format(code=code, tests=given, mark=mark)
            if expected is None
            else _RUN.format(code=code, stdin=given)
        )
        request = {"do": "python", "code": program, "timeout": self._config.timeout}
        try:
            reply = await self._sandboxes.ask(instance, request, keep=True)
        except SandboxDied:
            return False
        if reply.get("failed") or reply.get("late") or "error" in reply:
            return False
        found = _lines(reply["text"])
        return found[-1:] == [mark] if expected is None else found == _lines(expected)


def tests_of(trajectory: RewardTrajectory) -> Iterator[Test]:
    """The tests of a row; at least one."""
    found = trajectory.extra_info.get("tests", trajectory.ground_truth)
    if isinstance(found, str) and found.lstrip().startswith("{"):
        try:
            found = json.loads(found)
        except ValueError as error:
            raise _refused(trajectory, f"text that begins like JSON and is not: {error}") from None
    if isinstance(found, str) and found.strip():
        yield found, None
        return
    if not isinstance(found, Mapping):
        raise _refused(trajectory, f"{found!r:.80}")
    inputs, outputs = found.get("inputs"), found.get("outputs")
    texts = [each for each in (inputs, outputs) if isinstance(each, Sequence) and not isinstance(each, str)]
    if len(texts) != 2 or not texts[0] or len(texts[0]) != len(texts[1]):
        raise _refused(trajectory, f"{dict(found)!r:.80}, without as many inputs as outputs")
    for given, expected in zip(*texts, strict=True):
        if not isinstance(given, str) or not isinstance(expected, str):
            raise _refused(trajectory, f"the input {given!r:.40} with the output {expected!r:.40}, which must be text")
        yield given, expected


def _refused(trajectory: RewardTrajectory, found: str) -> ValueError:
    return ValueError(
        f"code_tests: a row of {trajectory.data_source or 'the data'} has no tests: found {found}. Put assertions or "
        '{"inputs": [...], "outputs": [...]} into extra_info.tests or reward_model.ground_truth'
    )


def _lines(text: str) -> list[str]:
    """Lines without spaces at their ends, and without empty ones at the end of the text."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
