# ruff: noqa: T201 - an example script that people run by hand
"""Writes demonstrations for the prompts of the calculator example: a call, its result, the answer.

Usage: python examples/warm_start/prepare.py [--rows N]
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

HERE = Path(__file__).parent
PROMPTS = HERE.parent / "calculator/data/train.parquet"


def demonstration(question: str, result: str) -> list[dict[str, Any]]:
    """The messages after the question."""
    found = re.search(r"\d+ [+*-] \d+", question)
    assert found is not None, f"no expression in {question!r}"
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": found[0]}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "calculator", "content": result},
        {"role": "assistant", "content": f"#### {result}"},
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=512, help="number of demonstrations")
    rows = pq.read_table(PROMPTS).slice(0, parser.parse_args().rows).to_pylist()
    target = HERE / "data/demonstrations.jsonl"
    target.parent.mkdir(exist_ok=True)
    with target.open("w", encoding="utf-8") as file:
        for row in rows:
            prompt, result = row["prompt"], row["reward_model"]["ground_truth"]
            shown = {"demonstration": demonstration(prompt[-1]["content"], result)}
            kept = {"prompt": prompt, "data_source": row["data_source"], "reward_model": row["reward_model"]}
            file.write(json.dumps(kept | shown) + "\n")
    print(f"{len(rows)} demonstrations in {target}")


if __name__ == "__main__":
    main()
