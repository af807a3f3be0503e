"""The contract of environments."""

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl_core.api import (
    Environment,
    EnvironmentContext,
    InteractionTurn,
    Message,
    RewardTrajectory,
    ToolResult,
)
from agentrl_core.hosting.environments import HostedEnvironment, HostedEpisode
from agentrl_core.hosting.tools import check_result
from agentrl_testing.contracts.case import PluginCase, PluginContract, run

SEEDS = (0, 1, 2**62 + 5)

Move = str | tuple[str, dict[str, Any]]
"""A turn of the policy: a text, or the name and the arguments of a tool call."""

Oracle = Callable[[Mapping[str, Any], int, Sequence[Message]], Sequence[Move]]
"""``oracle(task, seed, messages)``: turns that solve a task."""


@dataclass(kw_only=True)
class EnvironmentCase(PluginCase):
    """An environment under test.

    Args:
        tasks: which tasks are tried, by their number in ``train``; or the tasks, where rows of data files are.
        moves: turns of a policy that knows nothing, for tasks without an oracle.
        oracle: makes turns that solve a task; None: unknown.
        answer: the answer to a task and a seed, which the prompt must not hold; None: unknown.
        high, low: the oracle's score is at least ``high``, and that of an empty answer at most ``low``.
    """

    tasks: Sequence[int | Mapping[str, Any]] = (0, 1)
    moves: Sequence[Move] = ("I do not know.",)
    oracle: Oracle | None = None
    answer: Callable[[Mapping[str, Any], int], str] | None = None
    high: float = 0.9
    low: float = 0.1

    def make(self) -> Environment:
        """The environment as a worker builds it."""
        environment: Environment = self.build(EnvironmentContext(self.spec.name))
        return environment

    def hosted(self) -> HostedEnvironment:
        """The environment as a session uses it."""
        return HostedEnvironment(_Slot(self.spec.name, self.make()), 0)  # type: ignore[arg-type]

    def tried(self, environment: Environment) -> list[Mapping[str, Any]]:
        """The tasks that are tried."""
        own = environment.tasks("train") or ()
        return [own[each] if isinstance(each, int) else each for each in self.tasks]


@dataclass
class _Slot:
    registered_name: str
    environment: Environment
    timeout: float = 30.0

    def build(self, context: EnvironmentContext) -> Environment:
        return self.environment


@dataclass
class Played:
    """An episode that was played: what it said, and its score."""

    messages: list[Message]
    answers: list[str] = field(default_factory=list)
    score: float = 0.0


async def play(case: EnvironmentCase, hosted: HostedEnvironment, task: Any, seed: int, moves: Sequence[Move]) -> Played:
    """Play one episode as a session does, and close it.

    Where several agents act, the moves are those of all of them, and the score is that of the agent that begins.
    """
    episode = await hosted.open(task, seed)
    try:
        played = Played(episode.messages)
        agent, earned, spoken = episode.agent, list[tuple[int, float]](), list[str]()
        talks = {agent: list(episode.messages)}
        for turn, move in enumerate(moves):
            talk = talks[agent]
            talk.append({"role": "assistant", "content": move if isinstance(move, str) else ""})
            text, reward, done, following = await _answer(episode, move, talk)
            if agent == episode.agent:
                spoken += [move] if isinstance(move, str) else []
                earned += [(turn, float(reward))] if reward is not None else []
            agent = agent if following is None else following
            said = {"role": "user" if isinstance(move, str) else "tool", "content": text}
            talks.setdefault(agent, []).append(said)
            played.answers.append(text)
            if done:
                break
            await asyncio.sleep(0)
        seen = RewardTrajectory(
            agent=episode.agent,
            messages=talks[episode.agent],
            model_text="\n".join(spoken),
            last_text=spoken[-1] if spoken else "",
            full_text="",
            extra_info=task.get("extra_info") or {},
            row=dict(task),
        )
        played.score = (await episode.score(seen, earned)).score
        return played
    finally:
        await episode.close()


async def _answer(
    episode: HostedEpisode, move: Move, talk: list[Message]
) -> tuple[str, float | None, bool, str | None]:
    if isinstance(move, str):
        given = copy.deepcopy(talk)
        turn = await episode.reply(given)
        assert isinstance(turn, InteractionTurn), f"reply returned a {type(turn).__name__}, not an InteractionTurn"
        assert given == talk, "reply changed the messages, which are the trajectory's record"
        return turn.text, turn.reward, turn.terminate, turn.agent
    name, arguments = move
    result = await episode.execute("", name, copy.deepcopy(arguments), {})
    assert isinstance(result, ToolResult), f"call returned a {type(result).__name__}, not a ToolResult"
    checked = check_result(name, result)
    return checked.response.text, checked.reward, checked.done, None


def moves_of(case: EnvironmentCase, task: Mapping[str, Any], seed: int, messages: Sequence[Message]) -> Sequence[Move]:
    """The turns that are played: those of the oracle where there is one."""
    return case.oracle(task, seed, messages) if case.oracle is not None else case.moves


