import pickle
from pathlib import Path
from typing import Any

import datasets
import pytest

from agentrl_core.data.rows import PromptBatch, fingerprint
from agentrl_dataset_prompts.config import PromptsConfig
from agentrl_dataset_prompts.prompts import PromptsFromFiles

ROWS: list[dict[str, Any]] = [
    {
        "data_source": "a",
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}],
        "reward_model": {"ground_truth": "1", "style": "rule"},
        "extra_info": {"index": 0, "tools_kwargs": {"calc": {"create_kwargs": {"x": 1}}}},
        "agent_name": "tool_agent",
    },
    {
        "data_source": "b",
        "prompt": [{"role": "user", "content": "two"}],
        "reward_model": {"ground_truth": "2", "style": None},
        "extra_info": {"index": 1, "difficulty": 0.5, "tags": ["x", None]},
        "agent_name": None,
    },
]


def test_extra_info_keys_are_the_union_of_all_rows(
    make_context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of row 0; and each row gets back the keys that it had."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "rows.parquet"))
    dataset = PromptsFromFiles(PromptsConfig(), make_context(tmp_path / "rows.parquet"))
    rows = [dataset[0], dataset[1]]
    batch = PromptBatch.sampled(rows, 1, "train", 1, {})
    assert {key for row in batch.rows for key in row} == {
        "raw_prompt", "data_source", "reward_model", "extra_info", "agent_name", "uid", "prompt_index", "sample_index",
    }  # fmt: skip
    assert [{key: row[key] for key in before} for row, before in zip(batch.rows, rows, strict=True)] == rows
    assert "difficulty" in rows[1]["extra_info"] and "agent_name" not in batch.rows[1]


def test_rows_survive_another_process() -> None:
    batch = PromptBatch([{"a": 1}, {"b": [2]}], 1, "train", {"temperature": 1.0})
    assert pickle.loads(pickle.dumps(batch)) == batch


def test_the_samples_of_a_step_are_spread_over_the_workers_in_order() -> None:
    batch = PromptBatch.sampled([{"a": 1}, {"a": 2}], 3, "train", 2, {"temperature": 0.5})
    assert [row["uid"] for row in batch.rows] == ["train-000003-00000"] * 2 + ["train-000003-00001"] * 2
    assert [(row["prompt_index"], row["sample_index"]) for row in batch.rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    chunks = batch.chunk(3)
    assert [len(chunk) for chunk in chunks] == [2, 1, 1] and [row for each in chunks for row in each.rows] == batch.rows
    assert {(chunk.step, chunk.split, chunk.sampling["temperature"]) for chunk in chunks} == {(3, "train", 0.5)}
    assert [len(chunk) for chunk in batch.chunk(9)] == [1, 1, 1, 1]


def test_a_fingerprint_notices_other_prompts_and_another_order() -> None:
    a, b = ({"raw_prompt": [{"role": "user", "content": text}]} for text in "ab")
    assert fingerprint([a, b]) == fingerprint([a, b])
    assert len({fingerprint([a, b]), fingerprint([b, a]), fingerprint([a]), fingerprint([])}) == 4
