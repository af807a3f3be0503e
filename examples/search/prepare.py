"""Makes the search example: a corpus with its index, questions, and a tiny model that rarely searches well.

The corpus is about invented countries, so nothing in it can be known: 2,000 countries have a capital each, and each
capital a river and a mayor. Half of the questions need one search, half need two. The model gets the warm start of
`../warm_start.py`: it can search and copy what it finds, and does so about one time in five; otherwise it stops after
the first search or guesses.

Usage: python examples/search/prepare.py [--output DIR] [--seed N] [--force]
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from agentrl_tool_search.index import build_index, open_index

sys.path.append(str(Path(__file__).resolve().parents[1]))
import warm_start  # noqa: E402 - lies beside the examples, which are no package
from warm_start import Message, WarmStart, calls, is_held_out, tool_call, write_rows  # noqa: E402

RECIPE_VERSION = 1
COUNTRIES = 2000
TRAIN_PROMPTS, VALIDATION_PROMPTS = 4096, 200
DOCUMENTS = 2  # that a search shows, as in config.yaml

# Must equal the schema of the `search` tool: the warm start sees the prompt that the rollout will show, to the token.
SEARCH_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches a collection of documents and returns the ones that fit a query best.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "what to look for"}},
            "required": ["query"],
        },
    },
}


# --- the world ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Country:
    name: str
    capital: str
    river: str
    mayor: str

    def facts(self) -> list[str]:
        return [
            f"The capital of {self.name} is {self.capital}.",
            f"The river of {self.capital} is the {self.river}.",
            f"The mayor of {self.capital} is {self.mayor}.",
        ]


def names(rng: random.Random) -> Iterator[str]:
    """Different invented names, of three syllables each."""
    seen = set()
    while True:
        name = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3)).capitalize()
        if name not in seen:
            seen.add(name)
            yield name


@cache
def world() -> list[Country]:
    """The same for every seed."""
    fresh = names(random.Random("world"))
    return [Country(next(fresh), next(fresh), next(fresh), next(fresh)) for _ in range(COUNTRIES)]


@dataclass(frozen=True)
class Problem:
    """A question, the queries that answer it one after the other, and the answer."""

    question: str
    queries: tuple[str, ...]
    answer: str


def questions(country: Country) -> list[Problem]:
    capital = f"capital of {country.name}"
    asked = [
        Problem(f"What is the {capital}?", (capital,), country.capital),
        Problem(f"Who is the mayor of {country.capital}?", (f"mayor of {country.capital}",), country.mayor),
    ]
    for what, answer in (("river", country.river), ("mayor", country.mayor)):
        question = f"What is the {what} of the {capital}?"
        asked.append(Problem(question, (capital, f"{what} of {country.capital}"), answer))
    return asked


# --- the task -------------------------------------------------------------------------------------------------------


class Search(warm_start.Task[Problem]):
    tools = [SEARCH_SCHEMA]
    turns = 3
    vocabulary_size = 768
    # A syllable of a name is a token, wherever the name stands: tokens that stay the same are easy to copy.
    isolated = r"\b[A-Z][a-z](?=[a-z]{4}\b)|(?<=\b[A-Z][a-z])[a-z]{2}(?=[a-z]{2}\b)|(?<=\b[A-Z][a-z]{3})[a-z]{2}\b"
    recipe = WarmStart(copy_steps=500, first_check=250, promising_accuracy=0.3, choices=3)

    def __init__(self, index: Path) -> None:
        self.index = open_index(index)
        self.guesses = [country.river for country in world()[:3]]

    def problems(self, rng: random.Random, *, held_out: bool) -> Iterator[Problem]:
        countries = [country for country in world() if is_held_out(country.name) == held_out]
        while True:
            yield rng.choice(questions(rng.choice(countries)))

    def prompt(self, problem: Problem) -> list[Message]:
        return [{"role": "user", "content": problem.question}]

    def searches(self, queries: Sequence[str]) -> list[Message]:
        return [message for query in queries for message in (tool_call("search", query=query), self.found(query))]

    def good(self, problem: Problem) -> list[Message]:
        return [*self.prompt(problem), *self.searches(problem.queries), answer(problem.answer)]

    def unreliable(self, problem: Problem, rng: random.Random, good_share: float = 0.2) -> list[Message]:
        if rng.random() < good_share:
            return self.good(problem)
        searched = self.searches(problem.queries[:-1]) if rng.random() < 0.5 else []
        return [*self.prompt(problem), *searched, answer(rng.choice(self.guesses))]

    def answers(self, problem: Problem, said: str) -> list[Message]:
        return [self.found(str(call[1].get("query")) if call else "") for call in calls(said)]

    def correct(self, problem: Problem, said: str) -> bool:
        return said == f"#### {problem.answer}"

    def found(self, query: str) -> Message:
        """What the tool shows."""
        texts = [f"[{number}] {hit.text}" for number, hit in enumerate(self.index.search(query, DOCUMENTS), start=1)]
        return {"role": "tool", "content": "\n\n".join(texts) or "[no documents found]"}


def answer(text: str) -> Message:
    return {"role": "assistant", "content": f"#### {text}"}


# --- files ----------------------------------------------------------------------------------------------------------


def make_index(directory: Path) -> Path:
    """Writes corpus.jsonl and its index."""
    facts = [fact for country in world() for fact in country.facts()]
    corpus = directory / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": fact}) + "\n" for fact in facts), encoding="utf-8")
    build_index([corpus], directory / "index")
    return directory / "index"


def chosen(split: str, seed: int, count: int) -> list[Problem]:
    """Questions of one split; a country's questions are all in the same one."""
    countries = [country for country in world() if is_held_out(country.name) == (split == "validation")]
    problems = [problem for country in countries for problem in questions(country)]
    return random.Random(f"{split}/{seed}").sample(problems, count)


def make_data(directory: Path, seed: int) -> None:
    make_index(directory)
    for split, count in (("train", TRAIN_PROMPTS), ("validation", VALIDATION_PROMPTS)):
        write_rows(directory, split, [data_row(*row) for row in enumerate(chosen(split, seed, count))])


def data_row(index: int, problem: Problem) -> dict[str, Any]:
    return {
        "data_source": f"{len(problem.queries)}_searches",
        "prompt": [{"role": "user", "content": problem.question}],
        "reward_model": {"ground_truth": problem.answer},
        "extra_info": {"index": index},
    }


def make_model(directory: Path, seed: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        task = Search(make_index(Path(scratch)))
        warm_start.make_model(directory, seed, task, chosen("validation", seed, VALIDATION_PROMPTS))


def main(arguments: Sequence[str] | None = None) -> None:
    warm_start.command_line(__file__, arguments, RECIPE_VERSION, data=make_data, model=make_model)


if __name__ == "__main__":
    main()
