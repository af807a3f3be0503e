"""Turns the questions of Search-R1 into rows: question and accepted answers, with an instruction for the answer.

    python examples/search/convert.py train.parquet examples/search/data/real-train.jsonl

The first file is one of https://huggingface.co/datasets/PeterJinGo/nq_hotpotqa_train.
"""

import json
import sys

import pyarrow.parquet as pq

INSTRUCTION = (
    "Answer the question. Search as often as you need. End with the answer alone, a few words, between <answer> and "
    "</answer>."
)


def main(source: str, target: str) -> None:
    table = pq.read_table(source, columns=["question", "golden_answers", "data_source"])
    with open(target, "w", encoding="utf-8") as rows:
        for index, row in enumerate(table.to_pylist()):
            converted = {
                "data_source": row["data_source"],
                "prompt": [{"role": "user", "content": f"{INSTRUCTION}\n\n{row['question']}"}],
                "reward_model": {"ground_truth": list(row["golden_answers"])},
                "extra_info": {"index": index},
            }
            rows.write(json.dumps(converted) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
