# ruff: noqa: T201 - a command that prints what it found
"""Runs the fuzz tests again and again, each time with another seed, until the time is over.

python benchmarks/fuzz.py --minutes 15 [--examples 200] [-k EXPRESSION]

Prints examples tried per test and every failure, with the seed that repeats it. A crash of the interpreter is a failure
of its round; the tests that ended before it count.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "tests" / "fuzz"
ROUND_SECONDS = 3600.0


def run(seed: int, examples: int, expression: str) -> tuple[Counter[str], str]:
    """Examples by test, and the output if a test failed, the interpreter crashed or the round took too long.

    A test that ended with the interpreter has no examples; the output names it.
    """
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "_fuzz_counts", "--show-capture=no",
        "--tb=short", f"--hypothesis-seed={seed}", "-k", expression, str(FOLDER),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        counts, said = Path(folder, "counts"), Path(folder, "output")
        counts.touch()
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "FUZZ_EXAMPLES": str(examples), "FUZZ_COUNTS": str(counts), "PYTHONPATH": path}
        with said.open("w") as output:
            try:
                ended = subprocess.run(
                    command, env=environment, stdout=output, stderr=output, timeout=ROUND_SECONDS, check=False
                )
                how = "" if ended.returncode == 0 else f"pytest ended with {ended.returncode}"
            except subprocess.TimeoutExpired:
                how = f"no end within {ROUND_SECONDS:g} s"
        found = [json.loads(line) for line in counts.read_text(encoding="utf-8").splitlines()]
        text = said.read_text(errors="replace")
    tried = Counter({test: count for test, count in found if count is not None})
    under_way = [test for test, count in found if count is None and test not in tried]
    return tried, how and f"{text}{' in '.join([how, *under_way])}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15, help="no round starts later; there is at least one")
    parser.add_argument("--examples", type=int, default=200, help="of each test in one round")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("-k", default="test", help="as of pytest")
    options = parser.parse_args()
    end, seed, failed = time.monotonic() + 60 * options.minutes, options.first_seed, 0
    everything: Counter[str] = Counter()
    while seed == options.first_seed or time.monotonic() < end:
        tried, output = run(seed, options.examples, options.k)
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
