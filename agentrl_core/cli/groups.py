"""Groups of commands that packages add to, through the entry-point group ``agentrl.cli``.

``view = "package.module:typer_app"`` is ``agentrl view``, and ``plugins.new = …`` is ``agentrl plugins new``. The
module of a command is imported only when the command is typed.
"""

import ast
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class LazyCommand(TyperCommand):
    """Stands for a command in the help, and loads it when it is typed."""

    def __init__(self, name: str, help_text: str, load: Callable[[], Any]) -> None:
        super().__init__(name=name, callback=None, help=help_text)
        self._load = load

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self._load().make_context(info_name, args, parent=parent, **extra)


class OpenGroup(TyperGroup):
    """A group of commands that packages add to; a command of the group's own comes first."""

    def list_commands(self, ctx: Any) -> list[str]:
        prefix = _prefix(ctx)
        added = [name.removeprefix(prefix) for name in plugin_commands() if name.startswith(prefix)]
        return [*self.commands, *sorted(name for name in added if "." not in name and name not in self.commands)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        name = _prefix(ctx) + cmd_name
        registered = plugin_commands().get(name)
        if not registered:
            _raise_if_official(name)
            return None
        packages = " and ".join(each.package for each in registered)
        described = _described(registered[0].entry_point.value).rstrip(".")
        help_text = f"{described} (from {packages})." if described else f"From package {packages}."
        return LazyCommand(cmd_name, help_text, partial(load_registered, name, registered))


def _prefix(ctx: Any) -> str:
    """``plugins.`` for the commands of ``agentrl plugins``; empty for those of ``agentrl``."""
    return "".join(f"{name}." for name in ctx.command_path.split()[1:])


def plugin_commands() -> dict[str, list[Any]]:
    """The registrations of each command of a package; ``plugins.new`` is below ``agentrl plugins``."""
    from agentrl_core.api.plugin import CLI_GROUP
    from agentrl_core.plugins.registration import registered_in

    commands: dict[str, list[Any]] = {}
    for registration in registered_in(CLI_GROUP):
        commands.setdefault(registration.name, []).append(registration)
    return commands


def load_registered(name: str, registered: list[Any]) -> Any:
    """The command of a package.

    Raises:
        PluginConflictError: two packages have it.
        PluginBrokenError: it cannot be imported, or is no Typer app.
    """
    from agentrl_core.api.errors import PluginBrokenError, PluginConflictError
    from agentrl_core.plugins.spec import imported

    if len(registered) > 1:
        packages = " and ".join(each.package for each in registered)
        raise PluginConflictError(
            f"subcommand {name!r} is registered by {packages}. Uninstall one, or name its package in "
            "AGENTRL_PLUGINS_BLOCK"
        )
    (registration,) = registered
    value = registration.entry_point.value
    found = imported(
        registration.package, f"importing {value} for the subcommand {name!r}", registration.entry_point.load
    )
    if not isinstance(found, typer.Typer):
        raise PluginBrokenError(
            f"package {registration.package} is broken: {value} for the subcommand {name!r} is a "
            f"{type(found).__name__}, must be a typer.Typer"
        )
    return typer.main.get_command(found)


def _raise_if_official(name: str) -> None:
    from agentrl_core.api.errors import PluginNotFoundError
    from agentrl_core.plugins.official import OFFICIAL

    if package := OFFICIAL.get(("command", name)):
        raise PluginNotFoundError(
            f"agentrl {name.replace('.', ' ')} comes with: pip install {package} (all plugins: pip install agentrl-all)"
        )


def _described(target: str) -> str:
    """The help of a Typer app, else of its command, read from the source of its module and not imported; else empty."""
    name, _, app = target.partition(":")
    top, *below = name.split(".")
    spec = find_spec(top)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    path = Path(folders[0], *below).with_suffix(".py") if folders and below else Path(spec.origin or "" if spec else "")
    try:
        module = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    texts: list[Any] = []
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and ast.unparse(node.targets[0]) == app:
            words = {word.arg: word.value for word in node.value.keywords}
            texts += [help_text.value] if isinstance(help_text := words.get("help"), ast.Constant) else []
        elif isinstance(node, ast.FunctionDef) and any(
            ast.unparse(each).startswith(f"{app}.command(") for each in node.decorator_list
        ):
            texts.append(ast.get_docstring(node) or "")
    return str(texts[0]).partition("\n")[0] if texts else ""
