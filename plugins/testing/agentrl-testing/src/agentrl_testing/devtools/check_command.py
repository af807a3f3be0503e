"""``agentrl plugins check``."""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from agentrl_core.api.errors import WorkerError
from agentrl_core.api.plugin import KINDS, PluginRef
from agentrl_core.plugins.discovery import conflict_text
from agentrl_core.plugins.registration import (
    BLOCK_VARIABLE,
    Registration,
    block_list,
    is_blocked,
    registrations,
    registrations_named,
    same_package,
)
from agentrl_core.plugins.spec import unknown_group
from agentrl_testing.devtools.check import CheckResult, check_here, check_in_children, failed

if TYPE_CHECKING:
    from agentrl_core.controller.runtime import ActorHandle, Runtime

_STYLES = {"ok": "green", "external": "cyan", "failed": "bold red"}
# A Ray worker needs this long to start, because it imports what all workers import.
_WORKER_SECONDS = 120.0


class CheckActor:
    """Checks plugins in a Ray worker, which resolves references as the workers of a run do."""

    def ready(self) -> None:
        """Answer once the process has started."""

    def check(self, ref: PluginRef) -> CheckResult:
        return check_here(ref)


def run(
    names: Sequence[str], *, kinds: list[str] | None, on_ray: bool, time_limit: float, as_json: bool = False
) -> int:
    """Check plugins and print the results.

    Args:
        names: names, ``package:name`` or packages; empty: all installed plugins.
        kinds: check only plugins of these kinds.
        time_limit: seconds for each plugin, in its process and again in the Ray worker.
        as_json: print one JSON object; what else there is to say goes to standard error.

    Returns:
        The exit code: 1 on any failure.
    """
    console = Console(highlight=False, markup=False, soft_wrap=True, stderr=as_json)
    chosen = _chosen(names, kinds)
    blocked = block_list()
    usable = [each for each in chosen if not is_blocked(each, blocked)]
    results = {each: result for each in usable if (result := _registered_wrongly(each, usable))}
    to_check = [each for each in usable if each not in results]
    results |= zip(to_check, check_in_children([_ref(each) for each in to_check], time_limit), strict=True)
    if on_ray:
        good = {each: result for each, result in results.items() if result.status == "ok"}
        results |= _checked_on_ray(good, time_limit, console)
    failures = sum(result.status == "failed" for result in results.values())
    if as_json:
        sys.stdout.write(json.dumps({"schema_version": 1, "plugins": [*map(_plain, chosen, map(results.get, chosen))]}))
        return 1 if failures else 0
    for each in chosen:
        if each in results:
            _print(console, results[each])
        else:
            console.print(f"blocked   {each.title} of package {each.package}: by {BLOCK_VARIABLE}")
    console.print(f"{len(results)} checked, {failures} failed")
    return 1 if failures else 0


def _chosen(names: Sequence[str], kinds: list[str] | None) -> list[Registration]:
    """The plugins of each name: those of the package of that name, else those that have the name; by default all."""
    of_kinds = [each for each in registrations() if kinds is None or each.kind in kinds]
    if not names:
        return of_kinds
    by_name = ([each for each in of_kinds if same_package(each.dist, name)] or registrations_named(name, kinds)
               for name in names)  # fmt: skip
    return list(dict.fromkeys(each for found in by_name for each in found))


def _ref(registration: Registration) -> PluginRef:
    return PluginRef(registration.kind, registration.name, registration.dist, registration.version)


def _registered_wrongly(one: Registration, usable: Sequence[Registration]) -> CheckResult | None:
    if one.kind not in KINDS:
        return failed(_ref(one), f"package {one.package}: {unknown_group(one.kind)}")
    same = [each for each in usable if (each.kind, each.name) == (one.kind, one.name)]
    return failed(_ref(one), conflict_text(same)) if len(same) > 1 else None


def _checked_on_ray(
    results: dict[Registration, CheckResult], time_limit: float, console: Console
) -> dict[Registration, CheckResult]:
    try:
        from agentrl_core.controller.ray_runtime import RayRuntime
    except ModuleNotFoundError as error:
        console.print(f"not checked in a Ray worker: {error.name} is not installed, pip install 'agentrl-core[ray]'")
        return {}
    if not results:
        return {}
    with RayRuntime() as runtime:
        return asyncio.run(_check_with(runtime, results, time_limit))


async def _check_with(
    runtime: "Runtime", results: dict[Registration, CheckResult], time_limit: float
) -> dict[Registration, CheckResult]:
    checked: dict[Registration, CheckResult] = {}
    worker: ActorHandle | None = None
    for each, before in results.items():
        if worker is None:
            worker = runtime.actor(CheckActor, name="plugin-check")
            await asyncio.wait_for(worker.call("ready"), _WORKER_SECONDS)
        lost = ""
        try:
            found = await asyncio.wait_for(worker.call("check", _ref(each)), time_limit)
        except TimeoutError:
            lost = f"did not end within {time_limit:g} s"
        except WorkerError as error:
            lost = f"failed: {error}"
        if lost:
            found = failed(before.ref, f"package {each.package} is broken: checking {each.title} {lost}")
            worker.kill()
            worker = None
        problems = tuple(f"in a Ray worker: {problem}" for problem in found.problems)
        checked[each] = before if found.status == "ok" else replace(found, problems=problems)
    return checked


def _plain(registration: Registration, result: CheckResult | None) -> dict[str, Any]:
    found = CheckResult(_ref(registration), "failed", notes=(f"by {BLOCK_VARIABLE}",)) if result is None else result
    return {
        "kind": registration.kind,
        "name": registration.name,
        "package": registration.package,
        "status": "blocked" if result is None else found.status,
        "problems": found.problems,
        "notes": found.notes,
        "traceback": found.traceback,
    }


def _print(console: Console, result: CheckResult) -> None:
    console.print(Text.assemble((f"{result.status:<9}", _STYLES[result.status]), f" {result.title}"))
    for line in (*result.problems, *result.notes):
        console.print(Text(f"          {line}"))
    if result.traceback:
        console.print(Text(result.traceback.rstrip()))
