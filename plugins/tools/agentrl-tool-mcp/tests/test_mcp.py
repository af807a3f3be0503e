"""MCP servers over stdio and HTTP: real ones, in processes of their own."""

import asyncio
import json
import os
import signal
import sys
from dataclasses import replace
from typing import Any

import pytest
from mcp.client.stdio import StdioServerParameters

from agentrl_core.api import ConfigError, ToolContext
from agentrl_core.engine_kit.images import read_image
from agentrl_tool_mcp import tool as tool_module
from agentrl_tool_mcp.config import McpConfig, ServerConfig
from agentrl_tool_mcp.stdio import Lines, bounded_stdio
from agentrl_tool_mcp.tool import McpTool

ADD = ("add", {"text": "milk"})


def test_tools_are_offered_with_their_schemas(notes) -> None:
    schemas = {each["function"]["name"]: each["function"] for each in McpTool(config(notes), CONTEXT).schemas}
    assert list(schemas) == ["add", "variable", "fail", "die", "process", "long", "picture", "notes_change"]
    assert schemas["add"]["description"] == "Adds a note."
    assert schemas["add"]["parameters"]["required"] == ["text"]
    assert schemas["add"]["parameters"]["properties"]["times"]["type"] == "integer"


CONTEXT = ToolContext("mcp")


def config(notes: ServerConfig, **options) -> McpConfig:
    return McpConfig({"notes": notes}, **options)


def test_an_image_stands_where_the_server_put_it(notes) -> None:
    async def content(shows_images: bool) -> str | list[dict[str, Any]]:
        tool = McpTool(config(notes), ToolContext("mcp", shows_images=shows_images))
        try:
            result = await tool.execute("a", {}, function="picture")
            assert result.response.text.startswith("the note:\nmilk\n")
            return result.response.content
        finally:
            await tool.release("a")
            await tool.close()

    before, image, after = asyncio.run(content(True))
    assert before == {"type": "text", "text": "the note:\nmilk"}
    assert read_image(image["image"]).name.endswith("-4x3.png")
    assert after == {"type": "text", "text": "[audio is not shown]\nthat is all"}
    text = "the note:\nmilk\n[image is not shown]\n[audio is not shown]\nthat is all"
    assert asyncio.run(content(False)) == text, "a model that takes text alone reads the texts"


def test_each_trajectory_has_its_own_session(talk, notes) -> None:
    texts = talk({"notes": notes}, ("a", *ADD), ("a", *ADD), ("b", *ADD))
    assert texts == ["1 notes", "2 notes", "1 notes"]


def test_a_shared_session_serves_all_trajectories(talk, notes) -> None:
    assert talk({"notes": notes}, ("a", *ADD), ("b", *ADD), session="shared") == ["1 notes", "2 notes"]


def test_a_server_over_http(talk, url) -> None:
    texts = talk({"notes": ServerConfig(url=url)}, ("a", *ADD), ("b", *ADD), ("b", "fail", {}))
    assert texts[:2] == ["1 notes", "2 notes"]
    assert texts[2].startswith("ToolError") and "no such note" in texts[2]


def test_a_failed_call_and_wrong_arguments_are_errors_for_the_model(talk, notes) -> None:
    texts = talk({"notes": notes}, ("a", "fail", {}), ("a", "add", {"text": "x", "times": "often"}), ("a", *ADD))
    assert texts[0].startswith("ToolError") and "no such note" in texts[0]
    assert texts[1].startswith("ToolError") and "times" in texts[1]
    assert texts[2] == "1 notes"


def test_the_server_gets_only_the_variables_that_are_named(talk, notes, monkeypatch) -> None:
    monkeypatch.setenv("MY_SECRET", "s3cret")
    call = ("a", "variable", {"name": "MY_SECRET"})
    assert talk({"notes": notes}, call) == ["none"]
    assert talk({"notes": replace(notes, env=["MY_SECRET"])}, call) == ["s3cret"]


