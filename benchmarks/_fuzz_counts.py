"""A pytest plugin that writes down at once how many examples each test has tried: a crash loses no test that ended.

A line of the file that ``FUZZ_COUNTS`` names is a test and its examples, or null as the test starts.
"""

import json
import os
import re
from collections.abc import Generator

import pytest

_TRIED = re.compile(r"- (\d+) passing, (\d+) failing")


def _note(test: str, examples: int | None) -> None:
    with open(os.environ["FUZZ_COUNTS"], "a", encoding="utf-8") as file:
        file.write(json.dumps([test, examples]) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _note(nodeid, None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    # Hypothesis leaves it there.
    statistics = getattr(item, "hypothesis_statistics", "")
    _note(item.nodeid, sum(int(found[1]) + int(found[2]) for found in _TRIED.finditer(statistics)))
    return (yield)
