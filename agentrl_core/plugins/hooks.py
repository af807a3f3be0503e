"""Calls lifecycle hooks in the order of the configuration.

pluggy checks names and arguments; the calls are made here, because pluggy calls the last registered first, does not
thread values, and does not say whose implementation raised.
"""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pluggy

from agentrl_core.api.errors import PluginBrokenError
from agentrl_core.api.hooks import PROJECT, HookSpecs
from agentrl_core.plugins.boundary import boundary, hang_reported
from agentrl_core.plugins.spec import describe_exception

_HOOKS = tuple(name for name in vars(HookSpecs) if name.startswith("on_"))
_REPLACED = {"on_batch_ready": "batch"}
"""Arguments that a hook may replace: each implementation gets what the one before it returned, unless that is None."""


class HookCaller(HookSpecs):
    """The configured hooks of a run, called like :class:`HookSpecs` but with keywords only.

    Args:
        hook_objects: name and object of each hook, in the order of the configuration.

    Raises:
        PluginBrokenError: an object marks a method that is no hook, does not mark one that is, has wrong arguments,
            or asks for another place in the order.
    """

    def __init__(self, hook_objects: Sequence[tuple[str, object]]) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(HookSpecs)
        self._names: dict[str, str] = {}
        for index, (name, hooks) in enumerate(hook_objects):
            self._check(name, hooks)
            registered = f"{name}#{index}"
            try:
                self._manager.register(hooks, name=registered)
            except (pluggy.PluginValidationError, ValueError) as error:
                raise PluginBrokenError(f"hook {name!r}: {error}") from error
            self._names[registered] = name

    def implements(self, hook: str) -> bool:
        """Whether a configured hook wants to hear of this."""
        return bool(getattr(self._manager.hook, hook).get_hookimpls())

    def _call(self, implementation: pluggy.HookImpl, hook: str, arguments: Mapping[str, Any]) -> Any:
        name = self._names[implementation.plugin_name]
        raised = boundary(PluginBrokenError, f"hook {name!r} raised in {hook}:", describe=describe_exception)
        with raised, hang_reported(f"hook {name!r} in {hook}"):
            return implementation.function(*(arguments[name] for name in implementation.argnames))

    def _check(self, name: str, hooks: object) -> None:
        marked = {
            method: options
            for method, function in inspect.getmembers(hooks, inspect.isroutine)
            if (options := getattr(function, f"{PROJECT}_impl", None)) is not None
        }
        for method, options in marked.items():
            if method not in _HOOKS:
                raise PluginBrokenError(f"hook {name!r} implements {method!r}, which is no hook: {_suggestion(method)}")
            if any(options.get(key) for key in ("tryfirst", "trylast", "wrapper", "hookwrapper", "specname")):
                raise PluginBrokenError(
                    f"hook {name!r}: {method} asks for a place in the order or a wrapper; hooks run in the order of "
                    "the config, mark it with a plain @hookimpl"
                )
        forgotten = [method for method in _HOOKS if hasattr(hooks, method) and method not in marked]
        if forgotten:
            raise PluginBrokenError(f"hook {name!r}: mark {', '.join(forgotten)} with @hookimpl, or it is never called")
        if not marked:
            raise PluginBrokenError(f"hook {name!r} implements no hook; allowed are {', '.join(_HOOKS)}")


def _caller(hook: str) -> Callable[..., Any]:
    def call(self: HookCaller, **arguments: Any) -> Any:
        value = _REPLACED.get(hook)
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            returned = self._call(implementation, hook, arguments)
            if value is not None and returned is not None:
                arguments[value] = returned
        return None if value is None else arguments[value]

    return call


for _hook in _HOOKS:
    setattr(HookCaller, _hook, _caller(_hook))


def _suggestion(method: str) -> str:
    close = difflib.get_close_matches(method, _HOOKS, 1)
    return f"did you mean {close[0]!r}?" if close else f"allowed are {', '.join(_HOOKS)}"