def test_a_server_that_dies_costs_its_trajectory_only(talk, notes) -> None:
    texts = talk({"notes": notes}, ("a", *ADD), ("a", "die", {}), ("a", *ADD), ("b", *ADD))
    assert texts == [
        "1 notes",
        "ToolUnavailableError: MCP server 'notes' died in a call of 'die': Connection closed",
        "ToolUnavailableError: MCP server 'notes' is gone",
        "1 notes",
    ]


def test_a_shared_server_that_dies_is_started_again(talk, notes) -> None:
    texts = talk({"notes": notes}, ("a", *ADD), ("a", "die", {}), ("b", *ADD), session="shared")
    assert texts[1].startswith("ToolUnavailableError") and texts[::2] == ["1 notes", "1 notes"]


@pytest.mark.parametrize("url", ["events", "json"], indirect=True)
def test_an_answer_over_http_has_a_limit(talk, url) -> None:
    """As events, and as one JSON body. The session goes on."""
    calls = [("a", "long", {"size": 100_000}), ("a", "long", {"size": 3}), ("a", *ADD)]
    texts = talk({"notes": ServerConfig(url=url)}, *calls, max_body_bytes=20_000)
    assert texts[0].startswith("ToolError") and "20000" in texts[0].replace(",", "")
    assert texts[1:] == ["xxx", "1 notes"]


def test_an_answer_over_stdio_has_a_limit(talk, notes) -> None:
    """The session goes on."""
    calls = [("a", "long", {"size": 100_000}), ("a", "long", {"size": 3}), ("a", *ADD)]
    texts = talk({"notes": notes}, *calls, max_body_bytes=20_000)
    assert texts[0].startswith("ToolError: the message is longer than max_body_bytes=20000. Raise this option")
    assert texts[1:] == ["xxx", "1 notes"]


@pytest.mark.parametrize("descriptor", [1, 2])
def test_what_a_server_writes_without_end_is_not_kept(tmp_path, monkeypatch, descriptor: int) -> None:
    """A message ends the connection, and with it the server; of what it says to people the end is kept."""
    monkeypatch.setattr("agentrl_tool_mcp.stdio.SKIPPED", 1 << 20)
    code = f"import os\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
    code += f"for n in range(64): os.write({descriptor}, b'x' * 65536)\nos.close(1)\nos.read(0, 1)"
    server = StdioServerParameters(command=sys.executable, args=["-c", code])
    said = bytearray()

    async def main() -> list[str]:
        async with bounded_stdio(server, said, 20_000) as (arriving, _):
            return [str(each)[:23] async for each in arriving]

    assert asyncio.run(main()) == (["the message is longer t"] if descriptor == 1 else [])
    assert len(said) == (0 if descriptor == 1 else 2000)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize("cut", [1, 7, 50, 10_000])
def test_lines_are_those_that_were_written_however_they_arrive(cut: int) -> None:
    def answer(number: int, size: int) -> str:
        return json.dumps({"jsonrpc": "2.0", "id": number, "result": {"text": "x" * size}})

    data = "\n".join([answer(1, 10), answer(2, 500), "no JSON", answer(3, 0), ""]).encode()
    lines = Lines(200)
    found = [each for at in range(0, len(data), cut) for each in lines.messages(data[at : at + cut])]
    told = [each if isinstance(each, Exception) else each.message for each in found]
    assert [getattr(each, "id", None) for each in told] == [1, 2, None, 3]
    assert "longer than max_body_bytes=200" in told[1].error.message and isinstance(told[2], ValueError)
    assert told[0].result == {"text": "x" * 10} and not lines.is_endless


