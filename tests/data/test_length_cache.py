"""Lengths of prompts are those of an earlier run only where nothing has changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.config import load_config
from agentrl_core.data import length_cache
from agentrl_core.data.chat_template import ChatTemplateRenderer
from agentrl_core.data.length_cache import cached_lengths
from agentrl_core.data.renderer import HFChatRenderer
from agentrl_core.trainer.prompt_data import PromptLoader

PROMPTS = [[[{"role": "user", "content": str(number)}], []] for number in range(1000)]


class Work:
    """Measures in ``folder`` with the tokenizer in ``model``, and counts how often."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model, self.measured = folder / "runs" / ".prompts", folder / "model", 0
        self.model.mkdir()
        (self.model / "tokenizer.json").write_text("{}")

    def __call__(self, prompts: Any = PROMPTS, settings: Any = None) -> bool:
        """Whether the prompts were measured."""
        before = self.measured

        def measure() -> list[int]:
            self.measured += 1
            return [len(prompt[0][0]["content"]) for prompt in prompts]

        found = cached_lengths(self.folder, self.model, settings, iter(prompts), measure)
        assert found == [len(prompt[0][0]["content"]) for prompt in prompts]
        return self.measured > before


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(tmp_path)


def test_what_was_measured_is_not_measured_again(work: Work) -> None:
    assert [work(), work()] == [True, False]
    changed = [*PROMPTS[:-1], [[{"role": "user", "content": "x"}], []]]
    assert [work(changed), work(PROMPTS[::-1]), work(settings={"a": 1}), work(settings={"a": 2})] == [True] * 4
    assert not work()
    assert not list(work.folder.glob("*.part"))


def test_a_changed_tokenizer_or_template_counts(work: Work) -> None:
    assert work()
    (work.model / "model.safetensors").write_bytes(b"other weights")
    assert not work()
    (work.model / "tokenizer.json").write_text('{"a": 1}')
    assert work()
    (work.model / "chat_template.jinja").write_text("{{ messages }}")
    assert work()


def test_a_template_that_writes_the_day_is_measured_every_day(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    (work.model / "chat_template.jinja").write_text("{{ strftime_now('%d %b') }}")
    assert [work(), work()] == [True, False]
    monkeypatch.setattr(length_cache, "date", type("Later", (), {"today": staticmethod(lambda: "tomorrow")}))
    assert work()


def test_a_damaged_file_is_measured_again(work: Work) -> None:
    work()
    (file,) = work.folder.iterdir()
    for damage in (file.read_bytes()[:100], b""):
        file.write_bytes(damage)
        assert [work(), work()] == [True, False]


def test_a_folder_that_cannot_be_written_costs_only_time(work: Work, caplog: pytest.LogCaptureFixture) -> None:
    work.folder.parent.write_text("a file")
    assert [work(), work()] == [True, True]
    assert "the lengths of prompts cannot be kept in" in caplog.text


def test_few_prompts_leave_no_file(work: Work) -> None:
    assert work(PROMPTS[:999])
    assert not work.folder.exists()


def test_a_second_start_renders_no_prompt(
    tiny_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "x" * (number % 40)}], "reward_model": {"ground_truth": "4"}}
        for number in range(1000)
    ]
    (tmp_path / "many.jsonl").write_text("\n".join(map(json.dumps, rows)))
    changes = {"data.train_files": [str(tmp_path / "many.jsonl")], "trainer.output_dir": str(tmp_path / "runs")}
    config = load_config(tiny_run({"rollout.engine": {"name": "scripted"}, **changes}))
    rendered = []
    render = HFChatRenderer.render
    monkeypatch.setattr(HFChatRenderer, "render", lambda *args, **kwargs: rendered.append(1) or render(*args, **kwargs))

    def load() -> Any:
        data = PromptLoader(config, ChatTemplateRenderer.of(HFChatRenderer.from_config(config.model))).load()
        return data.train, data.longest_prompt

    first, count = load(), len(rendered)
    assert load() == first
    assert count >= 1000 and len(rendered) - count < 20
