"""The engine that answers by script."""

import asyncio
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import EngineContext, EngineError, SamplingParams, WeightUpdate
from agentrl_testing.scripted_config import ScriptedConfig
from agentrl_testing.scripted_engine import ScriptedEngine

STOP = 258


def engine(model: Path | str = "", script: Any = None, **config: Any) -> ScriptedEngine:
    made = ScriptedEngine(ScriptedConfig(**config), EngineContext(str(model)), script)
    asyncio.run(made.start())
    return made


def ask(engine: ScriptedEngine, request_id: str = "a", max_tokens: int = 50) -> Any:
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP,))
    return asyncio.run(engine.generate([1, 2], params, request_id))


def test_turns_come_in_order_for_each_request_and_the_last_one_again(tiny_model: Path) -> None:
    scripted = engine(tiny_model, turns=["a", "b"])
    first, second, third = (ask(scripted).token_ids for _ in range(3))
    assert first != second == third and first[-1] == STOP
    assert ask(scripted, "other").token_ids == first
    asyncio.run(scripted.close_session("a"))
    assert ask(scripted).token_ids == first


def test_an_answer_is_cut_at_max_tokens_and_says_so(tiny_model: Path) -> None:
    scripted = engine(tiny_model, turns=["abc"])
    cut = ask(scripted, max_tokens=2)
    assert len(cut.token_ids) == len(cut.log_probs) == 2 and cut.finish_reason == "length"
    assert ask(scripted, "b").finish_reason == "stop"


def test_a_script_sees_request_turn_and_prompt() -> None:
    seen: list[Any] = []
    scripted = engine(script=lambda *args: seen.append(args) or [5, STOP])
    output = ask(scripted)
    ask(scripted)
    assert seen == [("a", 0, [1, 2]), ("a", 1, [1, 2])]
    assert output.token_ids == [5, STOP] and output.log_probs == [-0.5, -0.5]


def echo(request_id: str, turn: int, prompt_ids: Sequence[int]) -> Sequence[int]:
    return [*prompt_ids, turn]


def test_a_script_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("scripts_of_this_test")
    module.echo = echo  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    made = ScriptedEngine(ScriptedConfig(script="scripts_of_this_test:echo"), EngineContext(""))
    asyncio.run(made.start())
    assert ask(made).token_ids == [1, 2, 0]


def test_versions_follow_the_weights() -> None:
    scripted = engine(script=lambda *args: [5])
    asyncio.run(scripted.update_weights(WeightUpdate(), 3))
    (span,) = ask(scripted).spans
    assert (span.version, span.start, span.end) == (3, 0, 1)


def test_every_so_many_requests_fail() -> None:
    scripted = engine(script=lambda *args: [5], fail_every=2)
    ask(scripted)
    with pytest.raises(EngineError, match="request 2 fails, as scripted"):
        ask(scripted)
    ask(scripted)
