"""The contract of agent loops, run in the real session over a policy that speaks by script."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from agentrl_core.api import (
    AgentLoopOutput,
    EngineError,
    Interaction,
    InteractionContext,
    InteractionTurn,
    Message,
    Status,
    Termination,
)
from agentrl_core.api.config import NoConfig
from agentrl_core.rollout.worker import classify
from agentrl_testing.contracts.case import PluginCase, PluginContract, needs, run
from agentrl_testing.contracts.scripted_session import LoopRun, Request, tool_call


@dataclass(kw_only=True)
class AgentLoopCase(PluginCase):
    """An agent loop under test.

    Args:
        turns: what the policy says, turn by turn; the last one again after that.
        raw_prompt: the row's messages.
        row: further fields of the dataset row.
    """

    turns: Sequence[str] = ("The answer is 4.",)
    raw_prompt: Sequence[Message] = ({"role": "user", "content": "What is 2 + 2?"},)
    row: Mapping[str, Any] = field(default_factory=dict)

    def world(self, turns: Sequence[str] = (), **fields: Any) -> LoopRun:
        """The loop in its world."""
        return LoopRun(self.build, turns or self.turns, **fields)

    async def alone(self, world: LoopRun, **fields: Any) -> list[AgentLoopOutput]:
        """One trajectory, and nothing after it."""
        try:
            return await world.trajectory(self.raw_prompt, **fields, **self.row)
        finally:
            await world.close()


class Partner(Interaction):
    """Asks once more, then ends the conversation."""

    def __init__(self) -> None:
        super().__init__(NoConfig(), InteractionContext("partner"))
        self.asked: dict[str, int] = {}

    async def generate_response(
        self, instance_id: str, messages: Sequence[dict[str, Any]], **kwargs: Any
    ) -> InteractionTurn:
        self.asked[instance_id] = self.asked.get(instance_id, 0) + 1
        return InteractionTurn(self.asked[instance_id] > 1, "Are you sure about that?", 0.5)


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def broken(a: int) -> int:
    """Fails."""
    raise ValueError("out of order")


class AgentLoopContract(PluginContract):
    """What every agent loop must do."""

    kind = "agent_loop"

    def test_rows_hold_exactly_what_was_sampled(self, plugin: AgentLoopCase) -> None:
        """Every id with mask 1 was sampled, in order, with its log-prob and version; the lists are equally long."""
        world = plugin.world()
        outputs = run(plugin.alone(world))
        check_rows(outputs, world.policy.requests)
        assert outputs[-1].termination.status is Status.TRAINED, (
            f"an ordinary conversation ended with {outputs[-1].termination}"
        )
        assert any(any(output.response_mask) for output in outputs), "nothing that was sampled is trained"

    def test_each_turn_begins_with_the_ids_of_the_turn_before(self, plugin: AgentLoopCase) -> None:
        """Token in, token out: nothing is decoded and encoded again."""
        world = plugin.world()
        run(plugin.alone(world))
        check_prefixes(world.policy.requests)

    def test_sampling_parameters_reach_the_engine(self, plugin: AgentLoopCase) -> None:
        """Temperature and ``max_tokens`` are the run's."""
        world = plugin.world()
        run(plugin.alone(world, sampling={"temperature": 0.625, "max_tokens": 50}))
        assert world.policy.requests, "the loop asked for nothing"
        for request in world.policy.requests:
            assert request.params.temperature == 0.625, f"the temperature was {request.params.temperature}, not 0.625"
            assert request.params.max_tokens <= 50, f"max_tokens was {request.params.max_tokens}, the limit 50"

    @pytest.mark.parametrize("budget", [1, 3, 20])
    def test_the_budget_is_kept(self, plugin: AgentLoopCase, budget: int) -> None:
        """A conversation that does not fit ends with ``length``, is trained, and asks for no more than is left."""
        world = plugin.world(["word " * 50], max_response_length=budget)
        outputs = run(plugin.alone(world))
        check_rows(outputs, world.policy.requests)
        for output in outputs:
            assert len(output.response_ids) <= budget, f"{len(output.response_ids)} tokens with a budget of {budget}"
        assert outputs[-1].termination is Termination.LENGTH, f"the end was {outputs[-1].termination}, not length"

    def test_an_engine_failure_is_not_an_answer(self, plugin: AgentLoopCase) -> None:
        """It is raised, or the rows are not trained; the trajectory is then tried again."""
        try:
            outputs = run(plugin.alone(plugin.world(policy_fields={"fails": True})))
        except EngineError:
            return
        except Exception as error:
            ended = classify(error)
            raise AssertionError(f"an engine failure became {type(error).__name__} ({ended}): let it pass") from error
        assert outputs[-1].termination.status is not Status.TRAINED, (
            f"an engine failure ended with {outputs[-1].termination}"
        )

    def test_an_aborted_request_is_not_trained(self, plugin: AgentLoopCase) -> None:
        """What an abort leaves is half an answer."""
        try:
            outputs = run(plugin.alone(plugin.world(policy_fields={"finish_reason": "abort"})))
        except Exception:  # noqa: BLE001 - a loop may raise: the worker does not train it
            return
        ended = outputs[-1].termination
        assert ended.status is not Status.TRAINED, (
            f"an aborted request ended with {ended}: return turn.termination where it is the end"
        )

    def test_a_cancelled_trajectory_ends(self, plugin: AgentLoopCase) -> None:
        """Deadlines are cancellations: a loop that swallows them hangs the step."""

        async def main() -> None:
            world = plugin.world(policy_fields={"hangs": True}, tools={"add": add})
            task = asyncio.ensure_future(plugin.alone(world))
            waiting = asyncio.ensure_future(world.policy.waiting.wait())
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            task.cancel()
            await asyncio.wait({task}, timeout=20)
            assert task.done(), "20 s after its cancellation the loop still runs"
            assert task.cancelled() or task.exception() is not None, "the loop swallowed its cancellation"
            for host in world.hosts.values():
                assert sorted(host.opened) == sorted(host.released), "a tool was created and not released"

        run(main())

    def test_trajectories_do_not_share_state(self, plugin: AgentLoopCase) -> None:
        """One loop object runs many at once."""

        async def main() -> None:
            alone = await plugin.alone(plugin.world())
            world = plugin.world()
            try:
                together = await asyncio.gather(
                    *(world.trajectory(plugin.raw_prompt, number, **plugin.row) for number in range(6))
                )
            finally:
                await world.close()
            for outputs in together:
                assert [o.response_ids for o in outputs] == [o.response_ids for o in alone], (
                    "a trajectory among others differs from the same one alone"
                )

        run(main())

    def test_tools_run_and_their_answers_are_context(self, plugin: AgentLoopCase) -> None:
        """A call reaches the tool; the model reads the answer, and nobody trains on it."""
        needs(plugin, "tools")
        world = plugin.world([tool_call("add", {"a": 2, "b": 40}), "It is 42."], tools={"add": add})
        outputs = run(plugin.alone(world))
        check_rows(outputs, world.policy.requests)
        check_prefixes(world.policy.requests)
        assert len(world.policy.requests) >= 2, "the loop ended after a turn with a tool call"
        seen = world.renderer.decode(world.policy.requests[1].prompt_ids)
        assert "42" in seen.split("<tool_call>")[-1], "the model was not shown the tool's answer"
        (host,) = world.hosts.values()
        assert len(host.opened) == 1, f"the tool was created {len(host.opened)} times in one trajectory"

    @pytest.mark.parametrize(
        "call",
        [
            pytest.param(tool_call("broken", {"a": 1}), id="tool-raises"),
            pytest.param(tool_call("missing", {"a": 1}), id="unknown-tool"),
            pytest.param(tool_call("add", {"x": 1}), id="wrong-arguments"),
            pytest.param("<tool_call>\n{\"name\": \"add\", \"argu", id="cut-off-call"),
        ],
    )  # fmt: skip
    def test_a_bad_call_is_an_observation(self, plugin: AgentLoopCase, call: str) -> None:
        """The trajectory goes on or ends as trained; it never raises."""
        needs(plugin, "tools")
        world = plugin.world([call, "Then I do not know."], tools={"add": add, "broken": broken})
        outputs = run(plugin.alone(world))
        check_rows(outputs, world.policy.requests)
        assert outputs[-1].termination.status is Status.TRAINED, (
            f"a bad call of the model ended with {outputs[-1].termination}"
        )

    def test_endless_bad_calls_end(self, plugin: AgentLoopCase) -> None:
        """A policy that only writes bad calls meets a limit or the budget."""
        needs(plugin, "tools")
        world = plugin.world([tool_call("missing", {"a": 1})], tools={"add": add}, max_response_length=3000)
        outputs = run(plugin.alone(world))
        assert outputs[-1].termination.status is Status.TRAINED, (
            f"endless bad calls ended with {outputs[-1].termination}"
        )

    def test_interactions_answer(self, plugin: AgentLoopCase) -> None:
        """What the partner says is in the next prompt, with mask 0, and its verdict ends the conversation."""
        needs(plugin, "interactions")
        world = plugin.world(["It is 4.", "Yes."], interaction=Partner())
        outputs = run(plugin.alone(world))
        check_rows(outputs, world.policy.requests)
        check_prefixes(world.policy.requests)
        assert len(world.policy.requests) == 2, f"{len(world.policy.requests)} turns with a partner who asks once more"
        seen = world.renderer.decode(world.policy.requests[1].prompt_ids)
        assert "Are you sure about that?" in seen, "the model was not shown the partner's words"


