import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import HookSpecs, PluginBrokenError, hookimpl
from agentrl_core.api.hooks import PROJECT
from agentrl_core.plugins.hooks import HookCaller
from agentrl_core.plugins.resolution import resolve
from agentrl_testing.plugins import IsolatedPlugins


class Recorder:
    def __init__(self, name: str, calls: list[Any]) -> None:
        self.name, self.calls = name, calls

    @hookimpl
    def on_step_end(self, step: int, metrics: dict[str, float]) -> None:
        self.calls.append((self.name, step, metrics))


class Appender:
    def __init__(self, text: str | None) -> None:
        self.text = text

    @hookimpl
    def on_batch_ready(self, batch: str) -> str | None:
        return None if self.text is None else batch + self.text


def build(*hooks: object) -> HookCaller:
    return HookCaller([(f"hook{index}", hook) for index, hook in enumerate(hooks)])


def test_hooks_are_called_in_the_order_of_the_config() -> None:
    calls: list[Any] = []
    build(Recorder("a", calls), Recorder("b", calls)).on_step_end(step=3, metrics={"x": 1.0})
    assert calls == [("a", 3, {"x": 1.0}), ("b", 3, {"x": 1.0})]


def test_same_hook_twice() -> None:
    calls: list[Any] = []
    HookCaller([("bell", Recorder("a", calls)), ("bell", Recorder("b", calls))]).on_step_end(step=1, metrics={})
    assert [name for name, *_ in calls] == ["a", "b"]


def test_batch_is_threaded_in_the_order_of_the_config_and_none_keeps_it() -> None:
    assert build(Appender("1"), Appender(None), Appender("2")).on_batch_ready(step=1, batch="batch") == "batch12"
    assert build().on_batch_ready(step=1, batch="batch") == "batch"


def test_every_hook_has_a_method_and_passes_its_arguments() -> None:
    seen: dict[str, dict[str, Any]] = {}

    class All:
        @hookimpl
        def on_run_start(self, config: Any, run_dir: Path) -> None:
            seen["on_run_start"] = {"config": config, "run_dir": run_dir}

        @hookimpl
        def on_rollout_start(self, step: int) -> None:
            seen["on_rollout_start"] = {"step": step}

        @hookimpl
        def on_trajectory_end(self, step: int, trajectory: Any) -> None:
            seen["on_trajectory_end"] = {"step": step, "trajectory": trajectory}

        @hookimpl
        def on_rollout_end(self, step: int, batch: Any) -> None:
            seen["on_rollout_end"] = {"step": step, "batch": batch}

        @hookimpl
        def on_batch_ready(self, step: int, batch: Any) -> None:
            seen["on_batch_ready"] = {"step": step, "batch": batch}

        @hookimpl
        def on_step_end(self, step: int, metrics: Any) -> None:
            seen["on_step_end"] = {"step": step, "metrics": metrics}

        @hookimpl
        def on_validation_end(self, step: int, metrics: Any) -> None:
            seen["on_validation_end"] = {"step": step, "metrics": metrics}

        @hookimpl
        def on_checkpoint_saved(self, step: int, path: Path) -> None:
            seen["on_checkpoint_saved"] = {"step": step, "path": path}

        @hookimpl
        def on_run_end(self, status: str) -> None:
            seen["on_run_end"] = {"status": status}

    arguments: dict[str, Any] = {
        "config": {},
        "run_dir": Path("r"),
        "step": 2,
        "batch": "b",
        "metrics": {},
        "trajectory": "t",
    }
    arguments |= {"path": Path("p"), "status": "completed"}
    caller = build(All())
    expected = {}
    for name in (name for name in vars(HookSpecs) if hasattr(getattr(HookSpecs, name), f"{PROJECT}_spec")):
        names = getattr(HookSpecs, name).__code__.co_varnames[1:]
        expected[name] = {key: arguments[key] for key in names}
        getattr(caller, name)(**expected[name])
    assert seen == expected
    assert list(expected) == [
        "on_run_start", "on_rollout_start", "on_trajectory_end", "on_rollout_end", "on_batch_ready", "on_step_end",
        "on_validation_end", "on_checkpoint_saved", "on_run_end",
    ]  # fmt: skip


def test_exception_names_plugin_and_hook() -> None:
    class Faulty:
        @hookimpl
        def on_run_end(self, status: str) -> None:
            raise LookupError("no bell")

    caller = HookCaller([("fine", Appender("")), ("bell", Faulty())])
    with pytest.raises(PluginBrokenError) as caught:
        caller.on_run_end(status="failed")
    assert str(caught.value).startswith("hook 'bell' raised in on_run_end: LookupError: no bell (")
    assert isinstance(caught.value.__cause__, LookupError)


def test_a_hook_that_no_configuration_lists_is_not_imported(isolated_plugins: IsolatedPlugins) -> None:
    for name in ("listed", "unlisted"):
        text = (
            "from agentrl_core.api import PluginSpec\n"
            f"PLUGIN = PluginSpec('hook', '{name}', 1, 's', 'acme_{name}.hook:Hook')\n"
        )
        hook = (
            "from agentrl_core.api import hookimpl\nclass Hook:\n    def __init__(self, config, context): ...\n"
            "    @hookimpl\n    def on_run_end(self, status): ...\n"
        )
        isolated_plugins.add(
            f"acme-{name}",
            {"agentrl.hooks": {name: f"acme_{name}.plugin:PLUGIN"}},
            modules={f"acme_{name}/plugin.py": text, f"acme_{name}/hook.py": hook},
        )
    plugin = resolve("hook", "listed")
    HookCaller([("listed", plugin.build(plugin.spec.config(), None))]).on_run_end(status="completed")
    assert "acme_listed.hook" in sys.modules
    assert not [name for name in sys.modules if name.startswith("acme_unlisted")]


def test_unknown_hook_name_fails_with_a_suggestion() -> None:
    class Misspelt:
        @hookimpl
        def on_step_ended(self, step: int) -> None: ...

    message = "hook 'hook0' implements 'on_step_ended', which is no hook: did you mean 'on_step_end'?"
    with pytest.raises(PluginBrokenError) as caught:
        build(Misspelt())
    assert str(caught.value) == message


def test_forgotten_mark() -> None:
    class Forgotten:
        def on_step_end(self, step: int) -> None: ...

    with pytest.raises(PluginBrokenError, match="mark on_step_end with @hookimpl, or it is never called"):
        build(Forgotten())


def test_no_hook_at_all() -> None:
    with pytest.raises(PluginBrokenError, match="implements no hook; allowed are on_run_start, "):
        build(object())


def test_wrong_argument_name() -> None:
    class Wrong:
        @hookimpl
        def on_step_end(self, stpe: int) -> None: ...

    with pytest.raises(PluginBrokenError, match=r"(?s)hook 'hook0': .*stpe"):
        build(Wrong())


def test_place_in_the_order_is_the_configs() -> None:
    class Pushy:
        @hookimpl(tryfirst=True)
        def on_step_end(self, step: int) -> None: ...

    with pytest.raises(PluginBrokenError, match="hooks run in the order of the config"):
        build(Pushy())
