"""A model of ``engines`` that plays the user."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_core.api import Interaction, InteractionContext, InteractionTurn, Message
from agentrl_core.api.message_parts import text_of
from agentrl_interactions_basic.config import SimulatedUserConfig

_FIELD = re.compile(r"\{(\w+)\}")


class SimulatedUser(Interaction):
    """Replies as the user whom ``instructions`` describe, until that user writes ``done`` or has replied enough.

    The model reads the instructions as its system prompt and the conversation from the user's side: what the policy
    said as messages of the other party, and what the user said as its own. Tools, their results and the policy's system
    prompt stay hidden. It gives no reward; reward functions see the whole conversation.

    Raises:
        ValueError: the row lacks a field of the instructions, or the model had nothing to say: ``env_error``.
    """

    config: SimulatedUserConfig

    def __init__(self, config: SimulatedUserConfig, context: InteractionContext) -> None:
        super().__init__(config, context)
        self._engine = context.engines[config.engine]
        self._instructions: dict[str, str] = {}
        self._replies: dict[str, int] = {}

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        missing = sorted(set(_FIELD.findall(self.config.instructions)) - kwargs.keys())
        if missing:
            raise ValueError(
                f"interaction {self.context.name!r}: extra_info.interaction_kwargs of the row has no "
                f"{', '.join(missing)}, which the instructions ask for; it has {', '.join(sorted(kwargs)) or 'nothing'}"
            )
        filled = _FIELD.sub(lambda found: str(kwargs[found[1]]), self.config.instructions)
        self._instructions[instance_id], self._replies[instance_id] = filled, 0

    async def generate_response(
        self, instance_id: str, messages: Sequence[dict[str, Any]], **kwargs: Any
    ) -> InteractionTurn:
        config = self.config
        if self._replies[instance_id] >= config.max_replies:
            return InteractionTurn(terminate=True, text="")
        self._replies[instance_id] += 1
        asked = [{"role": "system", "content": self._instructions[instance_id]}, *_from_the_other_side(messages)]
        for retry in range(config.retries + 1):
            # Greedy, it would say nothing again.
            temperature = max(config.temperature, 1.0) if retry else config.temperature
            reply = await self._engine.chat(asked, temperature=temperature, max_tokens=config.max_tokens)
            text, done, _ = reply.partition(config.done)
            if done or text.strip():
                return InteractionTurn(terminate=bool(done), text=text.strip())
        raise ValueError(
            f"interaction {self.context.name!r}: the engine {config.engine!r} gave {config.retries + 1} empty replies"
        )

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._instructions.pop(instance_id, None)
        self._replies.pop(instance_id, None)


def _from_the_other_side(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """What policy and user said, with the roles swapped. Neighbouring messages of a party become one."""
    sides = {"user": "assistant", "assistant": "user"}
    swapped: list[Message] = []
    for message in messages:
        role, text = sides.get(message["role"]), text_of(message).strip()
        if role is None or not text:
            continue
        if swapped and swapped[-1]["role"] == role:
            swapped[-1]["content"] += f"\n\n{text}"
        else:
            swapped.append({"role": role, "content": text})
    return swapped
