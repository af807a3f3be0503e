"""OpenEnv environments as episodes: actions are tool calls or plain text, observations what the policy reads."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentrl_core.api import (
    ConfigError,
    Environment,
    EnvironmentContext,
    Episode,
    InteractionTurn,
    RewardResult,
    RewardTrajectory,
    ToolResponse,
    ToolResult,
)
from agentrl_core.api.dataset import Split
from agentrl_core.api.message_parts import content_of, image_part
from agentrl_env_openenv.config import OpenEnvConfig
from agentrl_env_openenv.worlds import LocalWorlds, Observed, RemoteWorlds, World

TOOL = "act"


class OpenEnv(Environment):
    """One object of the environment class, here or on a server, for each trajectory.

    Raises:
        ConfigError: a class that is missing or has another interface; a server that does not answer.
    """

    config: OpenEnvConfig

    def __init__(self, config: OpenEnvConfig, context: EnvironmentContext) -> None:
        super().__init__(config, context)
        where = f"environment {context.name!r}"
        if (config.environment is None) == (config.url is None):
            raise ConfigError(f"{where}: set either environment, a class, or url, the address of a server")
        if config.url is None:
            self.worlds: LocalWorlds | RemoteWorlds = LocalWorlds(where, config)
        else:
            self.worlds = RemoteWorlds(where, config)
        self.parameters = {key: value for key, value in self.worlds.action.items() if key != "properties"}
        properties = self.worlds.action.get("properties", {})
        self.parameters["properties"] = {name: value for name, value in properties.items() if name != "metadata"}
        # The action of an environment whose actions are calls of its MCP tools.
        self.mcp = properties.get("type", {}).get("const") == "call_tool"
        if config.text_field is not None and config.text_field not in self.parameters["properties"]:
            title = self.worlds.action.get("title", "the action")
            raise ConfigError(
                f"{where}: text_field is {config.text_field!r}, but {title} has the fields "
                f"{', '.join(self.parameters['properties'])}"
            )

    def tasks(self, split: Split) -> Sequence[Mapping[str, Any]]:
        count = self.config.tasks if split == "train" else self.config.validation_tasks
        return [{"extra_info": {"split": split, "index": index}} for index in range(count)]

    async def open(self, task: Mapping[str, Any], seed: int) -> Episode:
        given = {"seed": seed % 2**32, **self.config.reset}
        if self.config.send_index:
            place = task["extra_info"]
            given |= {"split": "train" if place["split"] == "train" else "test", "index": place["index"]}
        world = await self.worlds.open()
        try:
            first = await world.reset(given)
            text, *images = await self.shown(first.fields)
            said = "\n\n".join(str(part) for part in (self.config.prompt, text) if part)
            return _Acting(self, world, first.done, content_of([said, *images]), await self._tools(world))
        except BaseException:
            await world.close()
            raise

    async def _tools(self, world: World) -> list[dict[str, Any]]:
        if self.config.text_field is not None:
            return []
        if self.mcp:
            listed = (await world.step({"type": "list_tools"})).fields["tools"]
            return [_function(tool["name"], tool["description"], tool["input_schema"]) for tool in listed]
        parameters = dict(self.parameters)
        return [_function(TOOL, parameters.pop("description", None) or "Acts in the environment.", parameters)]

    async def shown(self, fields: Mapping[str, Any]) -> list[str | dict[str, Any]]:
        """What the policy reads of the fields of an observation, and the images that follow."""
        names = self.config.images
        if unknown := [name for name in names if name not in fields]:
            raise ValueError(
                f"the observation has no field {', '.join(unknown)}; in the option images, choose from "
                f"{', '.join(fields)}"
            )
        text = self._text({name: value for name, value in fields.items() if name not in names})
        if not names:
            return [text]
        # Pixels as lists are many numbers.
        found = await asyncio.to_thread(lambda: [image for name in names for image in _images(fields[name])])
        if not self.context.shows_images:
            return [text + "\n[an image is not shown]" * len(found)]
        return [text, *map(image_part, found)]

    def _text(self, shown: Mapping[str, Any]) -> str:
        if not shown:
            return ""
        if (names := self.config.observation) is not None:
            if unknown := [name for name in names if name not in shown]:
                raise ValueError(
                    f"the observation has no field {', '.join(unknown)}; in the option observation, choose from "
                    f"{', '.join(shown)}"
                )
            shown = {name: shown[name] for name in names}
        if len(shown) == 1 and isinstance(only := next(iter(shown.values())), str):
            return only
        return json.dumps(shown, ensure_ascii=False)


class _Acting(Episode):
    def __init__(
        self, environment: OpenEnv, world: World, done: bool, content: Any, tools: list[dict[str, Any]]
    ) -> None:
        self._environment = environment
        self._world = world
        self._steps = 0
        self._done = done
        self.messages = [{"role": "user", "content": content}]
        self.tools = tools

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        if not self._environment.mcp:
            observed = await self._step(arguments)
            parts = await self._environment.shown(observed.fields)
        else:
            observed = await self._step({"type": "call_tool", "tool_name": name, "arguments": arguments})
            parts = _mcp_parts(observed.fields)
        return ToolResult(ToolResponse("", parts=parts), observed.reward, done=observed.done)

    async def reply(self, messages: Sequence[dict[str, Any]]) -> InteractionTurn:
        field = self._environment.config.text_field
        if field is None:
            return InteractionTurn(terminate=True, text="")
        observed = await self._step({field: messages[-1]["content"]})
        text, *images = [""] if observed.done else await self._environment.shown(observed.fields)
        return InteractionTurn(observed.done, str(text), observed.reward, images=[part["image"] for part in images])

    async def _step(self, fields: Mapping[str, Any]) -> Observed:
        if self._done:
            raise RuntimeError("the episode is over")
        observed = await self._world.step(fields)
        self._steps += 1
        self._done = observed.done
        return observed

    async def score(self, trajectory: RewardTrajectory) -> RewardResult:
        """Nothing in addition to the rewards of the steps.

        Raises:
            ConnectionError: the server was lost, so the rewards are not complete.
        """
        self._world.check()
        return RewardResult(0.0, components={"steps": float(self._steps), "finished": float(self._done)})

    async def close(self) -> None:
        await self._world.close()


def _function(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _images(value: Any) -> list[Any]:
    """The images of a field: one, or a list of them; pixels are arrays."""
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        return [value]
    if not value or not isinstance(value[0], list | tuple):
        return list(value)
    pixels = np.asarray(value)
    if pixels.ndim not in (3, 4) or not ((pixels >= 0) & (pixels < 256)).all():
        raise ValueError(f"pixels of the shape {pixels.shape}; allowed are [height, width, 3] of 0 to 255, or a list")
    return list(pixels.astype(np.uint8)) if pixels.ndim == 4 else [pixels.astype(np.uint8)]


def _mcp_parts(fields: Mapping[str, Any]) -> list[str | dict[str, Any]]:
    """Texts and images of an MCP tool's result; raises what the tool failed with."""
    if error := fields.get("error"):
        raise RuntimeError(error.get("message") or str(error))
    result = fields.get("result")
    if not isinstance(result, Mapping) or "content" not in result:
        return [result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)]
    parts: list[str | dict[str, Any]] = []
    for block in result["content"]:
        if block.get("type") == "image":
            parts.append(image_part(block["data"]))
            continue
        text = block.get("text", json.dumps(block, ensure_ascii=False))
        if parts and isinstance(parts[-1], str):
            parts[-1] += f"\n{text}"
        else:
            parts.append(text)
    if result.get("is_error") or result.get("isError"):
        raise RuntimeError("\n".join(part for part in parts if isinstance(part, str)) or "the tool failed")
    return parts
