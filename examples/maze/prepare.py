"""Makes the model of the maze example: tiny, and taking each door with probability 1/4.

Usage: python examples/maze/prepare.py [--output DIR] [--seed N] [--steps N]
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from environment import DOORS, MAZES, ROOMS  # noqa: E402

# It lies beside the examples, which are no package.
from word_model import ASSISTANT, END, USER, command_line, random_player  # noqa: E402

WORDS = (
    "maze",
    "room",
    *(f" {number}" for number in range(len(MAZES))),
    " room",
    *(f" {room}" for room in ROOMS),
    *DOORS,
)


def prompts() -> list[str]:
    """What the policy has seen in each room of each maze: it gets there by one way only."""
    found = []
    for number, doors in enumerate(MAZES):
        text = f"{USER}maze {number} room A{END}{ASSISTANT}"
        for room, door in zip(ROOMS[1:] + " ", doors, strict=True):
            found.append(text)
            text += f"{door}{END}{USER}room {room}{END}{ASSISTANT}"
    return found


def main() -> None:
    command_line(__file__, __doc__, lambda options: random_player(WORDS, DOORS, prompts(), 128, options.steps))


if __name__ == "__main__":
    main()
