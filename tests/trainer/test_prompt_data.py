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
from agentrl_core.trainer.prompt_data import PromptLoader


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


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"images": ["a.png"], "prompt": "<image>What is this?"}, "row 0: images is not empty, but prompts can hold"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]},
            "row 0: a message has a part of type image",
        ),
        ({"image": {"path": "a.png"}, "prompt": "What is this?"}, "row 0: image is not empty"),
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
