"""A run whose policy calls the tools that come with agentrl: Python code, a shell, an MCP server and a search index."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.runs.records import read_rollouts
from agentrl_core.runs.run_dir import RunDir
from agentrl_testing.tiny_model import save_tiny_model
from agentrl_tool_search.index import build_index

NOTES = '''
import os
from mcp.server.mcpserver import MCPServer

server = MCPServer("notes")


@server.tool()
def where(word: str) -> str:
    """Says a word."""
    return f"{word} from a server"


server.run("stdio")
'''
CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("python", {"code": "print(37 * 45)"}, "1665"),
    ("write_file", {"path": "a/b.txt", "content": "hello\n"}, "wrote 6 bytes to a/b.txt"),
    ("shell", {"command": "cat a/b.txt; cat given.txt"}, "hello\nfrom the row"),
    ("where", {"word": "hello"}, "hello from a server"),
    ("search", {"query": "cats"}, "[1] All about cats"),
]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_the_policy_calls_every_tool(fit: Callable[..., RunDir], tiny_run: Any, runtime: str) -> None:
    folder: Path = tiny_run.folder
    (folder / "notes_server.py").write_text(NOTES)
    (folder / "corpus.jsonl").write_text('{"text": "All about cats"}\n{"text": "All about dogs"}\n')
    build_index([folder / "corpus.jsonl"], folder / "index")
    calls = [json.dumps({"name": name, "arguments": arguments}) for name, arguments, _ in CALLS]
    rows = tiny_run.rows(2)
    files = {"given.txt": "from the row\n"}
    for row in rows:
        row["extra_info"]["tools_kwargs"] = {"shell": {"create_kwargs": {"files": files}}}
    # Its tokens are bytes, and there are many schemas.
    save_tiny_model(folder / "model", max_position_embeddings=16_000)
    changes = {
        "model.path": str(folder / "model"),
        "cluster.runtime": runtime,
        "data.max_prompt_length": 12000,
        "rollout.max_response_length": 3000,
        "rollout.engine": {
            "name": "scripted",
            "config": {"turns": [*(f"<tool_call>\n{call}\n</tool_call>" for call in calls), "done"]},
        },
        "rollout.tool_parser": {"name": "hermes"},
        "rollout.agent.loops": [{"name": "tool_agent", "config": {"max_assistant_turns": 8}}],
        "tools": [
            {"name": "python"},
            {"name": "shell"},
            {
                "name": "mcp",
                "config": {"servers": {"notes": {"command": [sys.executable, str(folder / "notes_server.py")]}}},
            },
            {"name": "search", "config": {"index": "index"}},
        ],
        "trainer.steps": 1,
    }
    run = fit(changes, rows)
    trajectories = list(read_rollouts(run.rollout_file(1, "train")))
    assert len(trajectories) == 4
    for trajectory in trajectories:
        assert trajectory.termination == "completed", trajectory.error
        assert [call["response"] for call in trajectory.tool_calls] == [text for _, _, text in CALLS]
        names = [schema["function"]["name"] for schema in trajectory.tool_schemas]
        assert names[:3] == ["python", "shell", "read_file"] and names[-2:] == ["where", "search"]
    (metrics,) = run.read_metrics()
    assert metrics["rollout/tool_failures"] == 0
