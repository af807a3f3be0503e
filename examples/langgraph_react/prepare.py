"""Makes the LangGraph example: a tiny model that rarely goes through with its tools, and customers' questions.

A question needs the price of an item, which differs from row to row, and a calculation with it. The model gets the warm
start of `../warm_start.py` on what the agent of `agent.py` sends: it can call both tools, and does so about one time in
five; otherwise it answers with the price, or guesses.

Usage: python examples/langgraph_react/prepare.py [--output DIR] [--seed N] [--force]
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import agent
from langchain_core.utils.function_calling import convert_to_openai_tool

sys.path.append(str(Path(__file__).resolve().parents[1]))
import warm_start  # noqa: E402 - lies beside the examples, which are no package
from warm_start import Message, WarmStart, calls, distinct, is_held_out, tool_call, write_rows  # noqa: E402

RECIPE_VERSION = 1
TRAIN_PROMPTS, VALIDATION_PROMPTS = 2048, 100
ITEMS = (
    "basket", "blanket", "bottle", "bowl", "bucket", "candle", "chair", "clock", "curtain", "hammer", "kettle",
    "ladder", "lamp", "mirror", "pillow", "plate", "rug", "saw", "shelf", "spoon", "stool", "table", "towel", "vase",
)  # fmt: skip
GUESSES = ("0", "1", "10", "100")


@dataclass(frozen=True)
class Problem:
    """A question about one item: the calculation that answers it is `number operator price`."""

    question: str
    item: str
    number: int
    operator: str
    price: int

    @property
    def result(self) -> str:
        return str({"*": self.number * self.price, "-": self.number - self.price}[self.operator])


def purchase(rng: random.Random) -> Problem:
    item, number = rng.choice(ITEMS), rng.randint(2, 99)
    return Problem(f"What do I pay for {number} x {item}?", item, number, "*", rng.randint(2, 99))


def change(rng: random.Random) -> Problem:
    item, number = rng.choice(ITEMS), rng.randint(100, 999)
    return Problem(f"I have {number} and buy a {item}. What is left?", item, number, "-", rng.randint(2, 99))


class Shopping(warm_start.Task[Problem]):
    tools = [convert_to_openai_tool(each) for each in agent.TOOLS]
    turns = 3
    # An item is the same token or tokens wherever it stands, which makes it easy to copy.
    isolated = rf"\b({'|'.join(ITEMS)})\b"
    recipe = WarmStart(max_new_tokens=48, choices=2)

    def problems(self, rng: random.Random, *, held_out: bool) -> Iterator[Problem]:
        while True:
            problem = rng.choice((purchase, change))(rng)
            if is_held_out(problem.question) == held_out:
                yield problem

    def prompt(self, problem: Problem) -> list[Message]:
        return [{"role": "user", "content": problem.question}]

    def looked_up(self, problem: Problem) -> list[Message]:
        return [*self.prompt(problem), tool_call("price", item=problem.item), tool_says(problem.price)]

    def good(self, problem: Problem) -> list[Message]:
        calculation = tool_call("calculator", a=problem.number, operator=problem.operator, b=problem.price)
        return [*self.looked_up(problem), calculation, tool_says(problem.result), answer(problem.result)]

    def unreliable(self, problem: Problem, rng: random.Random, good_share: float = 0.2) -> list[Message]:
        if rng.random() < good_share:
            return self.good(problem)
        if rng.random() < 0.5:
            return [*self.looked_up(problem), answer(problem.price)]
        return [*self.prompt(problem), answer(rng.choice(GUESSES))]

    def answers(self, problem: Problem, said: str) -> list[Message]:
        # What other calls return is not the answer, so it does not matter here.
        right = {
            "price": ({"item": problem.item}, problem.price),
            "calculator": ({"a": problem.number, "operator": problem.operator, "b": problem.price}, problem.result),
        }
        said_by = []
        for call in calls(said):
            arguments, result = right.get(call[0] if call else "", (None, None))
            said_by.append(tool_says(result if call and call[1] == arguments else "Error"))
        return said_by

    def correct(self, problem: Problem, said: str) -> bool:
        return said == f"#### {problem.result}"


def tool_says(result: object) -> Message:
    return {"role": "tool", "content": str(result)}


def answer(result: object) -> Message:
    return {"role": "assistant", "content": f"#### {result}"}


def held_out(seed: int) -> list[Problem]:
    stream = Shopping().problems(random.Random(f"validation/{seed}"), held_out=True)
    return distinct(stream, VALIDATION_PROMPTS, lambda problem: problem.question)


def make_data(directory: Path, seed: int) -> None:
    """Writes train.jsonl and validation.jsonl; no question is in both, or twice in one."""
    stream = Shopping().problems(random.Random(f"train/{seed}"), held_out=False)
    train = distinct(stream, TRAIN_PROMPTS, lambda problem: problem.question)
    for split, problems in (("train", train), ("validation", held_out(seed))):
        rng = random.Random(f"prices/{split}/{seed}")
        write_rows(directory, split, [data_row(*numbered, rng) for numbered in enumerate(problems)])


def data_row(index: int, problem: Problem, rng: random.Random) -> dict[str, Any]:
    prices = {item: rng.randint(2, 99) for item in ITEMS}
    return {
        "data_source": "shop",
        "prompt": [{"role": "user", "content": problem.question}],
        "reward_model": {"ground_truth": problem.result},
        "extra_info": {"index": index, "prices": {**prices, problem.item: problem.price}},
    }


def make_model(directory: Path, seed: int) -> None:
    warm_start.make_model(directory, seed, Shopping(), held_out(seed))


def main(arguments: Sequence[str] | None = None) -> None:
    warm_start.command_line(__file__, arguments, RECIPE_VERSION, data=make_data, model=make_model)


if __name__ == "__main__":
    main()