def test_sessions_that_were_opened_ahead_serve_one_trajectory_each(notes, running) -> None:
    async def main() -> None:
        tool = McpTool(config(notes, ready=2), CONTEXT)
        await tool.create("a")
        ahead = set(await running())
        used = []
        for instance in ("a", "b", "c"):
            used.append((await tool.execute(instance, {}, function="process")).response.text)
            assert (await tool.execute(instance, *ADD[1:], function="add")).response.text == "1 notes"
            await tool.release(instance)
        assert len(ahead) == 2 and set(used[:2]) == ahead and len(set(used)) == 3
        await tool.close()
        assert await running() == []

    asyncio.run(main())


def test_a_session_that_died_while_it_waited_is_not_used(notes, running) -> None:
    async def main() -> None:
        tool = McpTool(config(notes, ready=1), CONTEXT)
        await tool.create("a")
        os.kill(int((await running())[0]), signal.SIGKILL)
        assert (await tool.execute("a", *ADD[1:], function="add")).response.text == "1 notes"
        await tool.release("a")
        await tool.close()

    asyncio.run(main())


def test_an_http_server_that_dies_is_unavailable(talk, url) -> None:
    texts = talk({"notes": ServerConfig(url=url)}, ("a", *ADD), ("a", "die", {}), ("b", *ADD))
    assert [text.partition(":")[0] for text in texts] == ["1 notes", "ToolUnavailableError", "ToolUnavailableError"]


def test_a_server_that_changes_its_tools_says_so(talk, notes) -> None:
    texts = talk({"notes": notes}, ("a", *ADD), ("a", "notes_change", {}), ("a", *ADD), ("b", *ADD))
    assert texts[1:] == [
        "changed",
        "ToolUnavailableError: MCP server 'notes' changed its tools: 'add' is gone since the start of the run. "
        "Start the run again to train with the new ones",
        "1 notes",
    ]


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (ServerConfig(command=["/nowhere/server"]), r"'notes' \(/nowhere/server\) cannot be used: FileNotFoundError"),
        (ServerConfig(command=[sys.executable, "-c", "raise SystemExit('no licence')"]), "it wrote: no licence"),
        (ServerConfig(url="http://127.0.0.1:9/mcp"), r"\(http://127.0.0.1:9/mcp\) cannot be used: ConnectError"),
        (ServerConfig(), "servers.notes: give either command .* or url"),
        (ServerConfig(command=["x"], url="http://x"), "servers.notes: give either command .* or url"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_before_the_run(server, message) -> None:
    with pytest.raises(ConfigError, match=message):
        McpTool(config(server), CONTEXT)


def test_a_server_that_says_nothing_is_refused_in_time() -> None:
    silent = ServerConfig(command=[sys.executable, "-c", "import time; time.sleep(1000)"])
    with pytest.raises(ConfigError, match="did not answer within 0.5 s"):
        McpTool(config(silent, start_timeout=0.5), CONTEXT)


def test_wrong_choices_of_tools_are_refused(notes) -> None:
    with pytest.raises(ConfigError, match="servers is empty"):
        McpTool(McpConfig({}), CONTEXT)
    with pytest.raises(ConfigError, match=r"servers.notes.tools: the server has no subtract; it has add, "):
        McpTool(config(replace(notes, tools=["subtract"])), CONTEXT)
    with pytest.raises(ConfigError, match="'other' and tool 'add' of 'notes' would both be called 'add'. Set `prefix"):
        McpTool(McpConfig({"notes": notes, "other": notes}), CONTEXT)
    both = McpConfig({"notes": replace(notes, tools=["add"]), "other": replace(notes, tools=["add"])}, prefix=True)
    assert [each["function"]["name"] for each in McpTool(both, CONTEXT).schemas] == ["notes_add", "other_add"]


def test_a_server_is_asked_for_its_tools_once(notes, monkeypatch) -> None:
    monkeypatch.setattr(tool_module, "_listed", {})
    McpTool(config(notes), CONTEXT)
    monkeypatch.setattr(tool_module, "_in_thread", None)
    assert McpTool(config(notes), CONTEXT).schemas
