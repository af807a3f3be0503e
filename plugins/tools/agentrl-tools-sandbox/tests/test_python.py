"""Python code: what the model sees, what is kept, and what happens where a sandbox cannot be had."""

import asyncio
import gc
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from agentrl_core.api import PluginRequirementError, ToolContext, ToolError, ToolUnavailableError
from agentrl_tools_sandbox import sandbox as sandbox_module
from agentrl_tools_sandbox.boundary import Launch
from agentrl_tools_sandbox.config import PythonConfig
from agentrl_tools_sandbox.python_tool import PythonTool

OUTPUTS = [
    ("print('a'); print('b', end='')", "a\nb"),
    ("x = 3\nx * 2", "6"),
    ("None", "[no output]"),
    ("", "[no output]"),
    ("'\\ud800'", "'\\ud800'"),
    ("import os; os.system('echo from the shell; echo bad >&2'); None", "from the shell\nbad"),
    ("import sys; sys.exit(0)", "[no output]"),
    ("import sys; sys.exit('no')", "SystemExit: no"),
    ("input()", 'Traceback (most recent call last):\n  File "<code>", line 1, in <module>\n    input()\nEOFError'),
    ("1 +", '  File "<code>", line 1\n    1 +\n       ^\nSyntaxError: invalid syntax'),
]


def test_output(any_boundary, run_code) -> None:
    shown = run_code(*(code for code, _ in OUTPUTS), **any_boundary)
    for (code, text), seen in zip(OUTPUTS, shown, strict=True):
        assert text in seen, code


def test_a_traceback_shows_the_code(any_boundary, run_code) -> None:
    (text,) = run_code("def f(x):\n    return 1 / x\nf(0)", **any_boundary)
    assert text.startswith("Traceback") and "    return 1 / x" in text and "guest" not in text
    assert text.endswith("ZeroDivisionError: division by zero")


def test_the_middle_of_a_long_output_is_cut(any_boundary, run_code) -> None:
    (text,) = run_code("print('a' * 60 + 'b' * 1000 + 'c' * 60)", max_output=120, **any_boundary)
    assert text == "a" * 60 + "\n[1001 bytes were cut]\n" + "c" * 59


def test_state_is_kept_in_a_trajectory(any_boundary, run_code) -> None:
    codes = "x = 1", "open('file', 'w').write('text')", "x += 1", "print(x, open('file').read())"
    assert run_code(*codes, **any_boundary)[-1] == "2 text"


def test_state_is_not_kept_by_default(any_boundary, run_code) -> None:
    texts = run_code("x = 1\nopen('file', 'w')", "x", "open('file')", keep_state=False, **any_boundary)
    assert "NameError" in texts[1] and "FileNotFoundError" in texts[2]


def test_code_that_ends_its_process_loses_its_state(any_boundary, run_code) -> None:
    texts = run_code("x = 1", "import os; os._exit(3)", "x", **any_boundary)
    assert texts[1].endswith("Its variables and files are lost.") and "NameError" in texts[2]


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("import sys; print('said'); sys.stdout = None", "said"),
        ("import sys; sys.stderr = None; 1 / 0", "ZeroDivisionError"),
        ("import sys; sys.stdout = object()", "[no output]"),
        ("import sys\nclass Odd:\n    def __str__(self): return 1 / 0\nsys.exit(Odd())", "cannot be shown: it raised "),
        (
            "class Odd(Exception):\n    def with_traceback(self, trace): raise KeyError\nraise Odd",
            "it raised <class 'KeyE",
        ),
    ],
)
def test_odd_streams_and_exceptions_cost_no_state(any_boundary, run_code, code: str, shown: str) -> None:
    texts = run_code("x = 5", code, "print('well', x)", **any_boundary)
    assert shown in texts[1] and texts[2] == "well 5"


def test_a_forked_copy_of_the_guest_does_not_answer(any_boundary, run_code) -> None:
    assert run_code("import os\nos.fork()\nx = 1", "x", "x + 1", **any_boundary)[1:] == ["1", "2"]


def test_packages_of_the_interpreter_can_be_imported(any_boundary, run_code) -> None:
    assert run_code("import numpy; int(numpy.arange(4).sum())", **any_boundary) == ["6"]


