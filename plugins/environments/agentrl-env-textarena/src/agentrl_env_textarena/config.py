"""Options of the environment."""

from dataclasses import dataclass
from typing import Any

from agentrl_core.api import option


@dataclass
class GameConfig:
    weight: float = option(1.0, gt=0, help="share of the tasks, relative to those of the other games")
    config: dict[str, Any] = option(
        default_factory=dict, help="keyword arguments of the game, as in textarena.make, such as {max_turns: 6}"
    )


@dataclass(kw_only=True)
class TextArenaConfig:
    games: dict[str, GameConfig] = option(
        help="games for one or two players by id, such as {GuessTheNumber-v0: {}, Minesweeper-v0-small: {weight: 0.5}}"
    )
    tasks: int = option(10_000, ge=1, help="number of training tasks, over all games")
    validation_tasks: int = option(200, ge=0, help="number of validation tasks, over all games")
    seed: int | None = option(
        None, ge=0, help="task i always begins like seed + i, in validation with other seeds; null: each step differs"
    )
    opponent: str | None = option(
        None,
        help="engine of `engines` that plays the other side of games for two, sides swapped from task to task; null: "
        "the policy plays both, with the loop multi_agent",
    )
    opponent_temperature: float = option(1.0, ge=0, le=2, help="sampling temperature of the opponent; 0: greedy")
    opponent_max_tokens: int = option(256, ge=1, unit="tokens", help="longest turn of the opponent")
    max_turns: int | None = option(
        None, ge=1, help="end a game after this many turns of the policy; null: only the game's own limits"
    )
    unfinished: float = option(0.0, help="score of a game that is not over when its trajectory ends")
    system_prompt: str | None = option(None, help="a system message in front of the game's instructions; null: none")
    answer_tag: str | None = option(
        None, help="take the move from the last <tag>…</tag> of a turn, an empty move without one; null: the whole turn"
    )