async def first_messages(hosted: HostedEnvironment, task: Mapping[str, Any], seed: int) -> list[Message]:
    """What the policy is shown first."""
    episode = await hosted.open(task, seed)
    await episode.close()
    return episode.messages


class EnvironmentContract(PluginContract):
    """What every environment must do."""

    kind = "environment"

    def test_tasks_are_the_same_every_time(self, plugin: EnvironmentCase) -> None:
        """Rows of JSON values, by index, also in an environment that was built again."""
        for split in ("train", "validation"):
            own, again = plugin.make().tasks(split), plugin.make().tasks(split)
            assert (own is None) == (again is None), f"tasks({split!r}) is None one time and not the next"
            if own is None or again is None:
                assert all(not isinstance(each, int) for each in plugin.tasks), (
                    "tasks() is None: give the case rows of a data file as `tasks`"
                )
                continue
            assert split == "validation" or len(own) > 0, "tasks('train') is empty"
            for index in range(min(len(own), 20)):
                task = own[index]
                assert isinstance(task, Mapping), f"task {index} is a {type(task).__name__}, not a mapping"
                text = json.dumps(task, sort_keys=True)
                assert text == json.dumps(again[index], sort_keys=True), f"{split} task {index} differs the next time"

    def test_same_task_and_seed_give_the_same_messages(self, plugin: EnvironmentCase) -> None:
        """The samples of a prompt are compared with each other, also those of other workers."""

        async def main() -> None:
            one, other = plugin.hosted(), plugin.hosted()
            for task in plugin.tried(one.environment):
                for seed in SEEDS:
                    first = await first_messages(one, task, seed)
                    for hosted in (one, other):
                        again = await first_messages(hosted, task, seed)
                        assert first == again, f"the task {task} with seed {seed} began with {first}, then with {again}"

        run(main())

    def test_episodes_do_not_share_state(self, plugin: EnvironmentCase) -> None:
        """Eight at once get what one alone gets."""

        async def main() -> None:
            hosted = plugin.hosted()
            for task in plugin.tried(hosted.environment):
                moves = moves_of(plugin, task, 1, await first_messages(hosted, task, 1))
                alone = await play(plugin, plugin.hosted(), task, 1, moves)
                together = await asyncio.gather(*(play(plugin, hosted, task, 1, moves) for _ in range(8)))
                assert all(played == alone for played in together), "an episode among others differs from one alone"

        run(main())

    def test_the_answer_is_not_in_the_prompt(self, plugin: EnvironmentCase) -> None:
        """Neither in the messages nor in the schemas of the tools."""
        answer_to = plugin.answer
        if answer_to is None:
            return

        async def main() -> None:
            hosted = plugin.hosted()
            for task in plugin.tried(hosted.environment):
                episode = await hosted.open(task, 1)
                await episode.close()
                shown = json.dumps([episode.messages, list(episode.schemas.values())])
                answer = answer_to(task, 1)
                assert answer and answer not in shown, f"the prompt of {task} holds the answer {answer!r}"

        run(main())

    def test_the_oracle_scores_high_and_silence_low(self, plugin: EnvironmentCase) -> None:
        """A score that nobody reaches, or that everybody gets, teaches nothing."""

        async def main() -> None:
            hosted = plugin.hosted()
            for task in plugin.tried(hosted.environment):
                for seed in SEEDS:
                    empty = await play(plugin, hosted, task, seed, [""])
                    assert empty.score <= plugin.low, f"an empty answer to {task} scored {empty.score}"
                    if plugin.oracle is not None:
                        moves = plugin.oracle(task, seed, await first_messages(hosted, task, seed))
                        best = await play(plugin, hosted, task, seed, moves)
                        assert best.score >= plugin.high, f"the oracle's answer to {task} scored {best.score}"

        run(main())

    def test_close_works_in_whatever_state(self, plugin: EnvironmentCase) -> None:
        """After nothing, and after a start, a call, a reply or a score that was cancelled: nothing hangs or raises."""

        async def main() -> None:
            hosted = plugin.hosted()
            (task, *_) = plugin.tried(hosted.environment)
            messages = await first_messages(hosted, task, 1)
            await cancelled(hosted.open(task, 1))
            moves = moves_of(plugin, task, 1, messages)
            for what in ("score", *moves):
                episode = await hosted.open(task, 1)
                talk: list[Message] = [*messages, {"role": "assistant", "content": str(what)}]
                if what == "score":
                    await cancelled(episode.score(RewardTrajectory(messages, "", "", "", agent=episode.agent), []))
                else:
                    await cancelled(episode.execute("", *what, {}) if isinstance(what, tuple) else episode.reply(talk))
                async with asyncio.timeout(20):
                    await episode.close()
            async with asyncio.timeout(20):
                await hosted.close()

        run(main())


async def cancelled(call: Awaitable[Any]) -> None:
    """Begin a call and cancel it."""
    task = asyncio.ensure_future(call)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=20)
    assert task.done(), "20 s after its cancellation a call still runs: deadlines are cancellations"
