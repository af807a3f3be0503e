"""What is wrong with a plugin, and what `agentrl plugins list` and `agentrl plugins check` say of it, word for word."""

import sys
from collections.abc import Sequence

import pytest

from agentrl_core.api import PluginRef
from agentrl_core.plugins.discovery import PluginRow, discover
from agentrl_core.plugins.resolution import resolve
from agentrl_testing.devtools.check import CheckResult, check_here, check_in_children
from agentrl_testing.plugins import IsolatedPlugins

SPEC = """
from agentrl_core.api import NoConfig, PluginSpec

PLUGIN = PluginSpec(kind="{kind}", name="shout", api_version={api_version}, summary="{summary}",
                    factory="acme_tools.shout:Shout", requires={requires}, capabilities=frozenset({capabilities}))
"""
TOOL = """
from agentrl_core.api import Tool, ToolResponse, ToolResult, function_schema

class Shout(Tool):
    schema = function_schema("shout", "Shouts.", {"text": {"type": "string"}})

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResult(ToolResponse(parameters["text"].upper()))
"""
REF = PluginRef("tool", "shout", "acme-tools", "0.1.0")
BROKEN = "package acme-tools 0.1.0 is broken: "
IMPORTING = f"{BROKEN}importing acme_tools.plugin:PLUGIN for tool 'shout' "


@pytest.fixture(autouse=True)
def path_of_children(isolated_plugins: IsolatedPlugins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(isolated_plugins.path))


def install(
    plugins: IsolatedPlugins,
    *,
    before: str = "",
    factory: str = TOOL,
    kind: str = "tool",
    api_version: int = 1,
    summary: str = "shouts",
    requires: Sequence[str] = (),
    capabilities: Sequence[str] = (),
    dist: str = "acme-tools",
) -> None:
    """One plugin; its spec's module starts with ``before``."""
    package = dist.replace("-", "_")
    spec = SPEC.format(
        kind=kind, api_version=api_version, summary=summary, requires=tuple(requires), capabilities=set(capabilities)
    )
    plugins.add(
        dist,
        {f"agentrl.{kind}s": {"shout": f"{package}.plugin:PLUGIN"}},
        modules={f"{package}/plugin.py": before + spec, f"{package}/shout.py": factory},
    )


def listed(time_limit: float = 10.0) -> PluginRow:
    (row,) = discover(time_limit=time_limit)
    return row


def checked(time_limit: float = 60.0, kind: str = "tool") -> CheckResult:
    (result,) = check_in_children([PluginRef(kind, "shout", "acme-tools", "0.1.0")], time_limit)
    return result


def test_good_plugin(isolated_plugins: IsolatedPlugins) -> None:
    install(isolated_plugins)
    assert listed().status == "ok"
    assert checked() == CheckResult(REF, "ok")


def test_raises_at_import(isolated_plugins: IsolatedPlugins) -> None:
    install(isolated_plugins, before="raise RuntimeError('no licence')\n")
    place = isolated_plugins.path / "acme_tools" / "plugin.py"
    message = f"{IMPORTING}raised RuntimeError: no licence ({place}:1)"
    assert (listed().status, listed().error) == ("broken", message)
    result = checked()
    assert (result.status, result.problems) == ("failed", (message,))
    assert result.traceback.startswith("Traceback (most recent call last):\n")
    assert result.traceback.endswith("RuntimeError: no licence\n")


def test_module_of_the_factory_raises(isolated_plugins: IsolatedPlugins) -> None:
    install(isolated_plugins, factory="import agentrl_no_such_module\n")
    assert listed().status == "ok"
    place = isolated_plugins.path / "acme_tools" / "shout.py"
    result = checked()
    assert result.problems == (
        f"{BROKEN}importing the factory acme_tools.shout:Shout of tool 'shout' raised "
        f"ModuleNotFoundError: No module named 'agentrl_no_such_module' ({place}:1)",
    )
    assert "import agentrl_no_such_module" in result.traceback


def test_factory_raises(isolated_plugins: IsolatedPlugins) -> None:
    install(isolated_plugins, factory="def Shout(config, context):\n    raise OSError('no microphone')\n")
    assert listed().status == "ok"
    place = isolated_plugins.path / "acme_tools" / "shout.py"
    result = checked()
    assert result.problems == (
        f"package acme-tools 0.1.0: building tool 'shout' raised OSError: no microphone ({place}:2)",
    )
    assert result.traceback.endswith("OSError: no microphone\n")


@pytest.mark.parametrize("module", ["torch", "ray", "transformers", "vllm", "sglang"])
def test_spec_imports_something_heavy(isolated_plugins: IsolatedPlugins, module: str) -> None:
    install(isolated_plugins, before=f"import {module}\n")
    # Stands for the real one, which takes seconds or is not installed.
    (isolated_plugins.path / f"{module}.py").write_text("")
    assert checked().problems == (
        f"{BROKEN}importing the spec imports {module}; listing plugins imports specs, so import it where the factory "
        "is, in acme_tools.shout",
    )


