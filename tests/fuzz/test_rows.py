"""Any file of rows: its prompts are loaded, or the first bad row is named."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentrl_core.api import AgentRLError
from agentrl_core.config import load_config
from agentrl_core.data.chat_template import ChatTemplateRenderer
from agentrl_core.data.renderer import HFChatRenderer
from agentrl_core.trainer.prompt_data import PromptData, PromptLoader
from tests.conftest import TinyRuns
from tests.fuzz.fuzzing import changed, corpus, fuzz, mutated, outcome

ROWS = [json.loads(line) for text in corpus("rows") for line in text.splitlines()]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("rows")
    config = load_config(TinyRuns(tiny_model, folder)({"rollout.engine": {"name": "scripted"}}))
    renderer = ChatTemplateRenderer.of(HFChatRenderer.from_config(config.model))
    file = folder / "fuzzed.jsonl"

    def load_rows(text: str, streaming: bool) -> PromptData:
        file.write_text(text, encoding="utf-8", errors="surrogatepass")
        data = replace(config.data, train_files=[str(file)], streaming=streaming)
        return PromptLoader(replace(config, data=data), renderer).load()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        yield load_rows


def check(load: Any, text: str, streaming: bool) -> None:
    data = outcome(lambda: load(text, streaming), AgentRLError)
    if not isinstance(data, AgentRLError):
        for row in data.batch(1):
            json.dumps(row["raw_prompt"], default=str)


@fuzz
@given(mutated(corpus("rows")), st.booleans())
def test_any_text(load: Any, text: str, streaming: bool) -> None:
    check(load, text, streaming)


@fuzz
@example(rows=[{"prompt": None, "reward_model": {"\0": {}}}], streaming=False)
@example(rows=[[None, [], {}]], streaming=False)
@given(st.lists(st.sampled_from(ROWS).flatmap(changed), min_size=1, max_size=3), st.booleans())
def test_any_row(load: Any, rows: list[Any], streaming: bool) -> None:
    check(load, "\n".join(map(json.dumps, rows)), streaming)
