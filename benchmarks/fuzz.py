# ruff: noqa: T201 - a command that prints what it found
"""Runs the fuzz tests again and again, each time with another seed, until the time is over.

python benchmarks/fuzz.py --minutes 15 [--examples 200] [-k EXPRESSION]

Prints examples tried per test and every failure, with the seed that repeats it.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "tests" / "fuzz"
_TEST = re.compile(r"^(\S+)::(\S+):$", re.MULTILINE)
_TRIED = re.compile(r"- (\d+) passing, (\d+) failing")


def run(seed: int, examples: int, expression: str, seconds: float) -> tuple[Counter[str], str]:
    """Examples by test, and the output if a test failed."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--show-capture=no", "--tb=short",
        f"--hypothesis-seed={seed}", "--hypothesis-show-statistics", "-k", expression, str(FOLDER),
    ]  # fmt: skip
    environment = {**os.environ, "FUZZ_EXAMPLES": str(examples)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    tried: Counter[str] = Counter()
    for test, rest in zip(_TEST.finditer(done.stdout), _TEST.split(done.stdout)[3::3], strict=False):
        name = f"{Path(test[1]).name}::{test[2]}"
        tried[name] += sum(int(found[1]) + int(found[2]) for found in _TRIED.finditer(rest))
    return tried, "" if done.returncode == 0 else done.stdout.partition("= Hypothesis Statistics")[0] + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--examples", type=int, default=200, help="of each test in one round")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("-k", default="test", help="as of pytest")
    options = parser.parse_args()
    end, seed, failed = time.monotonic() + 60 * options.minutes, options.first_seed, 0
    everything: Counter[str] = Counter()
    while time.monotonic() < end:
        tried, output = run(seed, options.examples, options.k, seconds=3600)
        everything += tried
        if output:
            failed += 1
            print(f"seed {seed} failed:\n{output}", flush=True)
        seed += 1
    for name, count in sorted(everything.items()):
        print(f"{count:>8} {name}")
    print(f"{everything.total():>8} examples in {seed - options.first_seed} rounds, {failed} of them with a failure")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
