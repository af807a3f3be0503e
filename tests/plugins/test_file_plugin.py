import dataclasses
import hashlib
import inspect
import pickle
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from agentrl_core.api import (
    FunctionTool,
    NoConfig,
    PluginBrokenError,
    PluginDriftError,
    PluginNotFoundError,
    ToolContext,
)
from agentrl_core.plugins.resolution import resolve, resolve_ref

REWARD = '''
from dataclasses import dataclass

@dataclass
class Details:
    score: float

def score(trajectory):
    """One for everything."""
    return 1.0

def details(trajectory):
    return Details(0.5)
'''


def write(folder: Path, text: str, name: str = "reward.py") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def error_of(error: type[Exception], folder: Path, name: str, kind: str = "reward_function") -> str:
    with pytest.raises(error) as caught:
        resolve(kind, name, base_dir=folder)
    return str(caught.value)


def test_function_of_a_file_relative_to_the_config(tmp_path: Path) -> None:
    path = write(tmp_path, REWARD)
    plugin = resolve("reward_function", "./reward.py:score", base_dir=tmp_path)
    assert (plugin.ref.dist, plugin.ref.name, plugin.ref.source) == ("file", "reward.py:score", REWARD)
    assert plugin.ref.version == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (plugin.spec.summary, plugin.spec.config, plugin.spec.api_version) == ("One for everything.", NoConfig, 1)
    assert plugin.load()(None) == 1.0
    assert plugin.build(NoConfig(), None) is plugin.load()


def test_default_base_is_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, REWARD)
    monkeypatch.chdir(tmp_path)
    assert resolve("reward_function", "reward.py:score").load()(None) == 1.0


def test_class_with_options_and_capabilities(tmp_path: Path) -> None:
    text = """
from dataclasses import dataclass

@dataclass
class Options:
    top: float = 1.0

class Manager:
    config_class = Options
    capabilities = {"group"}

    def __init__(self, config, context):
        self.top = config.top
"""
    write(tmp_path, text)
    plugin = resolve("reward_manager", "./reward.py:Manager", base_dir=tmp_path)
    assert plugin.spec.capabilities == {"group"}
    assert plugin.build(plugin.spec.config(top=2.0), None).top == 2.0


def test_function_of_a_file_is_a_tool(tmp_path: Path) -> None:
    write(tmp_path, 'def shout(text: str) -> str:\n    """Shouts."""\n    return text.upper()\n')
    tool = resolve("tool", "./reward.py:shout", base_dir=tmp_path).build(NoConfig(), ToolContext("shout"))
    assert isinstance(tool, FunctionTool)
    assert tool.schema["function"]["description"] == "Shouts."


def test_function_with_a_config_class_is_a_factory(tmp_path: Path) -> None:
    text = """
from agentrl_core.api import NoConfig
def make(config, context):
    return lambda trajectory: 0.25
make.config_class = NoConfig
"""
    write(tmp_path, text)
    assert resolve("reward_function", "./reward.py:make", base_dir=tmp_path).build(NoConfig(), None)(None) == 0.25


