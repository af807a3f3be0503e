"""A part of ``make chaos``: every kind of fault of the local runtime once, each at a random moment of a real run."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


def test_every_fault_is_survived_as_promised(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    arguments = ["--parts", "local", "--faults", "9", "--steps", "12", "--results", str(results)]
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    seen = [json.loads(line) for line in results.read_text().splitlines()]
    assert done.returncode == 0 and not any(each["problems"] for each in seen), done.stderr
    assert len({each["fault"] for each in seen}) == len(seen) == 9
