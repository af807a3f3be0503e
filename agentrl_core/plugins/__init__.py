"""Finds plugins, resolves the ones that a run names, and calls lifecycle hooks.

Listing (:func:`discover`) imports no implementation; resolving (:func:`resolve`) imports the spec's module, and
:meth:`ResolvedPlugin.load` the implementation.
"""

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