def test_worker_without_the_file_runs_the_same_code_and_can_unpickle(tmp_path: Path) -> None:
    path = write(tmp_path, REWARD)
    plugin = resolve("reward_function", "./reward.py:details", base_dir=tmp_path)
    path.unlink()
    handed_over = tmp_path / "handed_over"
    handed_over.write_bytes(pickle.dumps((plugin.ref, pickle.dumps(plugin.load()(None)))))
    worker = """
import pickle, sys
from agentrl_core.plugins.resolution import resolve_ref
ref, pickled = pickle.load(open(sys.argv[1], "rb"))
function = resolve_ref(ref).load()
print(function(None) == pickle.loads(pickled), function.__globals__["__file__"])
"""
    done = subprocess.run([sys.executable, "-c", worker, handed_over], capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("True <reward.py>\n", "")


def test_module_runs_once_per_process_and_edits_are_a_new_module(tmp_path: Path) -> None:
    path = write(tmp_path, "seen = []\ndef score(t):\n    seen.append(t)\n    return len(seen)\n")
    first = resolve("reward_function", "./reward.py:score", base_dir=tmp_path)
    assert resolve_ref(first.ref).load() is first.load()
    path.write_text("def score(t):\n    return -1\n", encoding="utf-8")
    assert resolve("reward_function", "./reward.py:score", base_dir=tmp_path).load()(None) == -1
    assert resolve_ref(first.ref).load()(None) == 1


def test_traceback_and_inspect_show_the_lines_where_the_file_is_absent(tmp_path: Path) -> None:
    path = write(tmp_path, "def score(t):\n    raise ValueError('boom')  # here\n")
    plugin = resolve("reward_function", "./reward.py:score", base_dir=tmp_path)
    path.unlink()
    with pytest.raises(ValueError) as caught:
        plugin.load()(None)
    assert "# here" in "".join(traceback.format_exception(caught.value))
    assert "# here" in inspect.getsource(plugin.load())


def test_traceback_shows_the_lines_that_ran_where_the_path_has_another_file(tmp_path: Path) -> None:
    path = write(tmp_path, "def score(t):\n    raise ValueError('boom')  # here\n")
    ref = resolve("reward_function", "./reward.py:score", base_dir=tmp_path).ref
    path.write_text("# another one\n" * 9)
    worker = """
import linecache, pickle, sys
from agentrl_core.plugins.resolution import resolve_ref
score = resolve_ref(pickle.load(sys.stdin.buffer)).load()
print(score.__globals__["__file__"])
linecache.clearcache()
score(None)
"""
    done = subprocess.run([sys.executable, "-c", worker], input=pickle.dumps(ref), capture_output=True, cwd=tmp_path)
    assert done.stdout.decode() == f"{path}\n"
    assert b"another one" not in done.stderr and b'File "<reward.py>", line 2' in done.stderr


def test_changed_source_is_drift(tmp_path: Path) -> None:
    write(tmp_path, REWARD)
    ref = resolve("reward_function", "./reward.py:score", base_dir=tmp_path).ref
    with pytest.raises(PluginDriftError, match="does not have the hash"):
        resolve_ref(dataclasses.replace(ref, source=ref.source + "\n"))


def test_missing_file(tmp_path: Path) -> None:
    write(tmp_path, REWARD)
    assert error_of(PluginNotFoundError, tmp_path, "./rewards.py:score") == (
        f"reward function './rewards.py:score': there is no file {tmp_path / 'rewards.py'}, did you mean 'reward.py'?"
    )


def test_missing_object(tmp_path: Path) -> None:
    write(tmp_path, REWARD)
    assert error_of(PluginBrokenError, tmp_path, "./reward.py:scor") == (
        "reward function 'reward.py:scor': the file has no 'scor', did you mean 'score'? (it defines Details, score, "
        "details)"
    )


def test_file_without_an_object(tmp_path: Path) -> None:
    write(tmp_path, REWARD)
    assert error_of(PluginNotFoundError, tmp_path, "./reward.py") == (
        "reward function './reward.py' names a file but no object in it: write './reward.py:Details' or "
        "'./reward.py:score' or './reward.py:details'"
    )


def test_file_that_raises_says_where(tmp_path: Path) -> None:
    path = write(tmp_path, "x = 1\nx / 0\n")
    message = error_of(PluginBrokenError, tmp_path, "./reward.py:score")
    assert message == (
        f"reward function 'reward.py:score': running {path} raised ZeroDivisionError: division by zero ({path}:2)"
    )
    assert error_of(PluginBrokenError, tmp_path, "./reward.py:score") == message, "nothing half-made stays behind"


def test_syntax_error(tmp_path: Path) -> None:
    path = write(tmp_path, "def score(t)\n")
    assert f"({path}:1)" in error_of(PluginBrokenError, tmp_path, "./reward.py:score")


@pytest.mark.parametrize(
    ("helper", "advice"),
    [
        (
            "agentrl_no_such_helper.py",
            "A plugin in a file may import installed packages only, no files next to it. Make it a package",
        ),
        ("another.py", "It is not installed in this environment: pip install the package that provides it"),
    ],
)
def test_import_of_what_is_not_installed(tmp_path: Path, helper: str, advice: str) -> None:
    write(tmp_path, "import agentrl_no_such_helper.part\n")
    (tmp_path / helper).touch()
    message = error_of(PluginBrokenError, tmp_path, "./reward.py:score")
    assert "No module named 'agentrl_no_such_helper'" in message and message.endswith(advice)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("score = 3\n", "is an object of type int, must be a function or a class"),
        ("def score(t): ...\nscore.capabilities = {'gruop'}\n", "unknown capability 'gruop'"),
        ("def score(t): ...\nscore.config_class = dict\n", "must be a dataclass"),
    ],
)
def test_unsuitable_object(tmp_path: Path, text: str, problem: str) -> None:
    write(tmp_path, text)
    assert problem in error_of(PluginBrokenError, tmp_path, "./reward.py:score")
