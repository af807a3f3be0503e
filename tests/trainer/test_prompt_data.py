"""What the prompts of a run cost, and what is refused before it starts."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import ConfigError, DataError
from agentrl_core.config import load_config
from agentrl_core.data.chat_template import ChatTemplateRenderer
from agentrl_core.data.renderer import HFChatRenderer
from agentrl_core.data.streaming import StreamedRows
from agentrl_core.runs.records import read_rollouts
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.trainer.prompt_data import PromptData, PromptLoader


def test_every_prompt_is_rendered_once_before_a_run(
    tiny_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: Counter[str] = Counter()
    render = HFChatRenderer.render

    def counting(self: HFChatRenderer, messages: Any, *args: Any, **kwargs: Any) -> str:
        text = render(self, messages, *args, **kwargs)
        rendered[text] += 1
        return text

    config = load_config(tiny_run({"rollout.engine": {"name": "scripted"}}))
    renderer = HFChatRenderer.from_config(config.model)
    assert renderer.stop_token_ids, "reading the stop tokens renders a probe; not to be counted below"
    monkeypatch.setattr(HFChatRenderer, "render", counting)
    data = PromptLoader(config, ChatTemplateRenderer.of(renderer)).load()
    rows = [*data.train, *data.validation]
    assert rendered.total() == len(rows) > 1
    assert data.longest_prompt == max(len(renderer.encode(text)) for text in rendered)


OF_TEXT = "row 0: it has images, but the model of model.path can be shown none: transformers finds no processor"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"images": ["a.png"], "prompt": "<image>What is this?"},
            OF_TEXT,
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]},
            OF_TEXT,
        ),
        (
            {"image": {"path": "a.png"}, "prompt": "What is this?"},
            OF_TEXT,
        ),
    ],
)
def test_rows_with_images_do_not_train_as_text(
    tiny_run: Callable[..., Path], tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    file = tmp_path / "images.jsonl"
    file.write_text(json.dumps({**row, "data_source": "x", "reward_model": {"ground_truth": "4"}}) + "\n")
    config = load_config(tiny_run({"rollout.engine": {"name": "scripted"}, "data.train_files": [str(file)]}))
    with pytest.raises(DataError, match=message):
        PromptLoader(config, ChatTemplateRenderer.of(HFChatRenderer.from_config(config.model))).load()


@pytest.mark.parametrize(
    ("split", "sampling", "message"),
    [
        (
            "train",
            {"max_tokens": 0},
            r"sampling.max_tokens \(data: train row 0\): expected an integer >= 1 or null, found 0",
        ),
        ("train", {"stop": ["x", ""]}, "data: train row 0: extra_info.sampling.stop: .* found an empty one"),
        ("train", {"seed": "7"}, r"sampling.seed \(data: train row 0\): expected an integer .*found '7'"),
        (
            "train",
            {"tempreature": 1},
            "has tempreature; allowed with this engine: max_tokens, stop, seed, top_p, top_k;",
        ),
        ("train", {"temperature": 1.0}, "has temperature; .* validation rows may also have temperature"),
        ("train", {"min_p": 0.5}, "has min_p; allowed with this engine: max_tokens"),
        ("train", [1], r"extra_info.sampling is \[1\]; allowed is a mapping with max_tokens"),
        ("validation", {"temperature": -1}, r"sampling.temperature \(data: validation row 0\): expected a number >= 0"),
        ("validation", {"temperature": 0.001}, "validation row 0: extra_info.sampling: temperature is 0.001; allowed"),
        ("train", {"top_k": 5}, "with the run's parameters the row has top_p=0.9, top_k=5 and min_p=0.0; this engine"),
    ],
)
def test_sampling_parameters_of_a_row_are_checked(tiny_run: Any, split: str, sampling: Any, message: str) -> None:
    (row,) = tiny_run.rows(1)
    tiny_run.write_rows("own.jsonl", [{**row, "extra_info": {**row["extra_info"], "sampling": sampling}}])
    run = {"rollout.engine": {"name": "scripted"}, "rollout.sampling": {"top_p": 0.9}}
    config = load_config(tiny_run({**run, f"data.{split}_files": ["own.jsonl"]}))
    with pytest.raises(DataError, match=message):
        PromptLoader(config, ChatTemplateRenderer.of(HFChatRenderer.from_config(config.model))).load()


def test_a_row_samples_as_it_says(fit: Callable[..., RunDir], tiny_run: Any) -> None:
    (tiny_run.folder / "same.py").write_text("def same(trajectory):\n    return 1.0\n")
    rows = tiny_run.rows(2)
    rows[0]["extra_info"]["sampling"] = {"seed": 7, "max_tokens": 3}
    validation = [{**row, "extra_info": {"sampling": {"temperature": 0.0}}} for row in tiny_run.rows(1)]
    run = fit(
        {
            "data.sampler": "sequential",
            "data.validation_files": [str(tiny_run.write_rows("own.jsonl", validation))],
            "reward.functions": [{"name": "./same.py:same", "isolation": "inline"}],
            "trainer.validation": {"interval": 2, "before": False, "n": 2, "greedy": False},
        },
        rows,
    )
    said = [[record.response_ids for record in read_rollouts(run.rollout_file(step, "train"))] for step in (1, 2)]
    # Equal rewards train nothing, so the model is the same in both steps.
    assert said[0][:2] == said[1][:2] and said[0][2:] != said[1][2:], "only the first row has a seed"
    assert said[0][0] != said[0][1] and [len(ids) for ids in said[0]] == [3, 3, 8, 8]
    validated = list(read_rollouts(run.rollout_file(2, "validation")))
    assert len(validated) == 2
    assert validated[0].response_ids == validated[1].response_ids, "temperature 0"


def test_a_pattern_stands_for_its_files_in_alphabetical_order(tiny_run: Any) -> None:
    path = tiny_run({"rollout.engine": {"name": "scripted"}, "data.train_files": ["part-*.jsonl"]})
    rows = tiny_run.rows(3)
    for name, part in (("part-b.jsonl", rows[2:]), ("part-a.jsonl", rows[:2])):
        tiny_run.write_rows(name, part)
    config = load_config(path)
    data = PromptLoader(config, ChatTemplateRenderer.of(HFChatRenderer.from_config(config.model))).load()
    assert [row["extra_info"]["index"] for row in data.train] == [0, 1, 2]


def test_a_pattern_without_a_file_names_the_key(tiny_run: Any) -> None:
    with pytest.raises(ConfigError, match=r"data.train_files.0 .*: no such file: .*none-\*.jsonl"):
        load_config(tiny_run({"data.train_files": ["none-*.jsonl"]}))


def streamed(tiny_run: Any, rows: list[dict[str, Any]], changes: dict[str, Any] | None = None) -> PromptData:
    """Training rows of a run that streams them."""
    tiny_run.write_rows("many.jsonl", rows)
    settings = {"rollout.engine": {"name": "scripted"}, "data.streaming": True, "data.train_files": ["many.jsonl"]}
    config = load_config(tiny_run({**settings, **(changes or {})}))
    return PromptLoader(config, ChatTemplateRenderer.of(HFChatRenderer.from_config(config.model))).load()


def drawn(data: PromptData, steps: range) -> list[list[int]]:
    return [[row["extra_info"]["index"] for row in data.batch(step)] for step in steps]


def test_streamed_rows_are_those_that_are_read_at_once_in_the_same_order(tiny_run: Any) -> None:
    rows = tiny_run.rows(1200)
    data, eager = streamed(tiny_run, rows), streamed(tiny_run, rows, {"data.streaming": False})
    assert len(data.train) == len(eager.train) == 1200
    assert [data.batch(step) for step in range(1, 9)] == [eager.batch(step) for step in range(1, 9)]
    assert drawn(streamed(tiny_run, rows), range(5, 9)) == drawn(data, range(5, 9)), "the order depends on the step"


def test_streamed_rows_that_do_not_fit_give_their_place_to_the_next(
    tiny_run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = tiny_run.rows(6)
    for number in (1, 2, 5):
        rows[number]["prompt"][0]["content"] *= 100
    data = streamed(tiny_run, rows, {"data.sampler": "sequential", "data.batch_size": 6})
    assert drawn(data, range(1, 2)) == [[0, 3, 3, 3, 4, 0]]
    assert caplog.text.count("is longer than data.max_prompt_length; the next row that fits takes its place") == 1
    for row in rows:
        row["prompt"][0]["content"] *= 100
    with pytest.raises(DataError, match="no train prompt is left: all 6 rows are longer"):
        streamed(tiny_run, rows)


def test_a_streamed_row_is_prepared_once_each_time_it_is_read() -> None:
    prepared: list[int] = []
    rows = StreamedRows([{"n": 0}, {"n": 1}], lambda index, row: prepared.append(index) or row)  # type: ignore[arg-type, func-returns-value]
    assert rows[1] == {"n": 1} and prepared == [1]


@pytest.mark.parametrize("overlong", ["left", "error"])
def test_streamed_rows_are_cut_or_refused_as_others_are(tiny_run: Any, overlong: str) -> None:
    rows = tiny_run.rows(1100)
    rows[1050]["prompt"][0]["content"] *= 100
    data = streamed(tiny_run, rows, {"data.overlong_prompts": overlong})
    if overlong == "error":
        with pytest.raises(DataError, match="data: train row 1050 has a prompt of .* tokens"):
            data.train[1050]
    else:
        found, whole = data.train[1050]["raw_prompt"][0]["content"], rows[1050]["prompt"][0]["content"]
        assert len(found) < len(whole) and whole.endswith(found)


def test_a_bad_streamed_row_is_named_when_its_turn_comes_and_one_of_the_first_before_the_run(tiny_run: Any) -> None:
    rows = tiny_run.rows(1100)
    del rows[1050]["reward_model"]["ground_truth"]
    data = streamed(tiny_run, rows)
    with pytest.raises(DataError, match=r"many.jsonl, row 1050: no reward_model.ground_truth"):
        data.train[1050]
    del rows[7]["reward_model"]["ground_truth"]
    with pytest.raises(DataError, match=r"many.jsonl, row 7: no reward_model.ground_truth"):
        streamed(tiny_run, rows)


def test_the_fingerprint_of_streamed_rows_sees_their_number_and_prompts(tiny_run: Any) -> None:
    rows = tiny_run.rows(30)
    prints = {streamed(tiny_run, rows).fingerprint(), streamed(tiny_run, rows[:29]).fingerprint()}
    prints.add(streamed(tiny_run, rows[::-1]).fingerprint())
    assert len(prints) == 3
    assert streamed(tiny_run, rows).fingerprint() in prints


def test_tools_that_only_later_streamed_rows_may_name_are_a_warning(
    tiny_run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"tools": [{"name": "calculator"}], "rollout.agent.loops": ["single_turn", "tool_agent"]}
    with pytest.raises(ConfigError, match="nothing can reach 'calculator'"):
        streamed(tiny_run, tiny_run.rows(10), changes)
    streamed(tiny_run, tiny_run.rows(1001), changes)
    assert "in the first 1000 training rows, tools: nothing can reach 'calculator'" in caplog.text
