"""Makes the calculator example: a tiny model that is unreliable at calling a calculator, and problems to train it on.

Everything is built here, offline and repeatably (same seed, same machine: same bytes): a tokenizer and a model with a
supervised warm start (`../warm_start.py`), which leaves it calling the calculator correctly about one time in five, and
parquet files in the layout that agentrl reads.

Usage: python examples/calculator/prepare.py [--output DIR] [--seed N] [--force]
"""

from __future__ import annotations

import ast
import operator
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.append(str(Path(__file__).resolve().parents[1]))
import warm_start  # noqa: E402 - lies beside the examples, which are no package
from warm_start import CALL_END, CALL_START, Message, calls, distinct, is_held_out, tool_call  # noqa: E402

RECIPE_VERSION = 3
DATA_SOURCE = "calculator"
TRAIN_PROMPTS = 4096
VALIDATION_PROMPTS = 200

# The prompt contains this schema as JSON, in this key order. It must equal the schema of the `calculator` tool of
# agentrl-tools-basic: the warm start sees the prompt that the rollout will show, to the token.
CALCULATOR_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression and returns the result.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "the expression, for example 37 * 45"},
            },
            "required": ["expression"],
        },
    },
}

QUESTIONS = ("What is {}?", "Calculate {}.", "How much is {}?", "Please work out {}.")
# Random guesses would teach noise in every digit and destroy the copying of phase 1.
GUESSES = ("0", "1", "10", "100")

OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


# --- problems -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """One question, the expression in it, and the result."""

    question: str
    expression: str
    result: str


