"""The games of textarena for one or two players as one environment."""

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

TWO_PLAYERS = (
    "Alquerque-v0", "Battleship-v0", "Breakthrough-v0", "Briscola-v0", "Chopsticks-v0", "ColonelBlotto-v0",
    "ConnectFour-v0", "Crusade-v0", "GameOfPureStrategy-v0", "GermanWhist-v0", "Golf-v0", "HighSociety-v0",
    "IndianPoker-v0", "IteratedMatchingPennies-v0", "IteratedPrisonersDilemma-v0", "IteratedRockPaperScissors-v0",
    "IteratedTwoThirdsAverage-v0", "IteratedUltimatumGame-v0", "KuhnPoker-v0", "LinesOfAction-v0", "MemoryGame-v0",
    "NewRecruit-v0", "Nim-v0", "Othello-v0", "PigDice-v0", "QuantumTicTacToe-v0", "SimpleBlindAuction-v0",
    "SimpleNegotiation-v0", "SimpleTak-v0", "SpiteAndMalice-v0", "Stratego-v0", "Tak-v0", "TicTacToe-v0",
    "TruthAndDeception-v0", "TwoDollar-v0", "UltimateTicTacToe-v0", "WildTicTacToe-v0",
)  # fmt: skip
"""The same for two players."""


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
        self.opponent = None if config.opponent is None else context.engines[config.opponent]
        # Games run one at a time, see Game. Waiting for each other here leaves asyncio's threads to others.
        self._thread = ThreadPoolExecutor(1, "textarena")

    def _check(self, name: str, options: GameConfig) -> None:
        where = f"environment {self.context.name!r}: games.{name}"
        if name not in ENV_REGISTRY:
            close = difflib.get_close_matches(name, ENV_REGISTRY, 3)
            hint = (
                f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join((*WORKING, *TWO_PLAYERS))}"
            )
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
        if game.player is None:
            return _Play(self, game, text)
        if self.opponent is None:
            return _SelfPlay(self, game, text)
        duel = _Duel(self, game, place["index"] % 2)
        await duel.begin(text)
        return duel

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
        return f"only games for one or two players can be played: {error}. {others}"
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
        self._turns += 1
        done, text = await self._step(messages[-1]["content"])
        if done or self._turns == self._config.max_turns:
            return InteractionTurn(terminate=True, text="")
        return InteractionTurn(terminate=False, text=text, agent=self._whose())

    async def _step(self, said: str) -> tuple[bool, str]:
        """Make a move; returns whether the game is over, and what it says to the next player."""
        move = _tagged(said, self._config.answer_tag)

        def step() -> tuple[bool, str]:
            return self._game.step(move), self._game.news()

        return await self._environment.run(step)

    def _whose(self) -> str | None:
        return None

    def _player(self, agent: str) -> int:
        return 0

    async def score(self, trajectory: RewardTrajectory) -> RewardResult:
        """The game's reward. One that is no number counts as 0 and in ``reward_errors``."""
        reward, info = self._game.result(self._player(trajectory.agent))
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


class _SelfPlay(_Play):
    """Both players are agents of the trajectory."""

    def __init__(self, environment: TextArena, game: Game, text: str) -> None:
        super().__init__(environment, game, text)
        self.agent = self._whose()

    def _whose(self) -> str:
        return f"player_{self._game.player}"

    def _player(self, agent: str) -> int:
        return int(agent.removeprefix("player_"))


class _Duel(_Play):
    """An engine plays the other side."""

    def __init__(self, environment: TextArena, game: Game, seat: int) -> None:
        super().__init__(environment, game, "")
        self._seat = seat
        self._talk = self.messages[:-1]

    async def begin(self, text: str) -> None:
        """Let the opponent move first, where it is its turn."""
        done, text = await self._opponent(False, text)
        if done:
            raise ValueError("the opponent ended the game before the policy had a turn")
        self.messages[-1]["content"] = text

    async def _step(self, said: str) -> tuple[bool, str]:
        return await self._opponent(*await super()._step(said))

    async def _opponent(self, done: bool, text: str) -> tuple[bool, str]:
        """The same once the opponent has made its moves."""
        config, engine = self._config, self._environment.opponent
        assert engine is not None, "a duel has an opponent"
        while not done and self._game.player != self._seat:
            self._talk.append({"role": "user", "content": text})
            said = await engine.chat(
                self._talk, temperature=config.opponent_temperature, max_tokens=config.opponent_max_tokens
            )
            self._talk.append({"role": "assistant", "content": said})
            done, text = await super()._step(said)
        return done, text

    def _player(self, agent: str) -> int:
        return self._seat


def _tagged(text: str, tag: str | None) -> str:
    """What stands in the last ``<tag>…</tag>``; the whole text without a tag."""
    if tag is None:
        return text
    end = text.rfind(f"</{tag}>")
    begin = text.rfind(f"<{tag}>", 0, max(end, 0))
    return text[begin + len(tag) + 2 : end].strip() if begin >= 0 else ""
