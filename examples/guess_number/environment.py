"""Guess a number: an environment in one file. A guess earns the share of the numbers that can still be found."""

import re
from random import Random

from agentrl_core.api import Environment, Episode, InteractionTurn, RewardResult

LARGEST, GUESSES = 63, 6


class GuessNumber(Environment):
    def tasks(self, split):
        return [{}] * 10_000 if split == "train" else []

    async def open(self, task, seed):
        return Game(Random(seed).randint(0, LARGEST))


class Game(Episode):
    def __init__(self, secret):
        self.secret, self.low, self.high, self.guesses, self.found = secret, 0, LARGEST, 0, False
        self.messages = [{"role": "user", "content": f"guess 0 {LARGEST}"}]

    async def reply(self, messages):
        said = re.fullmatch(r"\d{1,6}", messages[-1]["content"].strip())
        guess = int(said[0]) if said else -1
        self.guesses += 1
        self.found, reward = guess == self.secret, 0.0
        if self.low <= guess <= self.high:
            most = 2 ** (GUESSES - self.guesses) - 1  # numbers that the guesses left can tell apart
            findable = 1 + min(guess - self.low, most) + min(self.high - guess, most)
            reward = findable / (self.high - self.low + 1) / GUESSES
            self.low, self.high = (guess + 1, self.high) if guess < self.secret else (self.low, guess - 1)
        hint = "higher" if guess < self.secret else "lower"
        return InteractionTurn(self.found or self.guesses == GUESSES, f"{hint} {self.low} {self.high}", reward)

    async def score(self, trajectory):
        return RewardResult(0.0, metrics={"found": float(self.found), "guesses": float(self.guesses)})
