import functools
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

import agentrl_core
from agentrl_core.api import CheckpointError, ConfigError, PluginNotFoundError
from agentrl_core.cli.main import COMPLETE, app
from agentrl_testing.plugins import IsolatedPlugins

COMMAND = """
import typer
app = typer.Typer()

@app.command()
def greet(name: str, loud: bool = False) -> None:
    '''Greets.

    Loudly, if asked to.
    '''
    typer.echo(f"hello {name}{'!' if loud else ''}")
"""


def agentrl(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


class Calls(dict[str, Any]):
    """Stands for the function of a subcommand; remembers its arguments, or raises ``error``."""

    error: Exception | None = None

    def replace(self, monkeypatch: pytest.MonkeyPatch, module: str, function: str = "run") -> None:
        real = import_module(f"agentrl_core.cli.{module}")

        @functools.wraps(getattr(real, function))
        def stand_in(**arguments: Any) -> None:
            self.update(arguments)
            if self.error is not None:
                raise self.error

        if isinstance(getattr(real, "app", None), typer.Typer):
            monkeypatch.setattr(real.app.registered_commands[0], "callback", stand_in)
        monkeypatch.setattr(real, function, stand_in)


@pytest.fixture
def calls() -> Calls:
    return Calls()


def test_train(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    calls.replace(monkeypatch, "train")
    assert agentrl("train", "c.yaml").exit_code == 0
    assert calls == {"config": Path("c.yaml"), "overrides": [], "dry_run": False, "resume": False, "verbose": False}
    assert agentrl("train", "c.yaml", "trainer.steps=20", "--dry-run", "a.b=[1, 2]", "--resume").exit_code == 0
    assert calls == {
        "config": Path("c.yaml"),
        "overrides": ["trainer.steps=20", "a.b=[1, 2]"],
        "dry_run": True,
        "resume": True,
        "verbose": False,
    }


def test_drift_is_allowed_by_a_flag(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    calls.replace(monkeypatch, "train")
    assert agentrl("train", "c.yaml", "rollout.n=4", "--resume", "--allow-plugin-drift").exit_code == 0
    assert calls["overrides"] == ["rollout.n=4", "plugins.allow_drift=true"]


def test_eval(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    calls.replace(monkeypatch, "evaluate")
    assert agentrl("eval", "c.yaml", "model.path=x", "--checkpoint", "k").exit_code == 0
    expected = {"config": Path("c.yaml"), "overrides": ["model.path=x"], "checkpoint": Path("k")}
    assert calls == {**expected, "output": None, "as_json": False}


def test_export(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    calls.replace(monkeypatch, "export")
    assert agentrl("export", "k", "out").exit_code == 0
    assert calls == {"checkpoint": Path("k"), "output": Path("out"), "merge": False, "base": None, "policy": None}
    agentrl("export", "k", "out", "--merge", "--base", "m", "--policy", "p")
    assert calls["merge"] and (calls["base"], calls["policy"]) == (Path("m"), "p")


def test_doctor(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    calls.replace(monkeypatch, "doctor")
    assert agentrl("doctor").exit_code == 0
    assert calls == {"model": None, "config": None, "as_json": False}
    agentrl("doctor", "--model", "m")
    assert calls == {"model": Path("m"), "config": None, "as_json": False}


def test_rollouts_show(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    calls.replace(monkeypatch, "rollouts", "show")
    assert agentrl("rollouts", "show", "runs/x").exit_code == 0
    expected = {"run_dir": Path("runs/x"), "as_json": False}
    assert calls == {**expected, "step": None, "count": 1, "validation": False, "color": None}
    agentrl("rollouts", "show", "runs/x", "--step", "10", "-n", "3", "--validation", "--no-color")
    assert calls == {**expected, "step": 10, "count": 3, "validation": True, "color": False}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError(["a is wrong", "b is wrong"], "c.yaml"), 2),
        (PluginNotFoundError("no tool"), 2),
        (CheckpointError("it is [bold]corrupt[/bold]"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_error_is_a_message_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, calls: Calls, error: Exception, code: int
) -> None:
    calls.replace(monkeypatch, "train")
    calls.error = error
    result = agentrl("train", "c.yaml")
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", f"error: {error}\n")


@pytest.mark.parametrize(
    "arguments",
    [[option, "train", "c.yaml"] for option in ("--debug", "--verbose")]
    + [["train", "c.yaml", option] for option in ("--debug", "--verbose")],
)
def test_debug_and_verbose_show_the_traceback(
    monkeypatch: pytest.MonkeyPatch, calls: Calls, arguments: list[str]
) -> None:
    calls.replace(monkeypatch, "train")
    calls.error = CheckpointError("corrupt")
    result = agentrl(*arguments)
    assert calls["verbose"] is True
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert "stand_in" in result.stderr
    assert result.stderr.endswith("error: corrupt\n")


def test_debug_behind_two_dashes_is_an_argument(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    calls.replace(monkeypatch, "train")
    assert agentrl("train", "c.yaml", "--", "--debug").exit_code == 0
    assert (calls["overrides"], calls["verbose"]) == (["--debug"], False)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_and_options(shell: str) -> None:
    script = agentrl("completion", shell)
    assert script.exit_code == 0 and COMPLETE in script.stdout
    asked = {COMPLETE: f"complete_{shell}", "COMP_WORDS": "agentrl config sh", "COMP_CWORD": "2"}
    asked |= {"_TYPER_COMPLETE_ARGS": "agentrl config sh", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    command = [sys.executable, "-m", "agentrl_core.cli.main"]
    done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True)
    assert "show" in done.stdout, done


def test_completion_of_another_shell_names_those_that_there_are() -> None:
    result = agentrl("completion", "tcsh")
    assert result.exit_code == 2 and "fish" in result.output


def test_bug_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    calls.replace(monkeypatch, "train")
    calls.error = ZeroDivisionError()
    assert agentrl("train", "c.yaml").exception is calls.error


def test_missing_extra_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    calls.replace(monkeypatch, "train")
    calls.error = ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")
    result = agentrl("train", "c.yaml")
    assert (result.exit_code, result.stderr) == (
        1,
        "error: this needs torch, which is not installed: pip install 'agentrl-core[train]'\n",
    )


def test_version() -> None:
    assert agentrl("--version").stdout == f"agentrl {agentrl_core.__version__}\n"


def test_unknown_command_suggests() -> None:
    result = agentrl("tran")
    assert result.exit_code == 2
    assert "train" in result.stderr


def test_subcommand_of_a_package(isolated_plugins: IsolatedPlugins) -> None:
    isolated_plugins.add("acme", {"agentrl.cli": {"greet": "acme_cli:app"}}, modules={"acme_cli.py": COMMAND})
    assert "greet" in agentrl("--help").stdout
    assert "Greets (from acme 0.1.0)." in agentrl("--help").stdout
    assert "acme_cli" not in sys.modules, "it is loaded only when it is typed"
    assert agentrl("greet", "you", "--loud").stdout == "hello you!\n"
    assert agentrl("greet").exit_code == 2


def test_broken_subcommand_of_a_package_disturbs_no_other(isolated_plugins: IsolatedPlugins) -> None:
    isolated_plugins.add("acme", {"agentrl.cli": {"greet": "acme_cli:app"}}, modules={"acme_cli.py": "1 / 0"})
    assert agentrl("--help").exit_code == 0
    result = agentrl("greet")
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "error: package acme 0.1.0 is broken: importing acme_cli:app for the subcommand 'greet' raised "
        "ZeroDivisionError: division by zero"
    )


def test_subcommand_that_is_no_typer_app(isolated_plugins: IsolatedPlugins) -> None:
    isolated_plugins.add("acme", {"agentrl.cli": {"greet": "acme_cli:app"}}, modules={"acme_cli.py": "app = 1"})
    assert "must be a typer.Typer" in agentrl("greet").stderr


def test_two_packages_with_one_subcommand(isolated_plugins: IsolatedPlugins, monkeypatch: pytest.MonkeyPatch) -> None:
    for dist in ("acme-one", "acme-two"):
        module = dist.replace("-", "_")
        isolated_plugins.add(dist, {"agentrl.cli": {"greet": f"{module}:app"}}, modules={f"{module}.py": COMMAND})
    assert "is registered by acme-one 0.1.0 and acme-two 0.1.0" in agentrl("greet", "you").stderr
    monkeypatch.setenv("AGENTRL_PLUGINS_BLOCK", "acme-one")
    assert agentrl("greet", "you").stdout == "hello you\n"


def test_subcommand_of_a_package_does_not_replace_ours(isolated_plugins: IsolatedPlugins) -> None:
    isolated_plugins.add("acme", {"agentrl.cli": {"plugins": "acme_cli:app"}}, modules={"acme_cli.py": COMMAND})
    assert "KIND" in agentrl("plugins", "list").stdout
    assert "acme_cli" not in sys.modules


HEAVY = ("torch", "ray", "transformers", "tensordict", "datasets", "vllm", "sglang")
BLOCKER = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
"""


def run_blocked(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", BLOCKER + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_agentrl_core_without_torch_or_ray() -> None:
    output = run_blocked("""
import agentrl_core, agentrl_core.api, agentrl_core.plugins, agentrl_core.config, agentrl_core.cli.main
from agentrl_core.plugins.discovery import discover
rows = [row for row in discover() if row.dist.startswith("agentrl-")]
print(len(rows) > 0, [row.error for row in rows if row.status in ("broken", "incompatible", "duplicate")])
""")
    assert output == "True []\n"


@pytest.mark.parametrize("arguments", ["--help", "plugins list", "plugins show grpo", "train --help", "eval --help"])
def test_command_works_without_torch_or_ray(arguments: str) -> None:
    output = run_blocked(f"""
sys.argv = ["agentrl", *{arguments.split()!r}]
from agentrl_core.cli.main import main
try:
    main()
finally:
    assert not set({HEAVY}) & set(sys.modules), "imported"
""")
    assert output


@pytest.mark.parametrize(
    ("command", "package"),
    [
        ("view", "agentrl-viewer"),
        ("plan", "agentrl-plan"),
        ("bench", "agentrl-plan"),
        ("tinker", "agentrl-tinker"),
        ("runs list", "agentrl-viewer"),
        ("init", "agentrl-testing"),
        ("replay", "agentrl-testing"),
        ("try", "agentrl-testing"),
        ("config schema", "agentrl-testing"),
        ("reward replay", "agentrl-testing"),
        ("plugins new", "agentrl-testing"),
        ("plugins check", "agentrl-testing"),
    ],
)
def test_a_command_whose_package_is_not_installed_names_it(
    monkeypatch: pytest.MonkeyPatch, command: str, package: str
) -> None:
    monkeypatch.setattr("agentrl_core.cli.groups.plugin_commands", dict)
    result = CliRunner().invoke(app, [*command.split(), "x"])
    assert result.exit_code == 2 and f"pip install {package}" in result.output


def test_a_group_has_its_own_commands_and_those_of_packages() -> None:
    result = CliRunner().invoke(app, ["plugins", "--help"])
    assert re.findall(r"^\W*(list|show|check|new)\b.*", result.output, re.MULTILINE) == ["list", "show", "check", "new"]
    assert "passes its own tests (from agentrl-testing" in " ".join(result.output.replace("│", "").split())


def test_what_imports_the_helpers_of_earlier_versions_is_told_where_they_are() -> None:
    with pytest.raises(ImportError, match="pip install agentrl-testing, and import agentrl_testing"):
        import_module("agentrl_core.testing.contracts")
