"""One game of textarena, with random numbers of its own."""

import math
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import textarena

_LOCK = threading.Lock()


class Game:
    """A game for one or two players that has begun. Blocks; several games may run in several threads.

    textarena's games draw from the global generators of ``random`` and numpy. Each game gets its own states of both,
    and the process's are restored after every call.

    Args:
        game: the id under which textarena registers it.
        options: keyword arguments of the game.
        seed: decides everything that the game draws.

    Raises:
        ValueError: the game is for more than two players.
    """

    def __init__(self, game: str, options: Mapping[str, Any], seed: int) -> None:
        seed %= 2**32  # numpy takes no larger seed
        self._states = random.Random(seed).getstate(), np.random.RandomState(seed).get_state()
        with self._own_random():
            self._wrapped = textarena.make(game, **options)
            self._base = self._wrapped
            while isinstance(self._base, textarena.Wrapper):
                self._base = self._base.env
            try:
                self._wrapped.reset(num_players=1, seed=seed)
            except (AssertionError, ValueError):  # it is not for one player
                self._wrapped.reset(num_players=2, seed=seed)
        if not isinstance(self._base.state, textarena.SinglePlayerState | textarena.TwoPlayerState):
            raise ValueError("it is no game for one or two players")

    @property
    def player(self) -> int | None:
        """Whose turn it is; None in a game for one."""
        single = isinstance(self._base.state, textarena.SinglePlayerState)
        return None if single else int(self._base.state.current_player_id)

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        with _LOCK:
            outside = random.getstate(), np.random.get_state()
            random.setstate(self._states[0])
            np.random.set_state(self._states[1])
            try:
                yield
            finally:
                self._states = random.getstate(), np.random.get_state()
                random.setstate(outside[0])
                np.random.set_state(outside[1])

    def news(self) -> str:
        """What the game has said to the player whose turn it is since the last time, without the player's own moves."""
        with self._own_random():
            player, observations = self._base.get_observation()
        kinds = textarena.ObservationType
        # Some games pass the arguments of an echoed move in the wrong order, so its kind is no ObservationType.
        said = []
        for sender, text, kind in observations:
            if kind is kinds.PLAYER_ACTION and self.player is not None and sender != player:
                said.append(f"[Player {sender}] {text}")
            elif isinstance(kind, kinds) and kind is not kinds.PLAYER_ACTION:
                said.append(text)
        return "\n".join(text.strip("\n") for text in said)

    def step(self, move: str) -> bool:
        """Make a move; True: the game is over."""
        with self._own_random():
            done, _ = self._wrapped.step(action=move)
        return bool(done)

    def result(self, player: int = 0) -> tuple[float | None, dict[str, Any]]:
        """A player's reward, None while the game is not over, and what textarena reports on the player.

        A reward is NaN where the game gave something else than a number, as some do after an invalid move.
        """
        rewards, info = self._base.close()
        if not rewards:
            return None, info[player]
        reward = rewards[player]
        number = isinstance(reward, (int, float, np.number)) and not isinstance(reward, bool)
        return float(reward) if number else math.nan, info[player]
