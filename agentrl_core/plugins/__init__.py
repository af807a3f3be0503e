"""Finds plugins, resolves the ones that a run names, and calls lifecycle hooks.

Listing (:func:`discover`) imports no implementation; resolving (:func:`resolve`) imports the spec's module, and
:meth:`ResolvedPlugin.load` the implementation.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl_core.plugins.discovery import PluginRow, Status, discover
    from agentrl_core.plugins.hooks import HookCaller
    from agentrl_core.plugins.lock import Lock, diff_lock, lock_of, read_lock, write_lock
    from agentrl_core.plugins.resolution import ResolvedPlugin, resolve, resolve_ref

__all__ = [
    "HookCaller",
    "Lock",
    "PluginRow",
    "ResolvedPlugin",
    "Status",
    "diff_lock",
    "discover",
    "lock_of",
    "read_lock",
    "resolve",
    "resolve_ref",
    "write_lock",
]

_NAMES_OF_MODULE = {
    "discovery": ("PluginRow", "Status", "discover"),
    "hooks": ("HookCaller",),
    "lock": ("Lock", "diff_lock", "lock_of", "read_lock", "write_lock"),
    "resolution": ("ResolvedPlugin", "resolve", "resolve_ref"),
}
_MODULE_OF_NAME = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    # `agentrl --help` needs the names of the installed subcommands, and nothing else of this package.
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF_NAME[name]}"), name)