def check_rows(outputs: Sequence[AgentLoopOutput], requests: Sequence[Request]) -> None:
    """What is trained is what was sampled."""
    for output in outputs:
        count = len(output.response_ids)
        assert set(output.response_mask) <= {0, 1}, "response_mask holds something else than 0 and 1"
        assert output.response_logprobs is not None, "the engine returned log-probs, the row has none"
        lengths = {len(output.response_mask), len(output.response_logprobs)}
        assert lengths == {count}, f"{count} ids with lists of other lengths: {lengths}"
        sampled = [position for position, bit in enumerate(output.response_mask) if bit]
        ids = [output.response_ids[position] for position in sampled]
        log_probs = [output.response_logprobs[position] for position in sampled]
        start = 0
        for request in requests:
            end = start + len(request.output.token_ids)
            if ids[start:end] == request.output.token_ids and log_probs[start:end] == request.output.log_probs:
                start = end
        assert start == len(ids), (
            f"of {len(ids)} ids with mask 1 only the first {start} are what the engine sampled, with its log-probs: "
            "drive the session's trajectory, and do not build the lists by hand"
        )


def check_prefixes(requests: Sequence[Request]) -> None:
    """Within a branch each prompt begins with everything so far."""
    before: dict[str, list[int]] = {}
    for request in requests:
        known = before.get(request.request_id, [])
        assert request.prompt_ids[: len(known)] == known, (
            "the prompt of a turn does not begin with the exact ids of the turn before: text was encoded again"
        )
        before[request.request_id] = request.prompt_ids + request.output.token_ids
