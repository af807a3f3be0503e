"""Mazes of eight rooms. Each room has four doors; one leads on, the others out of the maze."""

from random import Random

from agentrl_core.api import Environment, Episode, InteractionTurn, RewardResult

DOORS = ("north", "east", "south", "west")
ROOMS = "ABCDEFGH"
MAZES = [Random(number).choices(DOORS, k=len(ROOMS)) for number in range(4)]
"""The door that leads on, by maze and room."""


class Maze(Environment):
    """Each room passed is a reward of its turn."""

    by_turn = True

    def tasks(self, split):
        return [{"maze": number} for number in range(len(MAZES))] if split == "train" else []

    async def open(self, task, seed):
        return Walk(task["maze"], self.by_turn)


class OutcomeMaze(Maze):
    """One reward, for the way through the whole maze."""

    by_turn = False


class Walk(Episode):
    def __init__(self, maze, by_turn):
        self.doors, self.by_turn, self.passed = MAZES[maze], by_turn, 0
        self.messages = [{"role": "user", "content": f"maze {maze} room A"}]

    async def reply(self, messages):
        right = messages[-1]["content"].strip() == self.doors[self.passed]
        self.passed += right
        over = not right or self.passed == len(ROOMS)
        text = "" if over else f"room {ROOMS[self.passed]}"
        return InteractionTurn(over, text, right / len(ROOMS) if self.by_turn else None)

    async def score(self, trajectory):
        passed = {"rooms": float(self.passed), "solved": float(self.passed == len(ROOMS))}
        return RewardResult(0.0 if self.by_turn else passed["solved"], components=passed)