def test_unknown_capability(isolated_plugins: IsolatedPlugins) -> None:
    install(isolated_plugins, kind="engine", capabilities=["log_probs"])
    message = (
        f"{BROKEN}acme_tools.plugin:PLUGIN for inference engine 'shout': unknown capability 'log_probs': did you mean "
        "'logprobs'? allowed are logprobs, seeds, abort, pause, sleep, weight_update, live_update, old_cache, "
        "routed_experts, "
        "images, adapters, broadcast, ipc, parallel, multi_node, shared_module, deterministic, sessions, "
        "min_p, chained_truncation, presence_penalty, frequency_penalty, repetition_penalty, logit_bias, json_schema, "
        "remote_weights"
    )
    assert (listed().status, listed().error) == ("broken", message)
    assert checked(kind="engine").problems == (message,)


def test_no_summary(isolated_plugins: IsolatedPlugins) -> None:
    install(isolated_plugins, summary="")
    message = (
        f"{BROKEN}acme_tools.plugin:PLUGIN for tool 'shout': summary is empty, must be one line for "
        "`agentrl plugins list`"
    )
    assert (listed().status, listed().error) == ("broken", message)
    assert checked().problems == (message,)


def test_wrong_api_version(isolated_plugins: IsolatedPlugins) -> None:
    install(isolated_plugins, api_version=2)
    message = (
        "tool 'shout' of package acme-tools 0.1.0 was written for api_version 2 of tool; this agentrl-core has 1. "
        "Upgrade agentrl-core: pip install --upgrade agentrl-core"
    )
    assert (listed().status, listed().error) == ("incompatible", message)
    assert checked().problems == (message,)


def test_missing_extra(isolated_plugins: IsolatedPlugins) -> None:
    install(isolated_plugins, requires=["agentrl-no-such>=2"])
    assert (listed().status, listed().error) == (
        "missing-extra",
        "needs agentrl-no-such>=2 (found nothing): pip install 'agentrl-no-such>=2'",
    )
    assert checked().problems == (
        "tool 'shout' of package acme-tools 0.1.0 needs agentrl-no-such>=2 (found nothing) in "
        f"{sys.executable}: pip install 'agentrl-no-such>=2'",
    )


def test_external_engine_is_checked_as_far_as_the_spec(isolated_plugins: IsolatedPlugins) -> None:
    install(isolated_plugins, kind="engine", requires=["agentrl-no-such"], factory="raise RuntimeError\n")
    assert (listed().status, listed().error) == (
        "external",
        "needs agentrl-no-such (found nothing): runs in an environment that has it, see rollout.engine.python",
    )
    result = checked(kind="engine")
    assert (result.status, result.problems) == ("external", ())
    assert result.notes == (
        "needs agentrl-no-such (found nothing): only the spec was checked, the factory runs elsewhere",
    )


def test_entry_point_to_a_module_that_does_not_exist(isolated_plugins: IsolatedPlugins) -> None:
    isolated_plugins.add("acme-tools", {"agentrl.tools": {"shout": "acme_gone.plugin:PLUGIN"}})
    message = (
        f"{BROKEN}importing acme_gone.plugin:PLUGIN for tool 'shout' raised "
        "ModuleNotFoundError: No module named 'acme_gone'"
    )
    assert (listed().status, listed().error) == ("broken", message)
    assert checked().problems == (message,)


@pytest.mark.parametrize(
    "statement", ["print('HELLO')", "import os; os.write(1, b'HELLO')", "import os; os.system('echo HELLO')"]
)
def test_prints_at_import(isolated_plugins: IsolatedPlugins, statement: str, capfd: pytest.CaptureFixture[str]) -> None:
    install(isolated_plugins, before=f"{statement}\n", factory=f"{statement}\n{TOOL}")
    assert listed().status == "ok"
    captured = capfd.readouterr()
    assert (captured.out, captured.err.strip()) == ("", "HELLO")
    assert checked().status == "ok"
    assert capfd.readouterr().out == ""


def test_hangs_at_import(isolated_plugins: IsolatedPlugins) -> None:
    install(isolated_plugins, before="import threading; threading.Event().wait()\n")
    row = listed(time_limit=0.2)
    assert (row.status, row.error) == ("broken", f"{IMPORTING}did not end within 0.2 s")
    result = checked(time_limit=2)
    assert result.problems == (f"{BROKEN}checking tool 'shout' did not end within 2 s",)
    assert "acme_tools/plugin.py" in result.traceback


def test_plugins_after_one_that_hangs_are_listed(isolated_plugins: IsolatedPlugins) -> None:
    install(isolated_plugins, before="import threading; threading.Event().wait()\n", dist="acme-a")
    install(isolated_plugins, dist="acme-b", kind="tracker")
    assert [row.status for row in discover(time_limit=2)] == ["broken", "ok"]


