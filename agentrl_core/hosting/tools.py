"""The tools of a worker: built once, opened per trajectory, inline or in separate processes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from agentrl_core.api import (
    EngineClient,
    Engines,
    PluginBrokenError,
    Tool,
    ToolContext,
    ToolError,
    ToolResponse,
    ToolResult,
)
from agentrl_core.config.schema import ToolSlot
from agentrl_core.hosting.process_host import ProcessHost, ProcessPool, engines_of_child
from agentrl_core.plugins.boundary import within

_OPTIONAL = ("create", "calc_reward", "release")


def build_tool(slot: ToolSlot, context: ToolContext) -> Tool:
    """Build the tool object of a resolved slot.

    Raises:
        PluginBrokenError: the factory built no tool, or one without valid schemas.
    """
    tool = slot.build(context)
    if not isinstance(tool, Tool):
        raise PluginBrokenError(f"tool {context.name!r}: its factory built a {type(tool).__name__}, not a Tool")
    schemas: list[Any] = (
        list(tool.schemas) if type(tool).schemas is not Tool.schemas else [getattr(tool, "schema", None)]
    )
    for schema in schemas:
        if not isinstance(schema, Mapping) or not isinstance(schema.get("function"), Mapping):
            raise PluginBrokenError(f"tool {context.name!r}: its schema is not an OpenAI function schema: {schema!r}")
    if not schemas:
        raise PluginBrokenError(f"tool {context.name!r} offers no functions")
    return tool


class HostedTool:
    """One configured tool with its deadline; ``inline`` calls go straight to the object.

    Args:
        slot: a resolved slot of the configuration.
        seed: seed of the run.
        clients: of the named engines.
        shows_images: the model can be shown images.
    """

    def __init__(
        self,
        slot: ToolSlot,
        seed: int,
        clients: Mapping[str, EngineClient] | None = None,
        *,
        shows_images: bool = False,
    ) -> None:
        self.timeout = slot.timeout
        title = f"tool {slot.registered_name!r}"
        context = ToolContext(slot.registered_name, seed, Engines(clients, user=title), shows_images)
        self.tool = build_tool(slot, context)
        self._inline = (slot.isolation or self.tool.isolation) == "inline"
        if not self._inline:
            context = replace(context, engines=engines_of_child(title, context.engines.asked))
        self.schemas: dict[str, dict[str, Any]] = {each["function"]["name"]: each for each in self.tool.schemas}
        self._several = type(self.tool).schemas is not Tool.schemas
        self.name: str = slot.registered_name if self._several else next(iter(self.schemas))
        # Methods that a tool does not define need no call and no deadline.
        self._absent = {
            name for name in _OPTIONAL if getattr(getattr(self.tool, name), "__func__", None) is getattr(Tool, name)
        }
        self._make = partial(ProcessHost, build_tool, (slot, context), f"tool {self.name!r}", slot.env)
        self._pool = ProcessPool(self._make, slot.processes)
        self._owned: dict[str, ProcessHost] = {}

    async def execute(
        self, instance_id: str, function: str, arguments: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call one of the tool's functions, as :meth:`call` does."""
        if self._several:
            kwargs = {**kwargs, "function": function}
        return await self.call("execute", instance_id, arguments, kwargs=kwargs)

    def parameters(self, function: str) -> tuple[Mapping[str, Any], Sequence[str]]:
        """The schemas of a function's parameters by name, and the names of the required ones."""
        parameters = self.schemas[function]["function"].get("parameters", {})
        return parameters.get("properties", {}), parameters.get("required", ())

    async def call(self, method: str, instance_id: str, *args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Call a lifecycle method within the deadline.

        Raises:
            DeadlineError: the deadline passed. Exceptions of the tool pass unchanged (from a process: as a ToolError).
            ToolError: a stateful tool's process exited, and the trajectory's state there is lost.
            ToolUnavailableError: of the tool, unchanged.
        """
        if self._inline:
            if method in self._absent:
                return None
            answer = getattr(self.tool, method)(instance_id, *args, **kwargs)
            return await within(
                self.timeout, answer, lambda: f"tool {self.name!r}: no answer within {self.timeout:g} s"
            )
        call = (method, (instance_id, *args), dict(kwargs), self.timeout)
        if self.tool.stateful:
            if method == "create":
                self._owned[instance_id] = self._make()
            elif instance_id not in self._owned or not self._owned[instance_id].alive:
                raise ToolError(f"tool {self.name!r}: its process exited, and its state is lost")
            return await self._owned[instance_id].call(*call)
        return await self._pool.call(*call)

    async def release(self, instance_id: str, kwargs: Mapping[str, Any]) -> None:
        """Release an instance, and stop the process that it owned."""
        try:
            owned = self._owned.get(instance_id)
            if owned is None or owned.alive:
                await self.call("release", instance_id, kwargs=kwargs)
        finally:
            owned = self._owned.pop(instance_id, None)
            if owned is not None:
                await owned.close()

    async def close(self) -> None:
        """Stop all processes, and what the tool's trajectories shared."""
        if self._inline:
            await self.tool.close()
        await self._pool.close()
        for host in self._owned.values():
            await host.close()


def check_result(name: str, result: Any) -> ToolResult:
    """Return the result of ``execute`` if it is a valid one.

    Raises:
        ToolError: says what was returned instead.
    """
    if not isinstance(result, ToolResult):
        raise ToolError(f"tool {name!r} returned {type(result).__name__}, not a ToolResult")
    if not isinstance(result.response, ToolResponse) or not isinstance(result.response.text, str):
        raise ToolError(f"tool {name!r} returned a response without text: {type(result.response).__name__}")
    if result.reward is not None and not is_finite(result.reward):
        raise ToolError(f"tool {name!r} returned the reward {result.reward!r}, which is not a finite number")
    if not isinstance(result.metrics, Mapping):
        raise ToolError(f"tool {name!r} returned the metrics {result.metrics!r:.100}, which are no dict")
    for key, value in result.metrics.items():
        if not is_finite(value):
            raise ToolError(f"tool {name!r} returned the metric {key}={value!r}, which is not a finite number")
    return result


def is_finite(value: Any) -> bool:
    """Whether a value is a number (of Python or numpy) that a float can hold, and neither NaN nor infinite."""
    try:
        return not isinstance(value, (str, bytes)) and math.isfinite(value)
    except (TypeError, OverflowError):
        return False


def select_tools(extra_info: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The tools of a row: all configured ones, or with ``need_tools_kwargs`` those that ``tools_kwargs`` names."""
    if not extra_info.get("need_tools_kwargs"):
        return list(names)
    wanted = extra_info.get("tools_kwargs") or {}
    return [name for name in names if name in wanted]
