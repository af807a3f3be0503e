"""``agentrl plugins``: list and show."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl_core.api.errors import PluginConflictError, PluginError
from agentrl_core.api.plugin import KINDS, PluginSpec
from agentrl_core.cli._shared import Json, command_group, console_of_stdout, new_table
from agentrl_core.plugins.child import stdout_to_stderr
from agentrl_core.plugins.discovery import PluginRow, discover, plugin_rows
from agentrl_core.plugins.registration import Registration, registrations, registrations_named
from agentrl_core.plugins.requirements import requirement_states
from agentrl_core.plugins.spec import load_spec

if TYPE_CHECKING:
    from rich.console import Console


SCHEMA_VERSION = 1
_STYLES = {"ok": "green", "external": "cyan", "missing-extra": "yellow", "blocked": "yellow"}
_LEAST_WIDTH_OF_ALL_COLUMNS = 130

app = command_group()

Kind = Annotated[str | None, typer.Option("--kind", help="Only this kind, such as tool or engine.")]


@app.command("list")
def list_plugins(
    kind: Kind = None,
    as_json: Json = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show requirements, capabilities, location.")] = False,
) -> None:
    """List the installed plugins, without importing their implementations."""
    rows = discover(kinds_named(kind))
    if as_json:
        _print_json({"schema_version": SCHEMA_VERSION, "plugins": [_row_as_json(row) for row in rows]})
    else:
        _print_table(rows, verbose)


@app.command("show")
def show_plugin(
    name: Annotated[str, typer.Argument(help="A name, or package:name.", show_default=False)],
    kind: Kind = None,
    as_json: Json = False,
) -> None:
    """Show one plugin: its options, requirements and capabilities, and YAML to start from."""
    registration = _find(name, kinds_named(kind))
    row = _row_of(registration)
    spec = _spec_of(registration) if row.factory else None
    if as_json:
        _print_json(_shown_as_json(row, spec))
    else:
        _print_plugin(row, spec)


def kinds_named(kind: str | None) -> list[str] | None:
    """The kind of ``--kind``, or None for all.

    Raises:
        BadParameter: there is no such kind.
    """
    if kind is not None and kind not in KINDS:
        raise typer.BadParameter(f"{kind!r}; allowed are {', '.join(KINDS)}", param_hint="--kind")
    return None if kind is None else [kind]


def _find(name: str, kinds: list[str] | None) -> Registration:
    found = registrations_named(name, kinds)
    if len({each.kind for each in found}) > 1:
        choices = " or ".join(f"--kind {each.kind}" for each in found)
        raise PluginConflictError(f"{name!r} names plugins of several kinds: add {choices}")
    if len(found) > 1:
        choices = " or ".join(f"{each.dist}:{each.name}" for each in found)
        raise PluginConflictError(f"{name!r} is registered by several packages: write {choices}")
    return found[0]


def _row_of(registration: Registration) -> PluginRow:
    # Registrations with the same name are included, because they make this one a duplicate.
    same = [each for each in registrations() if (each.kind, each.name) == (registration.kind, registration.name)]
    return next(row for row, each in zip(plugin_rows(same), same, strict=True) if each == registration)


def _spec_of(registration: Registration) -> PluginSpec | None:
    try:
        with stdout_to_stderr():
            return load_spec(registration)
    except PluginError:
        # The row has the reason.
        return None


def _row_as_json(row: PluginRow) -> dict[str, Any]:
    """The fields of the row, with the distribution's name as ``package``."""
    return {"package" if name == "dist" else name: value for name, value in asdict(row).items()}


def _shown_as_json(row: PluginRow, spec: PluginSpec | None) -> dict[str, Any]:
    from agentrl_core.config.describe import describe

    shown: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "plugin": _row_as_json(row)}
    if spec is not None:
        shown["requirements"] = [asdict(state) for state in requirement_states(spec.requires)]
        shown["options"] = [asdict(option) for option in describe(spec.config)]
        shown["yaml"] = _yaml_fragment(row, spec)
    return shown


def _print_json(content: dict[str, Any]) -> None:
    typer.echo(json.dumps(content, indent=2))


