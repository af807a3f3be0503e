"""Makes the example of mathematics with a Python interpreter: a tiny model that rarely uses it well, and problems.

The model gets the warm start of `../warm_start.py`: it can write the code of four kinds of problems, and does so about
one time in five; otherwise it writes code that fails, or guesses.

Usage: python examples/python_math/prepare.py [--output DIR] [--seed N] [--force]
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
import warm_start  # noqa: E402 - lies beside the examples, which are no package
from warm_start import Message, WarmStart, calls, distinct, is_held_out, tool_call, write_rows  # noqa: E402

RECIPE_VERSION = 1
TRAIN_PROMPTS, VALIDATION_PROMPTS = 4096, 100
GUESSES = ("0", "1", "10", "100")
FAILURE: Message = {"role": "tool", "content": "SyntaxError: '(' was never closed"}

# Must equal the schema of the `python` tool of agentrl-tools-sandbox with the options of config.yaml: the warm start
# sees the prompt that the rollout will show, to the token.
PYTHON_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs Python code and returns its output. Variables and files are not kept between calls. "
        "Time limit: 5 s. There is no network.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "the code; print what you want to see"}},
            "required": ["code"],
        },
    },
}


@dataclass(frozen=True)
class Problem:
    """One question, code that prints the answer, and the answer."""

    question: str
    code: str
    result: str


def sum_of_squares(rng: random.Random) -> Problem:
    first, last = sorted(rng.sample(range(1, 100), 2))
    return Problem(
        f"What is the sum of the squares of the integers from {first} to {last}?",
        f"print(sum(i * i for i in range({first}, {last} + 1)))",
        str(sum(i * i for i in range(first, last + 1))),
    )


def remainder(rng: random.Random) -> Problem:
    base, exponent, modulus = (rng.randint(2, 99) for _ in range(3))
    return Problem(
        f"What is the remainder when {base}^{exponent} is divided by {modulus}?",
        f"print({base} ** {exponent} % {modulus})",
        str(pow(base, exponent, modulus)),
    )


def greatest_common_divisor(rng: random.Random) -> Problem:
    factor = rng.randint(2, 30)
    first, second = factor * rng.randint(2, 33), factor * rng.randint(2, 33)
    return Problem(
        f"What is the greatest common divisor of {first} and {second}?",
        f"import math\nprint(math.gcd({first}, {second}))",
        str(math.gcd(first, second)),
    )


def divisors(rng: random.Random) -> Problem:
    number = rng.randint(100, 999)
    return Problem(
        f"How many positive divisors does {number} have?",
        f"print(sum({number} % i == 0 for i in range(1, {number} + 1)))",
        str(sum(number % i == 0 for i in range(1, number + 1))),
    )


KINDS = (sum_of_squares, remainder, greatest_common_divisor, divisors)


class PythonMath(warm_start.Task[Problem]):
    tools = [PYTHON_SCHEMA]
    vocabulary_size = 768
    recipe = WarmStart(max_new_tokens=64)

    def problems(self, rng: random.Random, *, held_out: bool) -> Iterator[Problem]:
        while True:
            problem = rng.choice(KINDS)(rng)
            if is_held_out(problem.question) == held_out:
                yield problem

    def prompt(self, problem: Problem) -> list[Message]:
        return [{"role": "user", "content": problem.question}]

    def good(self, problem: Problem) -> list[Message]:
        return [
            *self.prompt(problem),
            tool_call("python", code=problem.code),
            {"role": "tool", "content": problem.result},
            {"role": "assistant", "content": boxed(problem.result)},
        ]

    def unreliable(self, problem: Problem, rng: random.Random, good_share: float = 0.2) -> list[Message]:
        if rng.random() < good_share:
            return self.good(problem)
        guess = {"role": "assistant", "content": boxed(rng.choice(GUESSES))}
        if rng.random() < 0.75:
            return [*self.prompt(problem), guess]
        broken = problem.code.removeprefix("import math\n").replace("print(", "print(result(")
        return [*self.prompt(problem), tool_call("python", code=broken), FAILURE, guess]

    def answers(self, problem: Problem, said: str) -> list[Message]:
        # What other code prints is not the answer, so it does not matter here.
        right = ("python", {"code": problem.code})
        return [{"role": "tool", "content": problem.result} if call == right else FAILURE for call in calls(said)]

    def correct(self, problem: Problem, said: str) -> bool:
        return said == boxed(problem.result)


def boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


def held_out(seed: int) -> list[Problem]:
    stream = PythonMath().problems(random.Random(f"validation/{seed}"), held_out=True)
    return distinct(stream, VALIDATION_PROMPTS, lambda problem: problem.question)


def make_data(directory: Path, seed: int) -> None:
    """Writes train.jsonl and validation.jsonl; no question is in both, or twice in one."""
    stream = PythonMath().problems(random.Random(f"train/{seed}"), held_out=False)
    train = distinct(stream, TRAIN_PROMPTS, lambda problem: problem.question)
    for split, problems in (("train", train), ("validation", held_out(seed))):
        write_rows(directory, split, [data_row(problem, index) for index, problem in enumerate(problems)])


def data_row(problem: Problem, index: int) -> dict[str, Any]:
    return {
        "data_source": "python_math",
        "prompt": [{"role": "user", "content": problem.question}],
        "reward_model": {"ground_truth": problem.result},
        "extra_info": {"index": index},
    }


def make_model(directory: Path, seed: int) -> None:
    warm_start.make_model(directory, seed, PythonMath(), held_out(seed))


def main(arguments: Sequence[str] | None = None) -> None:
    warm_start.command_line(__file__, arguments, RECIPE_VERSION, data=make_data, model=make_model)


if __name__ == "__main__":
    main()
