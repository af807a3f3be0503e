import asyncio
import random

from agentrl_core.api import Environment, Episode, InteractionTurn, RewardResult
from agentrl_testing.contracts import EnvironmentCase, EnvironmentContract


class Sum(Episode):
    def __init__(self, a, b):
        self.a, self.b, self.turns = a, b, 0
        self.messages = [{"role": "user", "content": f"{a} + {b}?"}]

    async def reply(self, messages):
        self.turns += 1
        await asyncio.sleep(0)
        return InteractionTurn(self.turns > 1, f"turn {self.turns}")

    async def score(self, trajectory):
        return RewardResult(float(trajectory.last_text == str(self.a + self.b)))


class Good(Environment):
    def tasks(self, split):
        return [{"index": index} for index in range(5)]

    async def open(self, task, seed):
        rng = random.Random(f"{task['index']} {seed}")
        return Sum(rng.randint(10, 99), rng.randint(10, 99))


class NotRepeatable(Good):
    async def open(self, task, seed):
        return Sum(random.randint(10, 99), 10)


class TasksChange(Good):
    def tasks(self, split):
        return [{"index": random.random()}]


class NoTasks(Good):
    def tasks(self, split):
        return []


class NotJson(Good):
    def tasks(self, split):
        return [{"index": {1, 2}}]


class Shared(Good):
    def __init__(self, config, context):
        super().__init__(config, context)
        self.episode = Sum(1, 2)

    async def open(self, task, seed):
        return self.episode


class Tells(Good):
    async def open(self, task, seed):
        episode = await super().open(task, seed)
        episode.messages[0]["content"] += f" (it is {episode.a + episode.b})"
        return episode


class Generous(Good):
    async def open(self, task, seed):
        episode = await super().open(task, seed)
        episode.score = self.score
        return episode

    async def score(self, trajectory):
        return 1.0


class Stingy(Generous):
    async def score(self, trajectory):
        return 0.0


class CloseRaises(Good):
    async def open(self, task, seed):
        episode = await super().open(task, seed)
        episode.close = self.refuse
        return episode

    async def refuse(self):
        raise RuntimeError("closed twice?")


class EditsMessages(Good):
    async def open(self, task, seed):
        episode = await super().open(task, seed)
        episode.reply = self.edit
        return episode

    async def edit(self, messages):
        messages.clear()
        return InteractionTurn(True, "")


def solve(task, seed, messages):
    a, _, b = messages[-1]["content"].removesuffix("?").split(" ")[:3]
    return [str(int(a) + int(b))]


def answer(task, seed):
    rng = random.Random(f"{task['index']} {seed}")
    return str(rng.randint(10, 99) + rng.randint(10, 99))


def case_of(spec, cls, **fields):
    return EnvironmentCase(spec("environment", cls), **{"oracle": solve, "answer": answer, **fields})


def test_a_right_environment_passes(spec) -> None:
    case = case_of(spec, Good)
    for name in (name for name in dir(EnvironmentContract) if name.startswith("test_")):
        getattr(EnvironmentContract(), name)(case)


def test_every_check_catches_a_broken_environment(spec, catches) -> None:
    def case(cls, **fields):
        return case_of(spec, cls, **fields)

    catches(
        EnvironmentContract,
        {
            "test_tasks_are_the_same_every_time": [case(TasksChange), case(NoTasks), case(NotJson)],
            "test_same_task_and_seed_give_the_same_messages": [case(NotRepeatable)],
            "test_episodes_do_not_share_state": [
                case(Shared, oracle=None, moves=["a", "b", "c"]),
                case(EditsMessages, oracle=None),
            ],
            "test_the_answer_is_not_in_the_prompt": [case(Tells)],
            "test_the_oracle_scores_high_and_silence_low": [case(Generous), case(Stingy)],
            "test_close_works_in_whatever_state": [case(CloseRaises)],
        },
    )
