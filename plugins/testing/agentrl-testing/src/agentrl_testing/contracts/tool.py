"""The contract of tools."""

import asyncio
import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl_core.api import Tool, ToolContext, ToolResponse, ToolResult
from agentrl_testing.contracts.case import PluginCase, PluginContract, is_number, run


@dataclass(kw_only=True)
class ToolCase(PluginCase):
    """A tool under test.

    Args:
        arguments: of a call that succeeds.
        function: the function that is called, of a tool that offers several.
        expected: the text of its response, or None if any will do.
        create_kwargs, execute_kwargs: what a row's ``tools_kwargs`` would hold.
        repeatable: the same call in a fresh trajectory gives the same text.
    """

    arguments: Mapping[str, Any]
    function: str = ""
    expected: str | None = None
    create_kwargs: Mapping[str, Any] = field(default_factory=dict)
    execute_kwargs: Mapping[str, Any] = field(default_factory=dict)
    repeatable: bool = True

    def make(self) -> Tool:
        """A tool as a worker builds it."""
        tool: Tool = self.build(ToolContext(self.spec.name))
        return tool

    async def call(self, tool: Tool, instance: str) -> ToolResult:
        """One call with the case's arguments."""
        return await self.execute(tool, instance, copy.deepcopy(dict(self.arguments)))

    async def execute(self, tool: Tool, instance: str, arguments: dict[str, Any]) -> ToolResult:
        """One call with these arguments."""
        function = {"function": self.function} if self.function else {}
        return await tool.execute(instance, arguments, **function, **self.execute_kwargs)

    async def whole(self, tool: Tool, instance: str) -> ToolResult:
        """A trajectory with one call."""
        await tool.create(instance, **self.create_kwargs)
        try:
            return await self.call(tool, instance)
        finally:
            await tool.release(instance)


class ToolContract(PluginContract):
    """What every tool must do."""

    kind = "tool"

    def test_schema_is_an_openai_function(self, plugin: ToolCase) -> None:
        """The model is told of the tool in the form that chat templates render."""
        called = {}
        for schema in plugin.make().schemas:
            json.dumps(schema)
            assert schema.get("type") == "function", f"schema['type'] is {schema.get('type')!r}, not 'function'"
            function = schema["function"]
            name, description = function.get("name", ""), function.get("description", "")
            assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name), f"the name {name!r} is not 1 to 64 of A-Za-z0-9_-"
            assert description.strip(), "the description is empty: the model cannot know what the tool does"
            parameters = function.get("parameters", {})
            assert parameters.get("type") == "object", "schema['function']['parameters']['type'] is not 'object'"
            unknown = set(parameters.get("required", [])) - set(parameters.get("properties", {}))
            assert not unknown, f"required names {sorted(unknown)}, which are no properties"
            called[name] = parameters
        assert not plugin.function or plugin.function in called, f"no function {plugin.function!r} among {list(called)}"
        parameters = called[plugin.function or next(iter(called))]
        properties, required = parameters.get("properties", {}), parameters.get("required", [])
        assert set(plugin.arguments) <= set(properties), "the case's arguments are not all properties of the schema"
        assert set(required) <= set(plugin.arguments), "the case's arguments lack required ones"

    def test_call_returns_a_result(self, plugin: ToolCase) -> None:
        """A :class:`ToolResult` with text, a finite reward or None, and finite metrics."""
        result = run(plugin.whole(plugin.make(), "a"))
        assert isinstance(result, ToolResult), f"execute returned a {type(result).__name__}, not a ToolResult"
        assert isinstance(result.response, ToolResponse), "result.response is not a ToolResponse"
        assert isinstance(result.response.text, str), "result.response.text is not a text"
        assert result.reward is None or is_number(result.reward), f"the reward {result.reward!r} is not a finite number"
        bad = {key: value for key, value in result.metrics.items() if not is_number(value)}
        assert not bad, f"metrics that are not finite numbers: {bad}"
        if plugin.expected is not None:
            assert result.response.text == plugin.expected, f"the response is {result.response.text!r}"

    def test_call_leaves_its_arguments_alone(self, plugin: ToolCase) -> None:
        """The arguments are part of the record of the trajectory."""

        async def main() -> None:
            tool, arguments = plugin.make(), copy.deepcopy(dict(plugin.arguments))
            await tool.create("a", **plugin.create_kwargs)
            await plugin.execute(tool, "a", arguments)
            await tool.release("a")
            assert arguments == plugin.arguments, f"execute changed its arguments to {arguments}"

        run(main())

    def test_trajectories_do_not_share_state(self, plugin: ToolCase) -> None:
        """One object serves many trajectories at once."""
        if not plugin.repeatable:
            return

        async def main() -> None:
            alone = (await plugin.whole(plugin.make(), "alone")).response.text
            tool = plugin.make()
            together = await asyncio.gather(*(plugin.whole(tool, f"i{number}") for number in range(8)))
            texts = {result.response.text for result in together}
            assert texts == {alone}, f"8 trajectories at once got {sorted(texts)}, one alone got {alone!r}"

        run(main())

    def test_release_forgets_the_trajectory(self, plugin: ToolCase) -> None:
        """A retry with the same instance id starts afresh."""
        if not plugin.repeatable:
            return

        async def main() -> None:
            tool = plugin.make()
            first = (await plugin.whole(tool, "a")).response.text
            again = (await plugin.whole(tool, "a")).response.text
            assert again == first, f"after release the same trajectory got {again!r} instead of {first!r}"

        run(main())

    def test_final_reward_is_a_number_or_none(self, plugin: ToolCase) -> None:
        """``calc_reward`` scores the final state."""

        async def main() -> Any:
            tool = plugin.make()
            await tool.create("a", **plugin.create_kwargs)
            await plugin.call(tool, "a")
            reward = await tool.calc_reward("a")
            await tool.release("a")
            return reward

        reward = run(main())
        assert reward is None or is_number(reward), f"calc_reward returned {reward!r}, not a finite number or None"

    def test_release_works_in_whatever_state(self, plugin: ToolCase) -> None:
        """After a create that failed, twice, and after a call that was cancelled."""

        async def main() -> None:
            tool = plugin.make()
            await tool.release("never created")
            await plugin.whole(tool, "a")
            await tool.release("a")
            await tool.create("b", **plugin.create_kwargs)
            call = asyncio.ensure_future(plugin.call(tool, "b"))
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait({call})
            await tool.release("b")
            await plugin.whole(tool, "c")

        run(main())
