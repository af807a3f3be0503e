"""``agentrl plugins check``."""

import importlib.util
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl_core.api.errors import PluginNotFoundError
from agentrl_core.cli._output import console_of_stdout
from agentrl_core.plugins.check import Finding, examine_in_subprocess, run_child
from agentrl_core.plugins.discovery import conflict_text
from agentrl_core.plugins.registration import Registration, block_list, is_blocked, registrations, same_package

AT_ONCE = 2
"""Interpreters that check at the same time; each may load torch."""
RAY_START_SECONDS = 60.0
_STYLES = {"ok": "green", "spec only": "cyan", "failed": "bold red"}


def run(names: Sequence[str], kind: str | None, timeout: float, with_ray: bool) -> None:
    """Check the plugins of these names, or all; ends with code 1 where one fails."""
    chosen = _choose(names, kind)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        here = list(pool.map(lambda each: _check(each, chosen, timeout, not names), chosen))
    console = console_of_stdout()
    in_ray: dict[int, Finding] = {}
    if with_ray and importlib.util.find_spec("ray") is None:
        console.print("Ray is not installed: nothing was checked in a Ray worker")
    elif with_ray:
        usable = [index for index, finding in enumerate(here) if finding.verdict == "ok"]
        command = [sys.executable, "-m", "agentrl_core.controller.ray_check", f"{timeout:g}"]
        limit = RAY_START_SECONDS + timeout * len(usable)
        found = run_child(command, [chosen[index] for index in usable], limit) if usable else []
        in_ray = dict(zip(usable, found, strict=True))
    _print(console, chosen, here, in_ray)
    if any(finding.verdict == "failed" for finding in (*here, *in_ray.values())):
        raise typer.Exit(1)


def _choose(names: Sequence[str], kind: str | None) -> list[Registration]:
    blocked = block_list()
    usable = [each for each in registrations() if not is_blocked(each, blocked) and kind in (None, each.kind)]
    for name in names:
        if not any(_is_named(each, name) for each in usable):
            raise PluginNotFoundError(
                f"no installed plugin or package is named {name!r} (blocked ones do not count); see: agentrl plugins "
                "list"
            )
    return [each for each in usable if not names or any(_is_named(each, name) for name in names)]


def _is_named(registration: Registration, name: str) -> bool:
    """By its own name, its package's, or both as ``package:name``."""
    package, _, plain = name.rpartition(":")
    if package:
        return plain == registration.name and same_package(package, registration.dist)
    return name == registration.name or same_package(name, registration.dist)


def _check(registration: Registration, chosen: Sequence[Registration], timeout: float, all_of_them: bool) -> Finding:
    same = [each for each in chosen if (each.kind, each.name) == (registration.kind, registration.name)]
    if len(same) > 1 and all_of_them:
        return Finding("failed", f"package {registration.package}, {conflict_text(same)}")
    return examine_in_subprocess(registration, timeout)


def _print(
    console: Console, chosen: Sequence[Registration], here: Sequence[Finding], in_ray: dict[int, Finding]
) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("KIND", "NAME", "PACKAGE", "VERSION", "HERE", "RAY"):
        table.add_column(column, overflow="fold")
    table.add_column("NOTES", overflow="fold")
    for index, (each, finding) in enumerate(zip(chosen, here, strict=True)):
        there = in_ray.get(index)
        verdicts = [Text(part.verdict, style=_STYLES[part.verdict]) if part else Text("-") for part in (finding, there)]
        cells = map(Text, (each.kind, each.name, each.dist, each.version))
        table.add_row(*cells, *verdicts, Text("\n".join(finding.notes)))
    console.print(table)
    failures = [finding for finding in (*here, *in_ray.values()) if finding.verdict == "failed"]
    for finding in failures:
        console.print()
        console.print(Text.assemble(("failed: ", "bold red"), finding.problem), soft_wrap=True)
        if finding.details:
            console.print(Text(finding.details), soft_wrap=True)
    console.print(f"\n{len(chosen)} checked, {len(failures)} failed")