def _print_table(rows: list[PluginRow], verbose: bool) -> None:
    from rich.text import Text

    console = console_of_stdout()
    is_narrow = console.width < _LEAST_WIDTH_OF_ALL_COLUMNS
    table = new_table()
    for column in ("KIND", "NAME") if is_narrow else ("KIND", "NAME", "PACKAGE", "VERSION", "API", "STATUS"):
        table.add_column(column, no_wrap=True)
    table.add_column("SUMMARY", overflow="fold")
    for row in rows:
        api = "" if row.api_version is None else str(row.api_version)
        status = Text(row.status, style=_STYLES.get(row.status, "bold red"))
        summary = Text("\n".join(_summary(row, verbose)))
        kind, name, *cells = map(Text, (row.kind, row.name, row.dist, row.version, api))
        if is_narrow:
            table.add_row(kind, name, Text.assemble(summary, f"\n{row.dist} {row.version}, ", status))
        else:
            table.add_row(kind, name, *cells, status, summary)
    console.print(table)


def _summary(row: PluginRow, verbose: bool) -> list[str]:
    lines = [row.error or row.summary]
    if verbose:
        lines += [row.summary] if row.error and row.summary else []
        details = {
            "requires": ", ".join(row.requires),
            "capabilities": ", ".join(row.capabilities),
            "factory": row.factory,
            "location": row.location,
        }
        lines += [f"{name}: {value}" for name, value in details.items() if value]
    return lines


def _print_plugin(row: PluginRow, spec: PluginSpec | None) -> None:
    from rich.table import Table
    from rich.text import Text

    console = console_of_stdout()
    title = KINDS[row.kind].title if row.kind in KINDS else row.kind
    console.print(Text.assemble((f"{title} {row.name}", "bold"), f"  {row.summary}"))
    status = Text.assemble((row.status, _STYLES.get(row.status, "bold red")), f"  {row.error}" if row.error else "")
    pairs = {"package": Text(f"{row.dist} {row.version}"), "status": status}
    if spec is not None:
        meanings = KINDS[row.kind].capabilities
        states = requirement_states(spec.requires)
        capabilities = "\n".join(f"{name}: {meanings.get(name, '')}" for name in row.capabilities)
        requires = "\n".join(f"{each}: {'ok' if each.met else 'not met here'}" for each in states)
        pairs |= {"factory": Text(row.factory), "location": Text(row.location)}
        pairs |= {"capabilities": Text(capabilities or "none"), "requires": Text(requires or "nothing")}
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(width=12)
    table.add_column(overflow="fold")
    for pair in pairs.items():
        table.add_row(*pair)
    console.print(table)
    if spec is None:
        return
    _print_options(console, spec)
    console.print(Text("\nin a configuration", style="bold"))
    console.print(Text(_yaml_fragment(row, spec)), soft_wrap=True)


def _print_options(console: "Console", spec: PluginSpec) -> None:
    from rich.text import Text

    from agentrl_core.config.describe import describe

    options = describe(spec.config)
    if not options:
        console.print(Text("\nno options", style="bold"))
        return
    console.print(Text("\noptions", style="bold"))
    table = new_table("OPTION", "TYPE", "DEFAULT", "HELP")
    for option in options:
        limits = " ".join(part for part in (option.type, option.bounds, option.unit) if part)
        table.add_row(Text(option.path), Text(limits), Text(option.default), Text(option.help))
    console.print(table)


def _yaml_fragment(row: PluginRow, spec: PluginSpec) -> str:
    import yaml

    from agentrl_core.config.describe import REQUIRED, describe
    from agentrl_core.config.writing import commented

    slot: dict[str, Any] = {"name": f"{row.dist}:{row.name}" if row.status == "duplicate" else row.name}
    path, is_list = _slot_path(row.kind)
    comments: dict[str, str] = {}
    for option in describe(spec.config):
        *sections, key = ("config", *option.path.split("."))
        # The options of the elements of a list or mapping have no place in an empty one, nor those of a null section.
        section: Any = slot
        for name in sections:
            is_element = name.endswith("[]") or name == "NAME"
            section = section.setdefault(name, {}) if isinstance(section, dict) and not is_element else None
        if isinstance(section, dict):
            section[key] = "???" if option.default == REQUIRED else yaml.safe_load(option.default)
            comments[".".join((path, *(["0"] if is_list else []), *sections, key))] = option.help
    tree: Any = [slot] if is_list else slot
    for key in reversed(path.split(".")):
        tree = {key: tree}
    return commented(tree, comments).rstrip()


def _slot_path(kind: str) -> tuple[str, bool]:
    """Where a configuration names a plugin of this kind, and whether it is a list."""
    from agentrl_core.config.introspect import element_type, is_slot, keys, union_arms
    from agentrl_core.config.schema import Config

    for path, member in keys(Config):
        for tp, is_list in ((union_arms(member.type)[0], False), (element_type(member.type), True)):
            if is_slot(tp) and tp.kind == kind:
                return ".".join(path), is_list
    raise PluginError(f"no configuration names a {kind}")
