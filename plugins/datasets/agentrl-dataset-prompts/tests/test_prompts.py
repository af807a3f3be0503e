import io
import json
import re
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pytest
from PIL import Image

from agentrl_core.api import DataError, DatasetContext
from agentrl_core.engine_kit.images import read_image
from agentrl_dataset_prompts.config import PromptsConfig
from agentrl_dataset_prompts.prompts import PromptsFromFiles
from agentrl_testing.loops import WordRenderer

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


def load(*files: Path | str, **config: Any) -> PromptsFromFiles:
    context = DatasetContext([str(file) for file in files], "train", WordRenderer(), lambda row: (), 1000)
    return PromptsFromFiles(PromptsConfig(**config), context)


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "json"])
def test_rows_of_both_formats_are_the_same(tmp_path: Path, kind: str) -> None:
    dataset = load(write(tmp_path / f"rows.{kind}", ROWS))
    assert len(dataset) == 2
    assert dataset[0] == {
        "raw_prompt": ROWS[0]["prompt"],
        **{key: ROWS[0][key] for key in ("data_source", "reward_model", "extra_info", "agent_name")},
    }


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_none_that_the_file_format_adds_is_stripped(tmp_path: Path, kind: str) -> None:
    """Parquet gives every row the union of all rows' keys; a tool must not meet x=None because another row has x."""
    row = load(write(tmp_path / f"rows.{kind}", ROWS))[1]
    assert row["extra_info"] == {"index": 1, "difficulty": 0.5, "tags": ["x", None]}
    assert row["reward_model"] == {"ground_truth": "2"} and "agent_name" not in row


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    with pytest.raises(DataError, match="rows.jsonl: the file is empty; expected one row per line"):
        load(tmp_path / "rows.jsonl")


