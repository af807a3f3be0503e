"""What the prompts of a run cost, and what is refused before it starts."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.config import load_config
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
    data = PromptLoader(config, renderer).load()
    rows = [*data.train, *data.validation]
    assert rendered.total() == len(rows) > 1
    assert data.longest_prompt == max(len(renderer.encode(text)) for text in rendered)
