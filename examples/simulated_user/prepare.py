"""Makes the simulated-user example: a tiny model that books a table, another one that plays the guest, and guests.

A guest says only "I want to book a table." and tells the day, the hour and the number of people when the policy asks.
One model learns both sides with the warm start of `../warm_start.py`, and plays the guest. The policy is a copy with
more training: it asks for everything about one time in five, and otherwise guesses what it did not ask for.

Usage: python examples/simulated_user/prepare.py [--output DIR] [--seed N] [--force]
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
import warm_start  # noqa: E402 - lies beside the examples, which are no package
from warm_start import Message, WarmStart, distinct, is_held_out, write_rows  # noqa: E402

RECIPE_VERSION = 1
TRAIN_PROMPTS, VALIDATION_PROMPTS = 1000, 100
# Must equal `instructions` and `done` of config.yaml: the guest meets in training the prompt of its warm start.
INSTRUCTIONS = "You want to book a table. Day: {day}. Hour: {hour}. People: {people}."
DONE = "[DONE]"
OPENING = "I want to book a table."
# In the rows of real.yaml: a real model cannot know the form of a booking.
TASK = (
    "You take bookings for a restaurant. Ask the guest for what you do not know, one question at a time. When you know "
    "all, end with a line such as: #### Monday 19 4 (day in English, hour from 0 to 23, number of people)."
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
ASKED = {"day": "On which day?", "hour": "At which hour?", "people": "For how many people?"}


@dataclass(frozen=True)
class Guest:
    day: str
    hour: str
    people: str

    def answer(self, said: str) -> str:
        """What the guest says to a turn of the policy."""
        for field, question in ASKED.items():
            if said == question:
                return str(getattr(self, field))
        return DONE

    @property
    def booking(self) -> str:
        return f"{self.day} {self.hour} {self.people}"


def guests(rng: random.Random) -> Iterator[Guest]:
    while True:
        yield Guest(rng.choice(DAYS), str(rng.randint(10, 23)), str(rng.randint(2, 40)))


class Booking(warm_start.Task[Guest]):
    turns = 4
    vocabulary_size = 512
    recipe = WarmStart(max_new_tokens=16, choices=4)

    def problems(self, rng: random.Random, *, held_out: bool) -> Iterator[Guest]:
        return (guest for guest in guests(rng) if is_held_out(guest.booking) == held_out)

    def prompt(self, problem: Guest) -> list[Message]:
        return [user(OPENING)]

    def good(self, problem: Guest) -> list[Message]:
        return self.conversation(problem, list(ASKED), problem)

    def conversation(self, guest: Guest, fields: Sequence[str], booked: Guest) -> list[Message]:
        """The policy asks for some fields and books."""
        asked = [turn for field in fields for turn in (assistant(ASKED[field]), user(getattr(guest, field)))]
        return [user(OPENING), *asked, assistant(f"#### {booked.booking}")]

    def shown(self, problem: Guest) -> list[list[Message]]:
        """Both sides, and the guest's for a policy that asks in any order."""
        fields = random.Random(problem.booking).sample(list(ASKED), 3)
        seen = self.conversation(problem, fields, problem)
        return [self.good(problem), guest_side(problem, seen)]

    def unreliable(self, problem: Guest, rng: random.Random, good_share: float = 0.2) -> list[Message]:
        if rng.random() < good_share:
            return self.good(problem)
        fields = list(ASKED)[: rng.randint(0, 2)]
        guessed = {field: getattr(next(guests(rng)), field) for field in ASKED if field not in fields}
        return self.conversation(problem, fields, Guest(**{**vars(problem), **guessed}))

    def answers(self, problem: Guest, said: str) -> list[Message]:
        return [] if said.startswith("#### ") else [user(problem.answer(said))]

    def correct(self, problem: Guest, said: str) -> bool:
        return said == f"#### {problem.booking}"


def guest_side(guest: Guest, seen: Sequence[Message]) -> list[Message]:
    """A conversation as the guest's model meets it: with its instructions, and the roles swapped."""
    swapped = [assistant(turn["content"]) if turn["role"] == "user" else user(turn["content"]) for turn in seen]
    return [{"role": "system", "content": INSTRUCTIONS.format(**vars(guest))}, *swapped, assistant(DONE)]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def held_out(seed: int) -> list[Guest]:
    stream = Booking().problems(random.Random(f"validation/{seed}"), held_out=True)
    return distinct(stream, VALIDATION_PROMPTS, lambda guest: guest.booking)


def make_data(directory: Path, seed: int) -> None:
    """Writes train.jsonl and validation.jsonl, and both for real.yaml; no booking is in both, or twice in one."""
    stream = Booking().problems(random.Random(f"train/{seed}"), held_out=False)
    train = distinct(stream, TRAIN_PROMPTS, lambda guest: guest.booking)
    for split, chosen in (("train", train), ("validation", held_out(seed))):
        rows = [data_row(guest, index) for index, guest in enumerate(chosen)]
        write_rows(directory, split, rows)
        task = {"role": "system", "content": TASK}
        write_rows(directory, f"real-{split}", [{**row, "prompt": [task, *row["prompt"]]} for row in rows])


def data_row(guest: Guest, index: int) -> dict[str, Any]:
    return {
        "data_source": "booking",
        "prompt": [user(OPENING)],
        "reward_model": {"ground_truth": guest.booking},
        "extra_info": {"index": index, "interaction_kwargs": {"name": "simulated_user", **vars(guest)}},
    }


def make_models(directory: Path, seed: int) -> None:
    """Writes both models, `policy` and `user`."""
    warm_start.make_model(directory / "policy", seed, Booking(), held_out(seed), reliable=directory / "user")


def main(arguments: Sequence[str] | None = None) -> None:
    warm_start.command_line(__file__, arguments, RECIPE_VERSION, data=make_data, models=make_models)


if __name__ == "__main__":
    main()
