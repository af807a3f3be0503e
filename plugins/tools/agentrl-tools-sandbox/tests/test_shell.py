"""The shell and the file operations in a trajectory's working directory."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from agentrl_core.api import ToolContext, ToolError
from agentrl_tools_sandbox.config import ShellConfig
from agentrl_tools_sandbox.shell_tool import ShellTool


@pytest.fixture
def talk(any_boundary, folder) -> Callable[..., list[str]]:
    """Makes calls in one trajectory; returns what the model sees, errors included."""

    def run(*calls: tuple[str, dict[str, Any]], files: dict[str, str] | None = None, **options: Any) -> list[str]:
        async def one(tool: ShellTool, function: str, arguments: dict[str, Any]) -> str:
            try:
                return (await tool.execute("a", arguments, function=function)).response.text
            except ToolError as error:
                return f"Error: {error}"

        async def main() -> list[str]:
            tool = ShellTool(ShellConfig(**{**any_boundary, **options}), ToolContext("shell"))
            await tool.create("a", **({"files": files} if files else {}))
            try:
                return [await one(tool, *call) for call in calls]
            finally:
                await tool.release("a")

        texts = asyncio.run(main())
        assert not list(folder.iterdir())
        return texts

    return run


def test_files_are_written_changed_listed_and_read(talk) -> None:
    texts = talk(
        ("write_file", {"path": "src/a.py", "content": "x = 1\nprint(x)\n"}),
        ("replace_in_file", {"path": "src/a.py", "old": "x = 1", "new": "x = 2"}),
        ("shell", {"command": "python3 src/a.py; ls; exit 3"}),
        ("list_files", {}),
        ("list_files", {"path": "src"}),
        ("read_file", {"path": "src/a.py", "first_line": 2}),
        ("read_file", {"path": "src/a.py", "lines": 1}),
    )
    assert texts == [
        "wrote 15 bytes to src/a.py",
        "replaced 1 occurrence in src/a.py",
        "2\nsrc\n[exit code 3]",
        "src/",
        "a.py",
        "print(x)",
        "x = 2",
    ]


def test_a_row_brings_files(talk) -> None:
    assert talk(("shell", {"command": "cat a/b.txt"}), files={"a/b.txt": "hello"}) == ["hello"]


def test_a_command_that_takes_too_long_is_stopped_and_files_stay(talk) -> None:
    texts = talk(
        ("shell", {"command": "echo begun; touch kept; sleep 1000 & sleep 1000"}),
        ("shell", {"command": "ls"}),
        timeout=2.0,
    )
    assert texts == ["begun\n[stopped after 2 s]", "kept"]


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("read_file", {"path": "none"}, "Error: FileNotFoundError"),
        ("read_file", {"path": "."}, "Error: IsADirectoryError"),
        ("read_file", {"path": "a", "lines": "x"}, "Error: read_file: lines is 'x'; it must be an integer"),
        ("list_files", {"path": "none"}, "Error: FileNotFoundError"),
        ("write_file", {"path": "a/b", "content": 5}, "Error: write_file: content is 5; it must be a string"),
        (
            "replace_in_file",
            {"path": "a", "old": "l", "new": ""},
            "ValueError: the old text occurs 2 times in a",
        ),
        ("replace_in_file", {"path": "a", "old": "z", "new": ""}, "the old text occurs 0 times in a; it must occur"),
        ("replace_in_file", {"path": "a", "old": "", "new": "x"}, "the old text occurs 0 times"),
        ("shell", {}, "Error: shell: command is None; it must be a string"),
        ("compile", {}, "Error: there is no function 'compile'"),
    ],
)
def test_bad_calls_are_errors_for_the_model(talk, function, arguments, message) -> None:
    assert message in talk((function, arguments), files={"a": "hello"})[0]


def test_long_files_and_lists_are_cut(talk) -> None:
    texts = talk(
        ("read_file", {"path": "long"}),
        ("shell", {"command": "touch $(seq 1000)"}),
        ("list_files", {}),
        files={"long": "x" * 100_000},
        max_output=1000,
    )
    assert texts[0].endswith(" more bytes]") and len(texts[0]) < 6000
    assert texts[2].endswith(" more]") and len(texts[2]) < 1100


def test_a_file_operation_never_waits_and_never_loses_a_file(talk) -> None:
    texts = talk(
        ("write_file", {"path": "a", "content": "1\n"}),
        ("read_file", {"path": "a", "first_line": 1 << 31}),
        ("read_file", {"path": "a", "first_line": 10**5000}),
        ("read_file", {"path": "a", "lines": -1}),
        ("write_file", {"path": "a", "content": "\ud800"}),
        ("replace_in_file", {"path": "a", "old": "1", "new": "\ud800"}),
        ("shell", {"command": "mkfifo pipe"}),
        ("read_file", {"path": "pipe"}),
        ("write_file", {"path": "pipe", "content": "1"}),
        ("replace_in_file", {"path": "/dev/zero", "old": "1", "new": "2"}),
        ("read_file", {"path": "a"}),
    )
    assert texts[0] == "wrote 2 bytes to a" and texts[1] == "[no output]" and texts[6] == "[no output]"
    assert all(text.startswith("Error: ") for text in (*texts[2:6], *texts[7:10])), texts
    assert texts[-1] == "1"


def test_replacing_keeps_the_ends_of_lines(talk) -> None:
    texts = talk(
        ("shell", {"command": "printf 'a\\r\\nb\\r\\n' > a"}),
        ("replace_in_file", {"path": "a", "old": "a\r\nb", "new": "a\r\nc"}),
        ("shell", {"command": "od -An -c a | tr -d ' '"}),
    )
    assert texts[-1] == r"a\r\nc\r\n"