def test_several_files_follow_each_other(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.jsonl", ROWS[:1]), write(tmp_path / "b.parquet", ROWS[1:])]
    dataset = load(*files)
    assert [dataset[index]["data_source"] for index in range(len(dataset))] == ["a", "b"]


def test_addresses_are_read_with_their_patterns(tmp_path: Path) -> None:
    folder = f"memory://{tmp_path.name}"
    for number, row in enumerate(ROWS):
        fsspec.filesystem("memory").pipe(f"{folder}/part-{number}.jsonl", json.dumps(row).encode())
    dataset = load(f"{folder}/part-*.jsonl")
    assert [dataset[index]["data_source"] for index in range(len(dataset))] == ["a", "b"]
    assert len(load(f"{folder}/part-1.jsonl")) == 1


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("memory://nowhere/train.jsonl", "no such file. Check the address"),
        ("memory://nowhere/*.parquet", "no such file. Check the address"),
        ("unknown://bucket/train.jsonl", "cannot be reached: ValueError: Protocol not known"),
    ],
)
def test_an_address_without_a_file_names_the_key_and_the_address(address: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        load(address)
    assert f"data.train_files: {address}: {message}" in str(caught.value)


def test_a_text_is_a_user_message(tmp_path: Path) -> None:
    rows = [{"question": "one?", "reward_model": {"ground_truth": "1"}}]
    dataset = load(write(tmp_path / "rows.jsonl", rows), prompt_key="question")
    assert dataset[0]["raw_prompt"] == [{"role": "user", "content": "one?"}] and "question" not in dataset[0]


def test_a_row_may_be_changed_by_its_reader(tmp_path: Path) -> None:
    dataset = load(write(tmp_path / "rows.jsonl", ROWS))
    dataset[0]["uid"] = "x"
    assert "uid" not in dataset[0]


def test_parquet_without_the_prompt_column(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.parquet", [{"question": "one?", "answer": "1"}])
    with pytest.raises(DataError) as caught:
        load(file)
    assert f"{file}: no column 'prompt'; it has question, answer" in str(caught.value)
    assert "data.dataset.config.prompt_key" in str(caught.value)


@pytest.mark.parametrize("reward_model", [None, {}, {"ground_truth": None}, {"style": "rule"}])
def test_a_row_without_ground_truth(tmp_path: Path, reward_model: Any) -> None:
    file = write(tmp_path / "rows.jsonl", [ROWS[0], {**ROWS[1], "reward_model": reward_model}])
    with pytest.raises(DataError, match="row 1: no reward_model.ground_truth.*require_ground_truth=false"):
        load(file)[1]
    assert load(file, require_ground_truth=False)[1]["raw_prompt"] == ROWS[1]["prompt"]


def test_rows_are_the_same_in_any_order_over_several_files(tmp_path: Path) -> None:
    rows = [{**ROWS[0], "extra_info": {"index": number}} for number in range(2500)]
    files = [write(tmp_path / "a.jsonl", rows[:1100]), write(tmp_path / "b.parquet", rows[1100:])]
    dataset = load(*files)
    for order in (range(2500), range(2499, -1, -7), [1099, 1100, 1101, 0, 1, 2, 2499]):
        assert [dataset[number]["extra_info"]["index"] for number in order] == list(order)
    for number in (-1, 2500):
        with pytest.raises(IndexError):
            dataset[number]


@pytest.mark.parametrize("prompt", [[], [{"content": "no role"}], ["text"], None])
def test_a_prompt_that_is_not_messages(tmp_path: Path, prompt: Any) -> None:
    file = write(tmp_path / "rows.jsonl", [{"prompt": prompt, "reward_model": {"ground_truth": "1"}}])
    with pytest.raises(DataError, match="row 0: 'prompt' must be a text or a list of messages"):
        load(file)[0]


def test_an_array_over_several_lines_is_read_with_its_nulls(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(ROWS, indent=2), encoding="utf-8")
    assert "\n        null\n" in file.read_text(encoding="utf-8")
    assert load(file)[1]["extra_info"]["tags"] == ["x", None]


@pytest.mark.parametrize(
    ("text", "line"),
    [("null", 1), ("\n null \n{}", 2), ("{}\nnull\n", 2), ("null{}", 1), ("{}\n\tnull {}", 2), ("{} null", 1),
     ('{"a": "}"}\n{"a": "\\""} null', 2), ("nullx", 1), ("\ufeffnull", 1)],
)  # fmt: skip
@pytest.mark.parametrize("is_local", [True, False])
def test_a_line_that_is_null_is_an_error_and_not_a_crash(tmp_path: Path, text: str, line: int, is_local: bool) -> None:
    file = f"{tmp_path}/rows.jsonl" if is_local else f"memory:///{tmp_path.name}/rows.jsonl"
    with fsspec.open(file, "wb") as handle:
        handle.write(text.encode())
    with pytest.raises(DataError, match=rf"{re.escape(file)}, line {line}: found null; expected an object"):
        load(file)


def test_an_array_with_null_in_place_of_a_row_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text("[{}, null]")
    with pytest.raises(DataError, match="rows.json, element 1 of the array: found null; expected an object"):
        load(tmp_path / "rows.json")


@pytest.mark.parametrize("text", ["a } null", '\\" } null', "{\n}\nnull"])
def test_a_text_about_null_is_no_null(tmp_path: Path, text: str) -> None:
    rows = [{**row, "note": text} for row in ROWS]
    assert load(write(tmp_path / "rows.jsonl", rows))[1]["note"] == text


def test_rows_that_cannot_be_decoded_are_named(tmp_path: Path) -> None:
    """``datasets`` drops the key from the table, and then looks for it."""
    row = {"prompt": None, "reward_model": {"\0": {}}}
    with pytest.raises(DataError, match="rows.jsonl, rows 0 to 0: cannot be decoded: KeyError"):
        load(write(tmp_path / "rows.jsonl", [row]))[0]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"not parquet")
    for file, message in (
        (tmp_path / "missing.jsonl", "no such file"),
        (tmp_path / "rows.csv", "unknown file type; allowed are .parquet, .jsonl, .json"),
        (broken, "cannot be read as parquet"),
    ):
        with pytest.raises(DataError, match=message):
            load(file)


def png(color: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (28, 56), color).save(file, "PNG")
    return file.getvalue()


def colors(values: Any, folder: Path) -> list[str]:
    """Of images, as a run reads them."""
    known = {read_image(png(color)).name: color for color in ("red", "blue")}
    return [known[read_image(value, folders=[folder]).name] for value in values]


VERL: list[dict[str, Any]] = [
    {
        "data_source": "geo",
        "prompt": [{"role": "user", "content": "<image><image>Which is larger?"}],
        "reward_model": {"ground_truth": "1", "style": "rule"},
        "images": [png("red"), png("blue")],
    }
]


@pytest.mark.parametrize("form", ["bytes", "datasets", "one", "verl's key"])
def test_images_of_parquet_are_not_decoded_when_rows_are_read(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = VERL
    key = "pictures" if form == "verl's key" else "image" if form == "one" else "images"
    images: Any = [{"bytes": each, "path": None} for each in row["images"]]
    feature: Any = datasets.List(datasets.Image())
    if form == "one":
        row, images, feature = {**row, "prompt": [{"role": "user", "content": "What?"}]}, images[0], datasets.Image()
    table = datasets.Dataset.from_list([{**{k: v for k, v in row.items() if k != "images"}, key: images}])
    if form != "bytes":
        table = table.cast_column(key, feature)
    table.to_parquet(str(tmp_path / "rows.parquet"))
    dataset = load(tmp_path / "rows.parquet", image_key="pictures" if form == "verl's key" else "images")
    with monkeypatch.context() as undecoded:
        undecoded.setattr(datasets.Image, "decode_example", None)
        read = dataset[0]
    if form == "one":
        assert colors([read["image"]], tmp_path) == ["red"]
    else:
        assert colors(read["images"], tmp_path) == ["red", "blue"]


def test_images_within_messages_are_not_decoded_either(tmp_path: Path) -> None:
    part = {"type": datasets.Value("string"), "text": datasets.Value("string"), "image": datasets.Image()}
    content = [{"type": "text", "text": "What?"}, {"type": "image", "image": {"bytes": png("blue"), "path": None}}]
    features = datasets.Features(
        {"prompt": datasets.List({"role": datasets.Value("string"), "content": datasets.List(part)})}
    )
    rows = [{"prompt": [{"role": "user", "content": content}]}]
    datasets.Dataset.from_list(rows, features=features).to_parquet(str(tmp_path / "rows.parquet"))
    dataset = load(tmp_path / "rows.parquet", require_ground_truth=False)
    text, image = dataset[0]["raw_prompt"][0]["content"]
    assert text == {"type": "text", "text": "What?"} and colors([image["image"]], tmp_path) == ["blue"]


def test_json_lines_name_images_by_paths_next_to_them(tmp_path: Path) -> None:
    (tmp_path / "charts").mkdir()
    (tmp_path / "charts" / "1.png").write_bytes(png("red"))
    row = {"prompt": "See <image> here", "images": ["charts/1.png"], "reward_model": {"ground_truth": "1"}}
    dataset = load(write(tmp_path / "rows.jsonl", [row]))
    assert dataset[0]["images"] == ["charts/1.png"]
    assert colors(dataset[0]["images"], tmp_path) == ["red"]


def test_few_rows_with_images_are_read_ahead(tmp_path: Path) -> None:
    """A row may have megabytes of them."""
    rows = [{**VERL[0], "images": [{"bytes": b"x"}]} for _ in range(40)]
    dataset = load(write(tmp_path / "rows.parquet", rows))
    assert dataset[0]["images"] == [{"bytes": b"x"}] and len(dataset._ahead) == 16