def evaluate(expression: str) -> int:
    """The value of an expression of integers, +, - and *; ValueError for anything else. Never calls `eval`."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        raise ValueError(f"{expression!r} holds {type(node).__name__}; allowed are integers, +, - and *")

    if not re.fullmatch(r"[\d\s+*()-]+", expression):
        raise ValueError(f"{expression!r} is not arithmetic; allowed are integers, +, -, * and parentheses")
    try:
        return value(ast.parse(expression, mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is not an expression: {error.msg}") from error


def problems(rng: random.Random, *, held_out: bool) -> Iterator[Problem]:
    """An endless stream of problems of one split."""
    while True:
        expression = f"{rng.randint(1, 99)} {rng.choice('+-*')} {rng.randint(1, 99)}"
        if is_held_out(expression) == held_out:
            yield Problem(rng.choice(QUESTIONS).format(expression), expression, str(evaluate(expression)))


def distinct_problems(rng: random.Random, count: int, *, held_out: bool) -> list[Problem]:
    """`count` problems of one split, no expression twice."""
    return distinct(problems(rng, held_out=held_out), count, lambda problem: problem.expression)


# --- demonstrations -------------------------------------------------------------------------------------------------


def conversation(problem: Problem, *turns: Message) -> list[Message]:
    return [{"role": "user", "content": problem.question}, *turns]


def good_call(problem: Problem) -> list[Message]:
    return conversation(
        problem,
        tool_call("calculator", expression=problem.expression),
        {"role": "tool", "content": problem.result},
        {"role": "assistant", "content": f"#### {problem.result}"},
    )


def bad_call(problem: Problem, rng: random.Random) -> list[Message]:
    """A call that lacks a brace or names a tool that does not exist, the error, and a guess."""
    if rng.random() < 0.5:
        call = f'{{"name": "calculator", "arguments": {{"expression": "{problem.expression}"}}'
    else:
        call = f'{{"name": "compute", "arguments": {{"expression": "{problem.expression}"}}}}'
    return conversation(
        problem,
        {"role": "assistant", "content": f"{CALL_START}\n{call}\n{CALL_END}"},
        {"role": "tool", "content": "Error: this call cannot be answered."},
        {"role": "assistant", "content": f"#### {rng.choice(GUESSES)}"},
    )


def guess(problem: Problem, rng: random.Random) -> list[Message]:
    return conversation(problem, {"role": "assistant", "content": f"#### {rng.choice(GUESSES)}"})


def unreliable(problem: Problem, rng: random.Random, good_share: float = 0.2) -> list[Message]:
    """The mixture of phase 2: `good_share` good calls; of the rest, one in four a bad call, the others guesses."""
    if rng.random() < good_share:
        return good_call(problem)
    return bad_call(problem, rng) if rng.random() < 0.25 else guess(problem, rng)


class Calculator(warm_start.Task[Problem]):
    tools = [CALCULATOR_SCHEMA]

    def problems(self, rng: random.Random, *, held_out: bool) -> Iterator[Problem]:
        return problems(rng, held_out=held_out)

    def prompt(self, problem: Problem) -> list[Message]:
        return conversation(problem)

    def good(self, problem: Problem) -> list[Message]:
        return good_call(problem)

    def unreliable(self, problem: Problem, rng: random.Random, good_share: float = 0.2) -> list[Message]:
        return unreliable(problem, rng, good_share)

    def answers(self, problem: Problem, said: str) -> list[Message]:
        return [{"role": "tool", "content": answer(call)} for call in calls(said)]

    def correct(self, problem: Problem, said: str) -> bool:
        found = re.search(r"#### (-?\d+)$", said)
        return found is not None and found.group(1) == problem.result


def answer(call: tuple[str, dict[str, Any]] | None) -> str:
    """What the tool says to a call."""
    try:
        if call is not None and call[0] == "calculator":
            return str(evaluate(call[1]["expression"]))
    except (ValueError, KeyError, TypeError):
        pass
    return "Error: this call cannot be answered."


# --- files -----------------------------------------------------------------------------------------------------------


def data_row(problem: Problem, split: str, index: int, *, tutor: bool) -> dict[str, Any]:
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": problem.question}],
        "reward_model": {"style": "rule", "ground_truth": problem.result},
        "extra_info": {
            "index": index,
            "split": split,
            "tools_kwargs": {"calculator": {"create_kwargs": None}},
            "interaction_kwargs": {"name": "tutor", "ground_truth": problem.result} if tutor else None,
        },
    }


# Parquet has no empty struct, and the calculator takes no arguments: `create_kwargs` is therefore null.
DATA_SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
        "extra_info": pa.struct(
            {
                "index": pa.int64(),
                "split": pa.string(),
                "tools_kwargs": pa.struct({"calculator": pa.struct({"create_kwargs": pa.null()})}),
                "interaction_kwargs": pa.struct({"name": pa.string(), "ground_truth": pa.string()}),
            }
        ),
    }
)


def make_data(directory: Path, seed: int) -> None:
    """Writes train.parquet and validation.parquet; no expression is in both, or twice in one.

    The same rows stand in tutor-train.parquet and tutor-validation.parquet, where each names its tutor.
    """
    for split, count in (("train", TRAIN_PROMPTS), ("validation", VALIDATION_PROMPTS)):
        chosen = distinct_problems(random.Random(f"{split}/{seed}"), count, held_out=split == "validation")
        for prefix, tutor in (("", False), ("tutor-", True)):
            rows = [data_row(problem, split, index, tutor=tutor) for index, problem in enumerate(chosen)]
            pq.write_table(pa.Table.from_pylist(rows, schema=DATA_SCHEMA), directory / f"{prefix}{split}.parquet")
        print(f"  {count} prompts in {split}.parquet", flush=True)  # noqa: T201


def make_model(directory: Path, seed: int) -> None:
    held_out = distinct_problems(random.Random(f"validation/{seed}"), VALIDATION_PROMPTS, held_out=True)
    warm_start.make_model(directory, seed, Calculator(), held_out)


def main(arguments: Sequence[str] | None = None) -> None:
    warm_start.command_line(__file__, arguments, RECIPE_VERSION, data=make_data, model=make_model)


if __name__ == "__main__":
    main()