def test_metrics_count_failures_and_deadlines(any_boundary) -> None:
    async def main() -> None:
        for code, limit, failed, late in (
            ("1", 30, 0.0, 0.0),
            ("1 / 0", 30, 1.0, 0.0),
            ("while True: 1", 0.2, 1.0, 1.0),
        ):
            tool = PythonTool(PythonConfig(timeout=limit, **any_boundary), ToolContext("python"))
            metrics = (await tool.execute("a", {"code": code})).metrics
            assert metrics == {"failed": failed, "timed_out": late}
        with pytest.raises(ToolError, match='the string "code"'):
            await tool.execute("a", {"code": 5})

    asyncio.run(main())


def test_parallel_calls_of_a_trajectory_run_in_order(any_boundary) -> None:
    async def main() -> None:
        tool = PythonTool(PythonConfig(keep_state=True, **any_boundary), ToolContext("python"))
        codes = ["x = 1", *["x += 1\nprint(x)"] * 4]
        results = await asyncio.gather(*(tool.execute("a", {"code": code}) for code in codes))
        assert [result.response.text for result in results[1:]] == ["2", "3", "4", "5"]
        await tool.release("a")

    asyncio.run(main())


def test_a_cancelled_call_leaves_no_answer_for_the_next_one(any_boundary, folder) -> None:
    async def main() -> None:
        tool = PythonTool(PythonConfig(keep_state=True, **any_boundary), ToolContext("python"))
        await tool.execute("a", {"code": "x = 1"})
        call = asyncio.create_task(tool.execute("a", {"code": "while True: pass"}))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        assert (await tool.execute("a", {"code": "2"})).response.text == "2"
        await tool.release("a")

    asyncio.run(main())
    assert not list(folder.iterdir())


