"""The client of a named engine."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl_core.api import DeadlineError, EngineError
from agentrl_core.serving.clients import RoutedClient


def test_a_named_engine_that_answers_too_late_has_failed(monkeypatch: pytest.MonkeyPatch, tiny_model: Any) -> None:
    """A tool that asks it would otherwise show the policy its deadline, as if that were what the tool answers."""
    closed: list[str] = []

    class Silent:
        async def generate(self, *request: Any) -> None:
            raise DeadlineError("request 7: no answer within 0.5 s")

        async def close_session(self, session_id: str) -> None:
            closed.append(session_id)

    monkeypatch.setattr(RoutedClient, "router", Silent())
    slot: Any = SimpleNamespace(model=str(tiny_model))
    client = RoutedClient("judge", slot, context=None, servers=[], turn_timeout=0.5)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="^engine 'judge': request 7: no answer within 0.5 s$"):
        asyncio.run(client.chat([{"role": "user", "content": "7?"}]))
    assert len(closed) == 1
