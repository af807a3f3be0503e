import asyncio

from agentrl_core.api import AgentLoopBase, AgentLoopOutput, EngineError, Termination
from agentrl_testing.contracts import AgentLoopCase, AgentLoopContract


class Simple(AgentLoopBase):
    """One turn; right but for what a subclass breaks."""

    async def run(self, sampling_params, *, session, raw_prompt, **row):
        trajectory = session.trajectory(raw_prompt)
        turn = await trajectory.generate(sampling_params)
        return trajectory.finish(turn.termination)


class Reencodes(AgentLoopBase):
    """Builds its lists from texts."""

    async def run(self, sampling_params, *, session, raw_prompt, **row):
        trajectory = session.trajectory(raw_prompt)
        turn = await trajectory.generate(sampling_params)
        ids = self.context.renderer.encode(turn.text.upper())
        return AgentLoopOutput([1], ids, [1] * len(ids), [-1.0] * len(ids), Termination.COMPLETED)


class StartsAgain(AgentLoopBase):
    """Renders the whole conversation anew in the second turn, under the same request."""

    async def run(self, sampling_params, *, session, raw_prompt, **row):
        trajectory = session.trajectory(raw_prompt)
        await trajectory.generate(sampling_params)
        prompt = self.context.renderer.encode("something else")
        await session._env.servers.generate(session._key.request_id, prompt, _params())
        return trajectory.finish(Termination.COMPLETED)


def _params():
    from agentrl_core.api import SamplingParams

    return SamplingParams(max_tokens=5)


class OwnTemperature(Simple):
    async def run(self, sampling_params, **fields):
        return await super().run({"temperature": 0.1}, **fields)


class Overdraws(AgentLoopBase):
    """Calls what was cut off complete."""

    async def run(self, sampling_params, *, session, raw_prompt, **row):
        trajectory = session.trajectory(raw_prompt)
        await trajectory.generate(sampling_params)
        return trajectory.finish(Termination.COMPLETED)


class Swallows(Simple):
    async def run(self, sampling_params, *, session, raw_prompt, **row):
        try:
            return await super().run(sampling_params, session=session, raw_prompt=raw_prompt)
        except EngineError:
            return session.trajectory(raw_prompt).finish(Termination.COMPLETED)


class Immortal(Simple):
    async def run(self, sampling_params, *, session, raw_prompt, **row):
        try:
            return await super().run(sampling_params, session=session, raw_prompt=raw_prompt)
        except asyncio.CancelledError:
            return session.trajectory(raw_prompt).finish(Termination.COMPLETED)


class Keeps(AgentLoopBase):
    """Talks on in the conversation of an earlier trajectory."""

    said = ""

    async def run(self, sampling_params, *, session, raw_prompt, **row):
        trajectory = session.trajectory(raw_prompt)
        self.said += "!"
        turn = await trajectory.generate({**sampling_params, "max_tokens": len(self.said)})
        return trajectory.finish(turn.termination)


class IgnoresTools(Simple):
    """Declares tools and interactions, and ends after one turn."""


class BadCallsRaise(AgentLoopBase):
    async def run(self, sampling_params, *, session, raw_prompt, **row):
        schemas = await session.open_tools()
        trajectory = session.trajectory(raw_prompt, tools=schemas)
        turn = await trajectory.generate(sampling_params)
        while turn.tool_calls:
            outcomes = [await session.call_tool(call) for call in turn.tool_calls]
            if any(outcome.failed for outcome in outcomes):
                raise ValueError("a tool failed")
            trajectory.add_messages([outcome.message for outcome in outcomes])
            turn = await trajectory.generate(sampling_params)
        if turn.parse_errors:
            raise ValueError("a call was not readable")
        return trajectory.finish(turn.termination)


def test_every_check_catches_a_broken_loop(spec, catches) -> None:
    def case(cls, *capabilities):
        return AgentLoopCase(spec("agent_loop", cls, *capabilities))

    catches(
        AgentLoopContract,
        {
            "test_rows_hold_exactly_what_was_sampled": [case(Reencodes)],
            "test_each_turn_begins_with_the_ids_of_the_turn_before": [case(StartsAgain)],
            "test_sampling_parameters_reach_the_engine": [case(OwnTemperature)],
            "test_the_budget_is_kept": [case(Overdraws)],
            "test_an_engine_failure_is_not_an_answer": [case(Swallows)],
            "test_an_aborted_request_is_not_trained": [case(Overdraws)],
            "test_a_cancelled_trajectory_ends": [case(Immortal)],
            "test_trajectories_do_not_share_state": [case(Keeps)],
            "test_tools_run_and_their_answers_are_context": [case(IgnoresTools, "tools")],
            "test_a_bad_call_is_an_observation": [case(BadCallsRaise, "tools")],
            "test_endless_bad_calls_end": [case(BadCallsRaise, "tools")],
            "test_interactions_answer": [case(IgnoresTools, "interactions")],
        },
    )
