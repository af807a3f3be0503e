"""The client of a named engine, which reward functions, interactions and tools can ask.

A named engine (``engines`` of the configuration) serves a frozen model, for example a judge. The core starts it, routes
requests to its replicas and restarts those that die. Its client is in the context of reward functions, interactions and
tools:

    class Polite:
        def __init__(self, config, context):
            self.judge = context.engines["judge"]

        async def __call__(self, trajectory):
            question = f"Is this polite? Answer yes or no.\\n{trajectory.last_text}"
            answer = await self.judge.chat([{"role": "user", "content": question}], max_tokens=8)
            return "yes" in answer.lower()

The client works in the process of the worker: code that runs in a child process (``isolation: process``) has none.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agentrl_core.api.errors import ConfigError


class EngineClient(Protocol):
    """Chats with the model of one named engine."""

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        temperature: float = 0.0,
        max_tokens: int = 512,
        json_schema: str | None = None,
    ) -> str:
        """Return the model's answer to a conversation, as text without special tokens.

        Args:
            messages: dicts with ``role`` and ``content``, rendered with the chat template of the engine's model.
            temperature: 0 means greedy.
            max_tokens: most tokens of the answer.
            json_schema: JSON text of a schema that the answer fits, for an engine with the capability ``json_schema``.

        Raises:
            TemplateError: the model's chat template cannot render the messages.
            EngineError: prompt and answer do not fit ``max_model_len``, the engine cannot constrain answers or not to
                this schema, no replica could serve the request, or ``rollout.turn_timeout`` passed.
        """


class Engines(dict[str, EngineClient]):
    """Clients by the name of their engine. An unknown name raises a ConfigError that lists the known ones.

    Args:
        clients: by name.
        user: who uses them, for that error.
        reason: why there are none here.
    """

    def __init__(
        self, clients: Mapping[str, EngineClient] | None = None, *, user: str = "this plugin", reason: str = ""
    ) -> None:
        super().__init__(clients or {})
        self._user = user
        self._reason = reason
        self.asked: set[str] = set()
        """Names that were looked up with ``engines[name]``."""

    def __getitem__(self, name: str) -> EngineClient:
        self.asked.add(name)
        return super().__getitem__(name)

    def __missing__(self, name: str) -> EngineClient:
        found = f"`engines` has {', '.join(self) or 'none'}; name one of these, or add {name!r} to `engines`"
        raise ConfigError(f"{self._user} asks for the engine {name!r}, but {self._reason or found}")