@pytest.mark.parametrize(
    ("statement", "how"),
    [("os._exit(3)", "exit code 3"), ("os.kill(os.getpid(), 9)", "SIGKILL")],
    ids=["exit", "killed"],
)
def test_ends_the_process_at_import(isolated_plugins: IsolatedPlugins, statement: str, how: str) -> None:
    install(isolated_plugins, before=f"import os\n{statement}\n")
    assert (listed().status, listed().error) == ("broken", f"{IMPORTING}ended the process with {how}")
    assert checked().problems == (f"{BROKEN}checking tool 'shout' ended the process with {how}",)


def test_leaves_a_thread_behind(isolated_plugins: IsolatedPlugins) -> None:
    thread = "import threading; threading.Thread(target=threading.Event().wait).start()\n"
    install(isolated_plugins, before=thread)
    assert listed().status == "ok"
    assert checked().status == "ok"


@pytest.mark.parametrize(
    ("factory", "problem"),
    [
        (
            "class Shout: pass\n",
            "factory acme_tools.shout:Shout cannot be called with (config, context): too many positional arguments",
        ),
        ("def Shout(config, context): return 3\n", "int is no Tool: derive it from agentrl_core.api.Tool"),
        (TOOL.replace("async def execute", "async def run"), "Shout does not implement execute"),
        (TOOL.replace("async def", "def"), "Shout.execute must be `async def`"),
        (
            "from agentrl_core.api import Tool\nclass Shout(Tool):\n    async def execute(self, *a, **k): ...\n",
            "Shout.schema is no OpenAI function schema: make it with function_schema()",
        ),
    ],
    ids=["arguments", "other object", "abstract", "not async", "no schema"],
)
def test_factory_that_breaks_the_contract(isolated_plugins: IsolatedPlugins, factory: str, problem: str) -> None:
    install(isolated_plugins, factory=factory)
    result = check_here(REF)
    assert result.status == "failed"
    assert result.problems == (f"{BROKEN}{problem}",)


def test_an_engine_that_declares_sleep_without_its_methods_is_named(isolated_plugins: IsolatedPlugins) -> None:
    factory = """
from agentrl_core.api import InferenceEngine

class Shout(InferenceEngine):
    def __init__(self, config, context): ...
    async def generate(self, prompt_ids, sampling_params, request_id, multi_modal=None): ...
    async def sleep(self, level=1): ...
"""
    install(isolated_plugins, kind="engine", factory=factory, capabilities=["sleep"])
    (problem,) = check_here(PluginRef("engine", "shout", "acme-tools", "0.1.0")).problems
    assert problem == BROKEN + "Shout does not implement wake_up of the capability 'sleep'"


def test_sync_method_that_must_not_be_async(isolated_plugins: IsolatedPlugins) -> None:
    factory = (
        "from agentrl_core.api import Tracker\nclass Shout(Tracker):\n    async def log(self, metrics, step): ...\n"
    )
    install(isolated_plugins, kind="tracker", factory=factory)
    result = check_here(PluginRef("tracker", "shout", "acme-tools", "0.1.0"))
    assert result.problems == (f"{BROKEN}Shout.log must not be `async def`",)


def test_option_without_help(isolated_plugins: IsolatedPlugins) -> None:
    options = "from dataclasses import dataclass\n@dataclass\nclass Options:\n    volume: int = 3\n"
    install(isolated_plugins)
    file = isolated_plugins.path / "acme_tools" / "plugin.py"
    file.write_text(options + file.read_text().replace('summary="', 'config=Options, summary="'))
    assert check_here(REF).problems == (
        f"{BROKEN}options of Options without a help text: volume; declare them with option(help=…)",
    )


def test_required_option_prevents_building_only(isolated_plugins: IsolatedPlugins) -> None:
    options = (
        "from dataclasses import dataclass\nfrom agentrl_core.api import option\n"
        "@dataclass\nclass Options:\n    key: str = option(help='of the door')\n"
    )
    install(isolated_plugins, factory="def Shout(config, context): raise ValueError(config.key)\n")
    file = isolated_plugins.path / "acme_tools" / "plugin.py"
    file.write_text(options + file.read_text().replace('summary="', 'config=Options, summary="'))
    assert check_here(REF) == CheckResult(REF, "ok", notes=("not built: no default for key",))


def test_hook_with_a_misspelt_method(isolated_plugins: IsolatedPlugins) -> None:
    factory = (
        "from agentrl_core.api import hookimpl\nclass Shout:\n    def __init__(self, config, context): ...\n"
        "    @hookimpl\n    def on_step_ends(self): ...\n"
    )
    install(isolated_plugins, kind="hook", factory=factory)
    (problem,) = check_here(PluginRef("hook", "shout", "acme-tools", "0.1.0")).problems
    assert problem.startswith(f"{BROKEN}hook 'shout' implements 'on_step_ends', which is no hook: did you mean")


def test_a_batch_policy_is_built(isolated_plugins: IsolatedPlugins) -> None:
    isolated_plugins.allow("agentrl-core")
    result = check_here(resolve("batch_policy", "deadline").ref)
    assert (result.status, result.problems, result.notes) == ("ok", (), ())
