"""The contract of prompt datasets."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import DatasetContext, PromptDataset
from agentrl_testing.contracts.case import PluginCase, PluginContract
from agentrl_testing.loops import WordRenderer


@dataclass(kw_only=True)
class DatasetCase(PluginCase):
    """A dataset under test.

    Args:
        files: name to content of the files that it reads; empty for one that makes its rows itself.
        rows: how many there must be, or None if any number above 0 will do.
        max_prompt_length: tokens; a word is a token here.
    """

    files: Mapping[str, str | bytes] = field(default_factory=dict)
    rows: int | None = None
    max_prompt_length: int = 10_000

    def make(self, folder: Path) -> PromptDataset:
        """The dataset as the trainer builds it, with its files in ``folder``."""
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        paths = [str(folder / name) for name in self.files]
        dataset: PromptDataset = self.build(
            DatasetContext(paths, "train", WordRenderer(), lambda row: (), self.max_prompt_length)
        )
        return dataset


class DatasetContract(PluginContract):
    """What every prompt dataset must do."""

    kind = "dataset"

    def test_rows_are_prompts(self, plugin: DatasetCase, tmp_path: Path) -> None:
        """Each has messages that a chat template can render."""
        dataset = plugin.make(tmp_path)
        expected = f"{plugin.rows}" if plugin.rows is not None else "at least 1"
        assert len(dataset) == (plugin.rows or len(dataset)) > 0, f"{len(dataset)} rows, expected {expected}"
        for index in range(min(len(dataset), 50)):
            row = dataset[index]
            messages = row.get("raw_prompt")
            assert isinstance(messages, list) and messages, f"row {index}: raw_prompt is {messages!r}, not messages"
            for message in messages:
                assert isinstance(message.get("role"), str), f"row {index}: a message has no role: {message}"
                assert "content" in message, f"row {index}: a message has no content: {message}"
            for key, kind in (("data_source", str), ("agent_name", str), ("extra_info", dict), ("reward_model", dict)):
                value = row.get(key)
                assert value is None or isinstance(value, kind), f"row {index}: {key} is {value!r}, not {kind.__name__}"

    def test_rows_are_the_same_every_time(self, plugin: DatasetCase, tmp_path: Path) -> None:
        """In any order, and in another process: a resumed run draws the same prompts."""
        dataset, again = plugin.make(tmp_path), plugin.make(tmp_path)
        indices = range(min(len(dataset), 20))
        forward = [printed(dataset[index]) for index in indices]
        backward = [printed(dataset[index]) for index in reversed(indices)][::-1]
        assert forward == backward, "a row differs when it is read again"
        assert forward == [printed(again[index]) for index in indices], "a dataset built again has other rows"

    def test_an_index_beyond_the_end_is_an_error(self, plugin: DatasetCase, tmp_path: Path) -> None:
        """Not a row of something else."""
        dataset = plugin.make(tmp_path)
        with pytest.raises(IndexError):
            dataset[len(dataset)]


def printed(row: dict[str, Any]) -> str:
    """A row as text, for comparison."""
    return json.dumps(row, sort_keys=True, default=repr)
