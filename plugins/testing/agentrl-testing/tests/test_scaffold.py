import ast
import dataclasses
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from agentrl_core.api import KINDS, PluginConflictError, PluginError
from agentrl_core.cli.main import app
from agentrl_testing.devtools.scaffold import render, scaffold
from agentrl_testing.plugins import IsolatedPlugins

AUTHORED = {"tool": "tool.py", "reward_function": "reward.py", "agent_loop": "loop.py"}
MOST_LINES = 50


def lines_of_code(source: str) -> int:
    """Lines that hold code: no blank ones, no comments, no docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def test_tool_reward_and_loop_take_at_most_fifty_lines() -> None:
    files = [render(kind, "mine")[f"src/mine/{name}"] for kind, own in AUTHORED.items() for name in (own, "config.py")]
    counts = [lines_of_code(text) for text in files]
    assert all(counts), "a file that the author writes is empty"
    assert sum(counts) <= MOST_LINES, counts


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_a_clean_package(kind: str, tmp_path: Path) -> None:
    folder = scaffold(kind, "my-word_count2", tmp_path)
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["project"]["entry-points"] == {KINDS[kind].group: {"my-word_count2": "my_word_count2.plugin:PLUGIN"}}
    assert (folder / "src/my_word_count2/__init__.py").read_text() == ""
    assert (folder / "tests/test_my_word_count2.py").exists()
    leftovers = [file for file in folder.rglob("*") if file.is_file() and "$" in file.read_text()]
    assert leftovers == []
    imported = {
        name.partition(".")[0]
        for file in (folder / "src").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    needed = imported - sys.stdlib_module_names - {"agentrl_core", "my_word_count2"}
    declared = {re.split("[<>=\\[]", each)[0] for each in project["project"]["dependencies"]}
    assert needed <= declared, "a package that the code imports is not in its dependencies"
    (fragment,) = yaml_of((folder / "README.md").read_text())
    assert "my-word_count2" in str(fragment)
    linted = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length=120", "--select=E,F,I,B,UP,T20", "."],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert linted.returncode == 0, linted.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_yaml_of_the_readme_sets_the_options_to_what_they_may_be(kind: str, tmp_path: Path) -> None:
    files = render(kind, "mine")
    module: dict[str, Any] = {}
    exec(files["src/mine/config.py"], module)
    (config,) = [each for each in module.values() if dataclasses.is_dataclass(each)]
    (fragment,) = yaml_of(files["README.md"])
    slot = fragment
    while "name" not in slot:
        (slot,) = slot.values() if isinstance(slot, dict) else slot
    assert slot["name"] == "mine"
    for name, value in slot["config"].items():
        assert type(getattr(config(), name)) is type(value), f"{name}: {value!r}"


def yaml_of(text: str) -> list[Any]:
    return [yaml.safe_load(block.partition("```")[0]) for block in text.split("```yaml\n")[1:]]


@pytest.mark.parametrize(
    ("kind", "name", "cls"),
    [
        ("tool", "word-count", "WordCountTool"),
        ("tool", "tool", "MyTool"),
        ("engine", "my-engine", "MyEngine"),
        ("dataset", "prompt", "MyPromptDataset"),
        ("policy_loss", "policy-loss", "MyPolicyLoss"),
    ],
)
def test_name_of_the_class_is_not_one_of_the_seam(kind: str, name: str, cls: str) -> None:
    files = render(kind, name)
    assert any(f"class {cls}" in text for text in files.values())


def test_kind_may_be_written_with_a_dash(tmp_path: Path) -> None:
    assert scaffold("tool-parser", "mine", tmp_path) == tmp_path / "mine"
    assert (tmp_path / "mine/src/mine/parser.py").exists()


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("tols", "mine", "unknown kind 'tols': did you mean 'tool'? Allowed are agent_loop, engine, tool, "),
        ("hooks", "mine", "unknown kind 'hooks': did you mean 'hook'? "),
        ("colour", "mine", "unknown kind 'colour': Allowed are "),
        ("tool", "Mine", "the name 'Mine' cannot be used: it must begin with a lower-case letter and hold only "),
        ("tool", "mine-", "the name 'mine-' cannot be used: it must begin"),
        ("tool", "../mine", "the name '../mine' cannot be used: it must begin"),
        ("tool", "", "the name '' cannot be used: it must begin"),
        ("tool", "json", "the name 'json' cannot be used: 'json' is a word or module of Python or of agentrl"),
        ("tool", "class", "the name 'class' cannot be used: 'class' is a word or module of Python or of agentrl"),
        ("tool", "agentrl-core", "the name 'agentrl-core' cannot be used: 'agentrl_core' is a word or module"),
    ],
)
def test_what_cannot_be_made_is_refused(kind: str, name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(PluginError) as caught:
        scaffold(kind, name, tmp_path)
    assert str(caught.value).startswith(message)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(PluginError) as caught:
        scaffold("tool", "mine", tmp_path)
    expected = f"{tmp_path}/mine exists already. Choose another name, or another folder with --output"
    assert str(caught.value) == expected
    assert list((tmp_path / "mine").iterdir()) == []


def test_name_of_an_installed_plugin_is_refused(tmp_path: Path, isolated_plugins: IsolatedPlugins) -> None:
    isolated_plugins.add("acme-tools", {"agentrl.tools": {"shout": "acme_tools:PLUGIN"}})
    with pytest.raises(PluginConflictError, match="tool 'shout' exists already, in package acme-tools 0.1.0: choose"):
        scaffold("tool", "shout", tmp_path)
    scaffold("engine", "shout", tmp_path)


def test_own_package_may_be_written_anew(tmp_path: Path, isolated_plugins: IsolatedPlugins) -> None:
    isolated_plugins.add("my-shout", {"agentrl.tools": {"my-shout": "my_shout:PLUGIN"}})
    assert scaffold("tool", "my-shout", tmp_path).exists()


def test_command_says_what_comes_next(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["plugins", "new", "tool", "word-count", "--output", str(tmp_path / "new")])
    folder = tmp_path / "new/word-count"
    assert result.exit_code == 0
    assert result.stdout == (
        f"{folder}: README.md says what to fill in\nnext: pip install -e '{folder}[test]' && pytest {folder}\n"
    )
    assert (folder / "pyproject.toml").exists()


def test_command_refuses_with_exit_code_two(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["plugins", "new", "tools", "word-count", "--output", str(tmp_path)])
    assert result.exit_code == 2
    assert "did you mean 'tool'?" in result.stderr
    assert "Traceback" not in result.stderr
