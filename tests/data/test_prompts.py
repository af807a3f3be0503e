"""Prompts from files, and what happens to those that are too long."""

import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pytest

from agentrl_core.api import DataError
from agentrl_core.data.config import PromptsConfig
from agentrl_core.data.prompts import PromptsFromFiles, fit_prompts
from agentrl_core.data.rows import PromptBatch

SCHEMA = {"type": "function", "function": {"name": "calc", "description": "Calculates.", "parameters": {}}}
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


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def load(make_context, *files: Path, **config: Any) -> PromptsFromFiles:
    return PromptsFromFiles(PromptsConfig(**config), make_context(*files))


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "json"])
def test_rows_of_both_formats_are_the_same(make_context, tmp_path: Path, kind: str) -> None:
    dataset = load(make_context, write(tmp_path / f"rows.{kind}", ROWS))
    assert len(dataset) == 2
    assert dataset[0] == {
        "raw_prompt": ROWS[0]["prompt"],
        **{key: ROWS[0][key] for key in ("data_source", "reward_model", "extra_info", "agent_name")},
    }


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_none_that_the_file_format_adds_is_stripped(make_context, tmp_path: Path, kind: str) -> None:
    """Parquet gives every row the union of all rows' keys; a tool must not meet x=None because another row has x."""
    row = load(make_context, write(tmp_path / f"rows.{kind}", ROWS))[1]
    assert row["extra_info"] == {"index": 1, "difficulty": 0.5, "tags": ["x", None]}
    assert row["reward_model"] == {"ground_truth": "2"} and "agent_name" not in row


def test_extra_info_keys_are_the_union_of_all_rows(make_context, tmp_path: Path) -> None:
    """Not those of row 0; and each row gets back the keys that it had."""
    dataset = load(make_context, write(tmp_path / "rows.parquet", ROWS))
    rows = [dataset[0], dataset[1]]
    batch = PromptBatch.sampled(rows, 1, "train", 1, {})
    assert {key for row in batch.rows for key in row} == {
        "raw_prompt", "data_source", "reward_model", "extra_info", "agent_name", "uid", "prompt_index", "sample_index",
    }  # fmt: skip
    assert [{key: row[key] for key in before} for row, before in zip(batch.rows, rows, strict=True)] == rows
    assert "difficulty" in rows[1]["extra_info"] and "agent_name" not in batch.rows[1]


def test_rows_survive_another_process(make_context) -> None:
    import pickle

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


def test_an_empty_file_is_called_empty(make_context, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    with pytest.raises(DataError, match="rows.jsonl: the file is empty; expected one row per line"):
        load(make_context, tmp_path / "rows.jsonl")


def test_several_files_follow_each_other(make_context, tmp_path: Path) -> None:
    files = [write(tmp_path / "a.jsonl", ROWS[:1]), write(tmp_path / "b.parquet", ROWS[1:])]
    dataset = load(make_context, *files)
    assert [dataset[index]["data_source"] for index in range(len(dataset))] == ["a", "b"]


def test_a_text_is_a_user_message(make_context, tmp_path: Path) -> None:
    rows = [{"question": "one?", "reward_model": {"ground_truth": "1"}}]
    dataset = load(make_context, write(tmp_path / "rows.jsonl", rows), prompt_key="question")
    assert dataset[0]["raw_prompt"] == [{"role": "user", "content": "one?"}] and "question" not in dataset[0]


def test_a_row_may_be_changed_by_its_reader(make_context, tmp_path: Path) -> None:
    dataset = load(make_context, write(tmp_path / "rows.jsonl", ROWS))
    dataset[0]["uid"] = "x"
    assert "uid" not in dataset[0]


def test_parquet_without_the_prompt_column(make_context, tmp_path: Path) -> None:
    file = write(tmp_path / "rows.parquet", [{"question": "one?", "answer": "1"}])
    with pytest.raises(DataError) as caught:
        load(make_context, file)
    assert f"{file}: no column 'prompt'; it has question, answer" in str(caught.value)
    assert "data.dataset.config.prompt_key" in str(caught.value)


@pytest.mark.parametrize("reward_model", [None, {}, {"ground_truth": None}, {"style": "rule"}])
def test_a_row_without_ground_truth(make_context, tmp_path: Path, reward_model: Any) -> None:
    file = write(tmp_path / "rows.jsonl", [ROWS[0], {**ROWS[1], "reward_model": reward_model}])
    with pytest.raises(DataError, match="row 1: no reward_model.ground_truth.*require_ground_truth=false"):
        load(make_context, file)
    assert len(load(make_context, file, require_ground_truth=False)) == 2


@pytest.mark.parametrize("prompt", [[], [{"content": "no role"}], ["text"], None])
def test_a_prompt_that_is_not_messages(make_context, tmp_path: Path, prompt: Any) -> None:
    file = write(tmp_path / "rows.jsonl", [{"prompt": prompt, "reward_model": {"ground_truth": "1"}}])
    with pytest.raises(DataError, match="row 0: 'prompt' must be a text or a list of messages"):
        load(make_context, file)


def test_files_that_cannot_be_read(make_context, tmp_path: Path) -> None:
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"not parquet")
    for file, message in (
        (tmp_path / "missing.jsonl", "no such file"),
        (tmp_path / "rows.csv", "unknown file type; allowed are .parquet, .jsonl, .json"),
        (broken, "cannot be read as parquet"),
    ):
        with pytest.raises(DataError, match=message):
            load(make_context, file)