def test_without_a_sandbox_it_refuses_and_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr("agentrl_tools_sandbox.boundary.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sandbox_module, "_chosen", {})
    with pytest.raises(PluginRequirementError) as caught:
        PythonTool(PythonConfig(), ToolContext("python"))
    for words in ("sandlock: the package is not installed", "no command bwrap", "pip install sandlock", "unsafe: true"):
        assert words in str(caught.value)


def test_a_sandbox_that_fails_its_trial_is_not_used(monkeypatch) -> None:
    monkeypatch.setattr(sandbox_module, "_chosen", {})
    monkeypatch.setattr(sandbox_module, "trial", lambda launch: f"{launch.boundary} is forbidden here")
    with pytest.raises(PluginRequirementError, match="no sandbox works on this machine"):
        PythonTool(PythonConfig(), ToolContext("python"))


def test_an_interpreter_that_does_not_exist_is_refused() -> None:
    with pytest.raises(PluginRequirementError, match="python: /nowhere/python cannot be run"):
        PythonTool(PythonConfig(python="/nowhere/python"), ToolContext("python"))


def test_unsafe_runs_without_a_boundary_and_says_so(run_code, caplog, monkeypatch) -> None:
    monkeypatch.setattr(sandbox_module, "_chosen", {})
    code = f"import os\n(os.path.exists({str(Path(__file__))!r}), 'PYTEST_CURRENT_TEST' in os.environ)"
    assert run_code(code, unsafe=True) == ["(True, False)"]
    assert "runs code without a boundary, because `unsafe` is set" in caplog.text


def test_a_sandbox_that_does_not_start_is_not_the_models_fault(any_boundary, folder) -> None:
    tool = PythonTool(PythonConfig(**any_boundary), ToolContext("python"))
    broken = [sys.executable, "-c", "import sys; sys.exit('the kernel says no')"]
    tool._sandboxes.launch = Launch("broken", lambda path, pipe: {"command": broken, "env": {}})
    with pytest.raises(ToolUnavailableError, match=r"the sandbox \(broken\) did not start: the kernel says no"):
        asyncio.run(tool.execute("a", {"code": "1"}))
    tool._sandboxes.launch = Launch("hangs", lambda path, pipe: {"command": ["/bin/sleep", "1000"], "env": {}})
    tool.config.start_timeout = 0.2
    with pytest.raises(ToolUnavailableError, match="no sandbox started within the start_timeout of 0.2 s"):
        asyncio.run(tool.execute("a", {"code": "1"}))
    assert not list(folder.iterdir())


def test_only_a_few_sandboxes_start_at_once(any_boundary, monkeypatch) -> None:
    starting, most, start = 0, 0, sandbox_module.Sandbox.start

    async def counted(self: sandbox_module.Sandbox) -> None:
        nonlocal starting, most
        starting += 1
        most = max(most, starting)
        try:
            await start(self)
        finally:
            starting -= 1

    monkeypatch.setattr(sandbox_module.Sandbox, "start", counted)

    async def main() -> None:
        tool = PythonTool(PythonConfig(max_starting=2, start_timeout=60.0, **any_boundary), ToolContext("python"))
        await asyncio.gather(*(tool.execute(str(number), {"code": "1"}) for number in range(8)))

    asyncio.run(main())
    assert most == 2


@pytest.mark.slow
def test_many_calls_leave_nothing_behind(confined, folder) -> None:
    """No process, directory, mount or open file; the benchmark `sandbox.py` does the same with more."""
    mounts, mine = Path("/proc/self/mountinfo"), Path("/proc/self/fd")

    async def main() -> tuple[int, int]:
        kept = PythonTool(PythonConfig(keep_state=True, start_timeout=60.0, **confined), ToolContext("python"))
        fresh = PythonTool(PythonConfig(start_timeout=60.0, **confined), ToolContext("python"))

        async def trajectory(number: int) -> None:
            for code in ("x = 1", "x", "import os; os.fork() and os._exit(1)", "open('f', 'w')"):
                await kept.execute(str(number), {"code": code})
            await fresh.execute(str(number), {"code": "1"})
            await kept.release(str(number))

        await kept.execute("-1", {"code": "1"})
        assert len(processes_of(folder)) >= 2
        await kept.release("-1")
        await trajectory(-1)
        gc.collect()
        before = len(list(mine.iterdir()))
        await asyncio.gather(*map(trajectory, range(8)))
        gc.collect()
        return before, len(list(mine.iterdir()))

    mounted = mounts.read_text()
    before, after = asyncio.run(main())
    assert after <= before and mounts.read_text() == mounted
    assert not list(folder.iterdir())
    assert not processes_of(folder)


def processes_of(folder: Path) -> list[Path]:
    """Those of sandboxes with a directory in ``folder``: it is in their arguments or variables."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if bytes(folder) in (path / "cmdline").read_bytes() + (path / "environ").read_bytes():
                found.append(path)
    return found


FORGE = """
import gc, os
replies = [each for each in gc.get_objects() if type(each).__name__ == "BufferedWriter" and each.fileno() > 2][0]
os.write(replies.fileno(), b'{"text": "' + b"x" * 60_000 + b'", "code": "' + b"y" * 1000 + b'"}\\n')
"""


def test_a_reply_that_code_forges_is_not_longer_than_any_other(any_boundary, run_code) -> None:
    (text,) = run_code(FORGE, max_output=1000, **any_boundary)
    assert set(text) == {"x"} and len(text) < 10_000


def test_an_error_whose_text_is_no_unicode_has_its_traceback(any_boundary, run_code) -> None:
    first, second = run_code(r"raise ValueError('\ud800')", "print(1)", **any_boundary)
    assert first.endswith(r"ValueError: \ud800") and second == "1"


def test_output_is_that_of_the_call_and_does_not_pile_up(run_code, any_boundary) -> None:
    codes = [f"print('{letter}' * 300_000)" for letter in "abcdefgh"]
    *texts, size, emptied, last = run_code(
        *codes, "import os; os.fstat(1).st_size", "print('lost', flush=True); os.ftruncate(1, 0)", "print('z')",
        max_output=400, **any_boundary,
    )  # fmt: skip
    for letter, text in zip("abcdefgh", texts, strict=True):
        assert text.startswith(letter * 200 + "\n[299601 bytes were cut]\n" + letter * 199)
    assert int(size) < 2 << 20
    assert "lost" not in emptied and last == "z"
