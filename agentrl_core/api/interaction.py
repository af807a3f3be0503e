"""The interface of interactions, which answer a policy that calls no tool: a user, a tutor, an environment.

Per trajectory: ``start_interaction`` once, ``generate_response`` after each assistant turn without a tool call,
``calculate_score`` once at the end, ``finalize_interaction`` always. One object serves many trajectories and tells them
apart by ``instance_id``; all methods are coroutines on the event loop of an agent-loop worker, so blocking work belongs
into a thread. An exception ends the trajectory with ``env_error``, as does passing the slot's ``timeout``; the
trajectory is trained, and ``finalize_interaction`` still called. An error of an engine from ``context.engines`` is the
exception: the trajectory is retried.

    class Echo(Interaction):
        async def generate_response(self, instance_id, messages, **kwargs):
            return InteractionTurn(terminate=True, text="", reward=1.0)
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agentrl_core.api.engine_client import Engines
from agentrl_core.api.message_parts import content_of, image_part


class InteractionTurn(NamedTuple):
    """The answer to a turn.

    Args:
        terminate: the conversation ends here.
        text: what the user says.
        reward: for the turn.
        metrics: finite numbers by name.
        agent: who reads ``text`` and has the next turn, where several agents act; None: the one that had this turn.
        images: what the user shows after the text, as in ``ToolResponse``.
    """

    terminate: bool
    text: str
    reward: float | None = None
    metrics: dict[str, float] = {}
    agent: str | None = None
    images: Sequence[Any] = ()

    @property
    def content(self) -> str | list[dict[str, Any]]:
        """The content of the user's message: a text, or a list of parts where there are images."""
        return content_of([self.text, *map(image_part, self.images)])


@dataclass(frozen=True)
class InteractionContext:
    """What an interaction gets when it is built.

    Args:
        name: the name under which the run knows it.
        seed: of the run.
        engines: clients of the configured engines, by name.
    """

    name: str
    seed: int = 0
    engines: Engines = field(default_factory=Engines)


class Interaction(ABC):
    """Answers the policy. May raise ordinary exceptions: the trajectory then ends with ``env_error``."""

    def __init__(self, config: Any, context: InteractionContext) -> None:
        self.config = config
        self.context = context

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """A trajectory begins. ``kwargs`` are the row's ``extra_info.interaction_kwargs`` without ``name``."""
        return None

    @abstractmethod
    async def generate_response(
        self, instance_id: str, messages: Sequence[dict[str, Any]], **kwargs: Any
    ) -> InteractionTurn:
        """Answer the conversation so far, whose last message is the assistant's."""

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        """A score for the whole conversation, or None."""
        return None

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """The trajectory has ended, completed or failed."""
        return None
