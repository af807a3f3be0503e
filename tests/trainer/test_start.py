"""A start that fails leaves nothing behind, whichever part of it fails."""

import gc
import logging
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl_core.cli import evaluate
from agentrl_core.engine_kit import memory_files
from agentrl_core.runs.run_dir import RunDir

Fit = Callable[..., RunDir]
PARTS = """
import threading
from agentrl_core.api import AgentLoopBase, hookimpl
from agentrl_testing.scripted_config import ScriptedConfig
from agentrl_testing.scripted_engine import ScriptedEngine


def fails(where):
    if where == BROKEN:
        raise RuntimeError(f"{where} is broken")


class Threaded(ScriptedEngine):
    # An engine with a thread, as real ones have.
    capabilities = frozenset({"logprobs", "weight_update", "sessions"})

    def __init__(self, config, context):
        super().__init__(ScriptedConfig(log_prob=-4.0), context, script=lambda *_: [66, 260])
        self.stopped = threading.Event()
        self.where = "named engine" if context.max_model_len == 50 else "engine"

    async def start(self):
        self.thread = threading.Thread(target=self.stopped.wait, name="engine-thread")
        self.thread.start()
        fails(self.where)

    async def update_weights(self, update, version):
        fails("weights")

    async def close(self):
        self.stopped.set()
        self.thread.join()


class Loop(AgentLoopBase):
    def __init__(self, config, context):
        fails("loop")

    async def run(self, sampling_params, *, session, raw_prompt, **row):
        trajectory = session.trajectory(raw_prompt)
        turn = await trajectory.generate(sampling_params)
        return trajectory.finish(turn.termination)


class Hook:
    def __init__(self, config, context):
        fails("hook")

    @hookimpl
    def on_run_start(self, config, run_dir):
        fails("on_run_start")


def lower(trajectory):
    return 1.0
"""


@pytest.fixture(autouse=True)
def own_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(memory_files, "MEMORY", folder)


def left() -> dict[str, Any]:
    """What a run may leave behind: threads, log handlers, child processes, temporary files."""
    gc.collect()
    threads = {each.name for each in threading.enumerate()} - {"agentrl-hang-report", "tqdm_monitor"}
    children = {each.pid for each in psutil.Process().children(recursive=True)}
    files = {path.name for path in Path(tempfile.gettempdir()).iterdir()}
    return {"threads": threads, "handlers": list(logging.getLogger().handlers), "children": children, "files": files}


def left_in_the_end(before: dict[str, Any]) -> dict[str, Any]:
    """As :func:`left`, once it is what it was before: a thread that has been told to end may need a moment."""
    deadline = time.monotonic() + 20.0
    while (found := left()) != before and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def broken(tiny_run: Any, where: str) -> dict[str, Any]:
    (tiny_run.folder / "parts.py").write_text(f"BROKEN = {where!r}\n" + PARTS)
    engine = {"name": "./parts.py:Threaded"}
    return {
        "rollout.engine": engine,
        "engines": {"judge": {**engine, "model": str(tiny_run.model), "max_model_len": 50}},
        "rollout.agent": {"loops": [{"name": "./parts.py:Loop"}]},
        "reward.functions": [{"name": "./parts.py:lower", "isolation": "process"}],
        "hooks": ["./parts.py:Hook"],
        "data.validation_files": ["validation.jsonl"],
        "trainer.steps": 1,
    }


STEPS = ("engine", "named engine", "loop", "hook", "weights", "on_run_start")


@pytest.mark.parametrize("where", STEPS)
def test_a_start_that_fails_leaves_nothing_behind(fit: Fit, tiny_run: Any, where: str) -> None:
    changes = broken(tiny_run, where)
    before = left()
    with pytest.raises(Exception, match=f"{where} is broken"):
        fit(changes)
    assert left_in_the_end(before) == before


@pytest.mark.parametrize("where", ["engine", "named engine", "loop"])
def test_an_evaluation_whose_start_fails_leaves_nothing_behind(
    tiny_run: Any, installed_plugins: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr("agentrl_core.plugins.resolution.registrations", installed_plugins)
    monkeypatch.setattr(evaluate, "set_up_logging", lambda **_: None)
    monkeypatch.setattr(evaluate, "log_transformers", lambda: None)
    config = tiny_run(broken(tiny_run, where))
    before = left()
    with pytest.raises(Exception, match=f"{where} is broken"):
        evaluate.run(config, output=tiny_run.folder / "evaluated")
    assert left_in_the_end(before) == before