class Rows(list):  # type: ignore[type-arg]
    """A dataset in memory."""


def row(*texts: str) -> dict[str, Any]:
    return {"raw_prompt": [{"role": "user" if i % 2 == 0 else "assistant", "content": t} for i, t in enumerate(texts)]}


@pytest.fixture
def fit(make_context):
    def run(rows: list[dict[str, Any]], most: int, overlong: str, tools: Any = ()) -> tuple[list[dict[str, Any]], Any]:
        context = make_context(most=most, tools=tools)

        def length(each: dict[str, Any]) -> int:
            text = context.renderer.render(each["raw_prompt"], context.tool_schemas(each), generation_prompt=True)
            return len(context.renderer.encode(text))

        kept, longest = fit_prompts(Rows(rows), context, overlong, lambda some: list(map(length, some)))  # type: ignore[arg-type]
        assert longest == max(map(length, kept))
        return kept, length

    return run


SHORT, LONG = row("short"), row("0123456789" * 10)


def test_overlong_prompts_are_dropped_and_counted(fit, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        kept, _ = fit([SHORT, LONG, SHORT], 60, "filter")
    assert kept == [SHORT, SHORT]
    assert "1 of 3 train prompts are longer than data.max_prompt_length=60" in caplog.text


def test_prompt_filter_counts_tool_schemas(fit) -> None:
    _, length = fit([SHORT], 1000, "filter")
    exact = length(SHORT)
    assert fit([SHORT], exact, "filter")[0] == [SHORT]
    with pytest.raises(DataError, match="tool schemas included"):
        fit([SHORT], exact, "filter", tools=[SCHEMA])


def test_a_prompt_longer_than_the_limit_is_an_error_where_asked(fit) -> None:
    with pytest.raises(DataError) as caught:
        fit([SHORT, LONG], 60, "error")
    assert "train row 1 has a prompt of" in str(caught.value) and "data.max_prompt_length=60" in str(caught.value)


def test_nothing_left_is_an_error(fit) -> None:
    with pytest.raises(DataError, match="no train prompt is left"):
        fit([LONG], 60, "filter")


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_truncation_side_drops_that_side(fit, side: str) -> None:
    """``left`` drops the left and keeps the tail."""
    given = row("first question stays", "answer", "START " + "x" * 100 + " END")
    (cut,), length = fit([given], 130, side)
    text = cut["raw_prompt"][2]["content"]
    assert length(cut) == 130
    assert ("START" in text, "END" in text) == {
        "left": (False, True), "right": (True, False), "middle": (True, True),
    }[side]  # fmt: skip
    assert cut["raw_prompt"][:2] == given["raw_prompt"][:2] and given["raw_prompt"][2]["content"].startswith("START")


def test_cutting_counts_tool_schemas_too(fit) -> None:
    (cut,), length = fit([LONG], 200, "right", tools=[SCHEMA])
    assert length(cut) == 200 < length(LONG) and LONG["raw_prompt"][0]["content"].startswith(
        cut["raw_prompt"][0]["content"]
    )


@pytest.mark.parametrize("text", ["日本語" * 30, "é" * 80])
def test_a_cut_inside_a_character_stays_within_the_limit(fit, text: str) -> None:
    for most in range(60, 70):
        (cut,), length = fit([row(text)], most, "left")
        assert most - 4 <= length(cut) <= most


def test_what_cannot_be_cut_enough_is_an_error(fit) -> None:
    with pytest.raises(DataError, match="even with an empty last user message the prompt has"):
        fit([row("x" * 100, "a", "y")], 60, "left")
    with pytest.raises(DataError, match="a content that is not a text cannot be cut"):
        fit([{"raw_prompt": [{"role": "user", "content": ["part " * 30]}]}], 60, "left")
