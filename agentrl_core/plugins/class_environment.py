"""Environment classes as users of TRL and OpenEnv write them: ``./env.py:Class`` in a slot of ``environments``.

    class Counter:
        def reset(self, seed: int) -> str | None:
            self.target, self.count = seed % 5 + 1, 0
            return f"Count to {self.target}, then stop."

        def add(self, number: int) -> str:
            \"\"\"Adds a number to the count.\"\"\"
            self.count += number
            return str(self.count)

        def get_reward(self) -> float:
            return float(self.count == self.target)

Public typed methods other than ``reset`` and ``get_reward`` are tools; their docstrings describe them. ``reset`` gets
the fields of the task that it names, or all with ``**kwargs``, and the episode's ``seed``; the text that it returns is
appended to the last message of the task's prompt, or is the prompt. In place of a text, ``reset`` and tools may return
a PIL image, a list of texts and PIL images, or a list of parts as messages have them. Where the attribute ``done`` is
True after a call, the trajectory ends. Each trajectory has its own object. Methods may be coroutines; plain ones run in
a thread, which may go on after a limit has passed. So no method of the object is called again then.
"""

import asyncio
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl_core.api.config import option
from agentrl_core.api.dataset import Split
from agentrl_core.api.environment import Environment, EnvironmentContext, Episode
from agentrl_core.api.errors import ConfigError, ToolError
from agentrl_core.api.message_parts import content_of, shown_parts
from agentrl_core.api.reward import RewardTrajectory
from agentrl_core.api.tool import FunctionTool, ToolContext, ToolResult
from agentrl_core.plugins.boundary import in_daemon_thread

_NO_TOOLS = ("reset", "get_reward")


@dataclass
class ClassConfig:
    tasks: int | None = option(
        None,
        ge=1,
        help="number of training tasks of a class that makes its own from the seed; null: the rows of data.train_files",
    )
    validation_tasks: int = option(0, ge=0, help="number of validation tasks of such a class")
    arguments: dict[str, Any] = option(default_factory=dict, help="keyword arguments of the class")


def is_environment_class(found: Any) -> bool:
    """Whether an object of a file is such a class."""
    return inspect.isclass(found) and not issubclass(found, Environment) and callable(getattr(found, "reset", None))


class ClassEnvironment(Environment):
    """Opens objects of a class as episodes."""

    config: ClassConfig

    def __init__(self, cls: type, config: ClassConfig, context: EnvironmentContext) -> None:
        super().__init__(config, context)
        self._cls = cls
        self.scores = callable(getattr(cls, "get_reward", None))
        probe = cls(**config.arguments)
        self._tools: dict[str, FunctionTool] = {}
        # Of the class: asking the object would run its properties.
        for name, _ in inspect.getmembers(cls, inspect.isfunction):
            if not name.startswith("_") and name not in _NO_TOOLS:
                tool = FunctionTool(getattr(probe, name), ToolContext(name))
                if not tool.schema["function"]["description"]:
                    raise ConfigError(
                        f"environment {cls.__name__}: the method {name!r} is a tool, but has no docstring that tells "
                        "the model what it does; write one, or rename the method to begin with _"
                    )
                self._tools[name] = tool
        self._takes = inspect.signature(probe.reset).parameters

    def tasks(self, split: Split) -> Sequence[Mapping[str, Any]] | None:
        if self.config.tasks is None:
            return None
        return [
            {"index": index} for index in range(self.config.tasks if split == "train" else self.config.validation_tasks)
        ]

    async def open(self, task: Mapping[str, Any], seed: int) -> Episode:
        prompt = [dict(message) for message in task.get("raw_prompt", ())]
        fields = {"seed": seed, "prompt": prompt, **task}
        if not any(each.kind is each.VAR_KEYWORD for each in self._takes.values()):
            fields = {name: value for name, value in fields.items() if name in self._takes}
        instance = await _run(self._cls, **self.config.arguments)
        observation = _content(await _run(instance.reset, **fields))
        if observation is not None and prompt:
            prompt[-1]["content"] = _joined(prompt[-1]["content"], observation)
        elif observation is not None:
            prompt = [{"role": "user", "content": observation}]
        elif not prompt:
            raise ValueError(f"reset of {self._cls.__name__} returned None, and the task has no prompt; return a text")
        return _ClassEpisode(instance, self._tools, prompt)


class _ClassEpisode(Episode):
    def __init__(self, instance: Any, tools: Mapping[str, FunctionTool], messages: Sequence[dict[str, Any]]) -> None:
        self._instance = instance
        self._was_left = False
        self._tools = tools
        self.messages = messages
        self.tools = [tool.schema for tool in tools.values()]

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        tool = copy.copy(self._tools[name])
        method = getattr(self._instance, name)
        tool.function = lambda **given: self._enter(method, **given)
        result = await tool.execute("", arguments)
        return result._replace(done=result.done or getattr(self._instance, "done", False) is True)

    async def score(self, trajectory: RewardTrajectory) -> float:
        score = getattr(self._instance, "get_reward", None)
        return 0.0 if score is None else await self._enter(score)

    async def _enter(self, method: Callable[..., Any], **arguments: Any) -> Any:
        if self._was_left:
            raise ToolError("an earlier call passed its limit, and the environment cannot be used any more")
        try:
            return await _run(method, **arguments)
        except asyncio.CancelledError:
            self._was_left = True
            raise


async def _run(function: Callable[..., Any], **arguments: Any) -> Any:
    """What a function or coroutine function returns; a plain function runs in a thread, which a deadline leaves."""
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await in_daemon_thread(lambda: function(**arguments))


def _content(observation: Any) -> str | list[dict[str, Any]] | None:
    """An observation as the content of a message."""
    if observation is None or isinstance(observation, str):
        return observation
    if (parts := shown_parts(observation)) is None:
        raise ValueError(
            f"reset returned {observation!r:.100}; allowed are a text, None, a PIL image, a list of texts and images"
        )
    return content_of(parts)


def _joined(content: str | list[dict[str, Any]], more: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    parts = [[each] if isinstance(each, str) else each for each in (content, more)]
    return content_of([*parts[0], *parts[1]])
