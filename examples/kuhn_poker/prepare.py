"""Makes the model of the Kuhn poker example: tiny, and playing each action with probability 1/2.

Everything is built here, offline: a tokenizer in which each word of the game is one token, and a Qwen3 with a
supervised warm start on uniform play.

Usage: python examples/kuhn_poker/prepare.py [--output DIR] [--seed N] [--steps N]
"""

import sys
from itertools import product
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
# It lies beside the examples, which are no package.
from word_model import ASSISTANT, END, USER, command_line, random_player  # noqa: E402

WORDS = ("first", "second", " J", " Q", " K", " pass", " bet", "pass", "bet")


def prompts() -> list[str]:
    """What a player has seen at each of the 12 information sets."""
    opening = {card: f"{USER}first {card}{END}{ASSISTANT}" for card in "JQK"}
    raised = [f"{text}pass{END}{USER}bet{END}{ASSISTANT}" for text in opening.values()]
    second = [f"{USER}second {card} {seen}{END}{ASSISTANT}" for card, seen in product("JQK", ("pass", "bet"))]
    return [*opening.values(), *raised, *second]


def main() -> None:
    command_line(__file__, __doc__, lambda options: random_player(WORDS, ("pass", "bet"), prompts(), 64, options.steps))


if __name__ == "__main__":
    main()
