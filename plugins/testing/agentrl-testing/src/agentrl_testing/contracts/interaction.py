"""The contract of interactions."""

import asyncio
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl_core.api import EngineClient, Engines, Interaction, InteractionContext, InteractionTurn, Message
from agentrl_testing.contracts.case import PluginCase, PluginContract, is_number, run


@dataclass(kw_only=True)
class InteractionCase(PluginCase):
    """An interaction under test.

    Args:
        conversations: message lists that end with an assistant's message.
        kwargs: of ``start_interaction``, from the row's ``interaction_kwargs``.
        repeatable: the same conversation in a fresh trajectory gets the same answer.
        engines: stand-ins for the engines that the interaction asks, by name.
    """

    conversations: Sequence[Sequence[Message]]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    repeatable: bool = True
    engines: Mapping[str, EngineClient] = field(default_factory=dict)

    def make(self) -> Interaction:
        """An interaction as a worker builds it."""
        interaction: Interaction = self.build(InteractionContext(self.spec.name, engines=Engines(self.engines)))
        return interaction

    async def whole(self, interaction: Interaction, instance: str) -> list[InteractionTurn]:
        """The answers to all conversations in one trajectory."""
        await interaction.start_interaction(instance, **self.kwargs)
        try:
            return [
                await interaction.generate_response(instance, copy.deepcopy(list(messages)))
                for messages in self.conversations
            ]
        finally:
            await interaction.finalize_interaction(instance)


class InteractionContract(PluginContract):
    """What every interaction must do."""

    kind = "interaction"

    def test_answers_are_turns(self, plugin: InteractionCase) -> None:
        """A verdict, a text, a finite reward or None, finite metrics."""
        for turn in run(plugin.whole(plugin.make(), "a")):
            assert isinstance(turn, InteractionTurn), f"generate_response returned a {type(turn).__name__}"
            assert isinstance(turn.terminate, bool), f"terminate is {turn.terminate!r}, not a bool"
            assert isinstance(turn.text, str), f"the text is {turn.text!r}"
            assert turn.terminate or turn.text, "the conversation goes on, but the answer is empty"
            assert turn.reward is None or is_number(turn.reward), f"the reward {turn.reward!r} is not a finite number"
            bad = {key: value for key, value in turn.metrics.items() if not is_number(value)}
            assert not bad, f"metrics that are not finite numbers: {bad}"

    def test_conversation_is_left_alone(self, plugin: InteractionCase) -> None:
        """The messages are the trajectory's record."""

        async def main() -> None:
            interaction = plugin.make()
            await interaction.start_interaction("a", **plugin.kwargs)
            for messages in plugin.conversations:
                given = copy.deepcopy(list(messages))
                await interaction.generate_response("a", given)
                assert given == list(messages), "generate_response changed the messages"
            await interaction.finalize_interaction("a")

        run(main())

    def test_trajectories_do_not_share_state(self, plugin: InteractionCase) -> None:
        """Eight at once get what one alone gets, and one that starts again starts afresh."""
        if not plugin.repeatable:
            return

        async def main() -> None:
            alone = await plugin.whole(plugin.make(), "alone")
            interaction = plugin.make()
            together = await asyncio.gather(*(plugin.whole(interaction, f"i{number}") for number in range(8)))
            assert all(turns == alone for turns in together), "trajectories at the same time get other answers"
            again = await plugin.whole(interaction, "i0")
            assert again == alone, "a trajectory that starts again after finalize_interaction gets other answers"

        run(main())

    def test_score_is_a_number_or_none(self, plugin: InteractionCase) -> None:
        """``calculate_score`` judges the whole conversation."""

        async def main() -> Any:
            interaction = plugin.make()
            await interaction.start_interaction("a", **plugin.kwargs)
            for messages in plugin.conversations:
                await interaction.generate_response("a", copy.deepcopy(list(messages)))
            score = await interaction.calculate_score("a")
            await interaction.finalize_interaction("a")
            return score

        score = run(main())
        assert score is None or is_number(score), f"calculate_score returned {score!r}, not a finite number or None"

    def test_finalize_works_in_whatever_state(self, plugin: InteractionCase) -> None:
        """Before a start, twice, and after an answer that was cancelled."""

        async def main() -> None:
            interaction = plugin.make()
            await interaction.finalize_interaction("never started")
            await plugin.whole(interaction, "a")
            await interaction.finalize_interaction("a")
            await interaction.start_interaction("b", **plugin.kwargs)
            answer = asyncio.ensure_future(interaction.generate_response("b", list(plugin.conversations[0])))
            await asyncio.sleep(0)
            answer.cancel()
            await asyncio.wait({answer})
            await interaction.finalize_interaction("b")

        run(main())
