"""Runs single checks of a suite on plugins that are broken on purpose."""

import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from agentrl_core.api import KINDS, NoConfig, PluginSpec
from agentrl_testing.contracts import PluginContract
from agentrl_testing.contracts.case import PluginContract as Base

MODULE = "plugins_broken_on_purpose"


def make_spec(kind: str, factory: Any, *capabilities: str, **fields: Any) -> PluginSpec:
    """A spec of this factory, which need not be importable from anywhere."""
    module = sys.modules.setdefault(MODULE, types.ModuleType(MODULE))
    setattr(module, factory.__name__, factory)
    values = {
        "kind": kind,
        "name": "broken",
        "api_version": KINDS[kind].api_version,
        "summary": "broken on purpose",
        "factory": f"{MODULE}:{factory.__name__}",
        "config": NoConfig,
        "capabilities": frozenset(capabilities),
    }
    return PluginSpec(**(values | fields))


def checks_of(contract: type[PluginContract]) -> set[str]:
    """The checks that the suite adds to those that all suites have."""
    return {name for name in dir(contract) if name.startswith("test_")} - set(dir(Base))


def run_check(contract: type[PluginContract], check: str, case: Any, **arguments: Any) -> None:
    """Run one check, for all of its parameters."""
    function = getattr(contract, check)
    marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
    if not marks:
        getattr(contract(), check)(case, **arguments)
        return
    (mark,) = marks
    name, values = mark.args
    for value in values:
        plain = value.values[0] if hasattr(value, "values") and not isinstance(value, dict) else value
        getattr(contract(), check)(case, **{name: plain}, **arguments)


@pytest.fixture(scope="session")
def spec() -> Callable[..., PluginSpec]:
    return make_spec


@pytest.fixture
def catches(tmp_path: Any) -> Callable[..., None]:
    """``catches(Contract, {check: [case, ...]})``: each case fails its check, and every check has a case."""

    def run(contract: type[PluginContract], broken: Mapping[str, list[Any]]) -> None:
        untested = checks_of(contract) - broken.keys()
        assert not untested, f"no broken plugin for {sorted(untested)}"
        for check, cases in broken.items():
            for number, case in enumerate(cases):
                wants_path = "tmp_path" in inspect.signature(inspect.unwrap(getattr(contract, check))).parameters
                folder = tmp_path / f"{check}-{number}"
                folder.mkdir()
                arguments = {"tmp_path": folder} if wants_path else {}
                try:
                    run_check(contract, check, case, **arguments)
                except (Exception, pytest.fail.Exception):  # noqa: BLE001 - a broken plugin may raise anything
                    continue
                raise AssertionError(f"{check} did not catch {case.spec.factory} (case {number})")

    return run


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """More of them only slow down models so small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
