"""The single-player games of textarena as one environment."""

import asyncio
import difflib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from textarena.envs.registration import ENV_REGISTRY

from agentrl_core.api import (
    ConfigError,
    Environment,
    EnvironmentContext,
    Episode,
    InteractionTurn,
    RewardResult,
    RewardTrajectory,
)
from agentrl_core.api.dataset import Split
from agentrl_env_textarena.config import GameConfig, TextArenaConfig
from agentrl_env_textarena.game import Game

T = TypeVar("T")

VALIDATION_SEED = 1_000_000_007
"""Added to a fixed seed, so that the splits have other games."""

WORKING = (
    "2048-v0", "Bandit-v0", "Blackjack-v0", "Countdown-v0", "Crosswords-v0", "Cryptarithm-v0", "FifteenPuzzle-v0",
    "FrozenLake-v0", "GuessTheNumber-v0", "LightsOut-v0", "LogicPuzzle-v0", "Mastermind-v0", "Minesweeper-v0",
    "PegJump-v0", "RushHour-v0", "Secretary-v0", "Set-v0", "Slitherlink-v0", "Sokoban-v0", "Sudoku-v0",
    "ThreeCardMonte-v0", "TowerOfHanoi-v0",
)  # fmt: skip
"""Games that need nothing but the package; most have variants, such as TowerOfHanoi-v0-hard."""


class TextArena(Environment):
    """A weighted mixture of games; ``data_source`` is the game's id.

    Raises:
        ConfigError: an unknown game, one that does not work here, or options that it refuses.
    """

    config: TextArenaConfig

    def __init__(self, config: TextArenaConfig, context: EnvironmentContext) -> None:
        super().__init__(config, context)
        if not config.games:
            raise ConfigError(
                f"environment {context.name!r}: games is empty; name one, such as {{GuessTheNumber-v0: {{}}}}"
            )
        for name, options in config.games.items():
            self._check(name, options)
        # Games run one at a time, see Game. Waiting for each other here leaves asyncio's threads to others.
        self._thread = ThreadPoolExecutor(1, "textarena")

    def _check(self, name: str, options: GameConfig) -> None:
        where = f"environment {self.context.name!r}: games.{name}"
        if name not in ENV_REGISTRY:
            close = difflib.get_close_matches(name, ENV_REGISTRY, 3)
            hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(WORKING)}"
            raise ConfigError(f"{where}: textarena has no such game; {hint}")
        try:
            Game(name, options.config, 0)
        except Exception as error:
            raise ConfigError(f"{where}: {_reason(error)}") from error

    def tasks(self, split: Split) -> Sequence[Mapping[str, Any]]:
        total = self.config.tasks if split == "train" else self.config.validation_tasks
        whole = sum(options.weight for options in self.config.games.values())
        rows: list[Mapping[str, Any]] = []
        weight = 0.0
        for name, options in self.config.games.items():
            weight += options.weight
            rows += [
                {"data_source": name, "extra_info": {"split": split, "index": index}}
                for index in range(len(rows), round(total * weight / whole))
            ]
        return rows

    async def open(self, task: Mapping[str, Any], seed: int) -> Episode:
        name, place = task["data_source"], task["extra_info"]
        if name not in self.config.games:
            raise ValueError(f"the game {name!r} is not one of {', '.join(self.config.games)}")
        if self.config.seed is not None:
            seed = self.config.seed + place["index"] + (VALIDATION_SEED if place["split"] == "validation" else 0)
        options = self.config.games[name].config

        def begin() -> tuple[Game, str]:
            game = Game(name, options, seed)
            return game, game.news()

        game, text = await self.run(begin)
        return _Play(self, game, text)

    async def run(self, work: Callable[[], T]) -> T:
        """Run blocking work of a game in the games' thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _reason(error: Exception) -> str:
    """Why a game cannot be played, and what to do."""
    others = f"Or choose a game that needs nothing more: {', '.join(WORKING)}"
    if isinstance(error, LookupError) and "nltk" in str(error).lower():
        return (
            "the game needs word lists of nltk, which are not installed. Run `python -m nltk.downloader words "
            f"averaged_perceptron_tagger_eng` where there is a network. {others}"
        )
    if isinstance(error, SyntaxError):
        return (
            f"textarena's code for this game does not compile on Python {sys.version_info[0]}.{sys.version_info[1]} "
            f"({error.msg}, line {error.lineno}). Use a Python on which it does. {others}"
        )
    if isinstance(error, TypeError) and "argument" in str(error):
        return f"config does not fit: {error}"
    if isinstance(error, AssertionError) and "player" in str(error).lower():
        return f"only single-player games can be played: {error}. {others}"
    return f"the game cannot begin: {type(error).__name__}: {error}. {others}"


class _Play(Episode):
    def __init__(self, environment: TextArena, game: Game, text: str) -> None:
        self._environment = environment
        self._config = environment.config
        self._game = game
        self._turns = 0
        self.messages = [{"role": "system", "content": prompt}] if (prompt := self._config.system_prompt) else []
        self.messages += [{"role": "user", "content": text}]

    async def reply(self, messages: Sequence[dict[str, Any]]) -> InteractionTurn:
        move = _tagged(messages[-1]["content"], self._config.answer_tag)
        self._turns += 1

        def step() -> tuple[bool, str]:
            return self._game.step(move), self._game.news()

        done, text = await self._environment.run(step)
        if done or self._turns == self._config.max_turns:
            return InteractionTurn(terminate=True, text="")
        return InteractionTurn(terminate=False, text=text)

    async def score(self, trajectory: RewardTrajectory) -> RewardResult:
        """The game's reward. One that is no number counts as 0 and in ``reward_errors``."""
        reward, info = self._game.result()
        parts = {
            "finished": float(reward is not None),
            "invalid_move": float(info["invalid_move"]),
            "turns": float(self._turns),
        }
        if reward is None:
            return RewardResult(self._config.unfinished, components=parts)
        if not math.isfinite(reward):
            return RewardResult(0.0, metrics={"reward_errors": 1.0}, components=parts)
        return RewardResult(reward, components=parts)


def _tagged(text: str, tag: str | None) -> str:
    """What stands in the last ``<tag>…</tag>``; the whole text without a tag."""
    if tag is None:
        return text
    end = text.rfind(f"</{tag}>")
    begin = text.rfind(f"<{tag}>", 0, max(end, 0))
    return text[begin + len(tag) + 2 : end].strip() if begin >= 0 else ""
