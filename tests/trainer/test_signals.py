"""Stopping a run: after the step, and at once."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agentrl_core.runs.run_dir import RunDir
from agentrl_core.trainer.record_writer import RecordWriter
from agentrl_core.trainer.signals import StopRequest

Fit = Callable[..., RunDir]
BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
RUN = {"rollout.engine": {"name": "scripted"}, "hooks": ["./hooks.py:Signals"], "trainer.steps": 4}

SILENT_ENGINE = """
import asyncio
from agentrl_testing.scripted_config import ScriptedConfig
from agentrl_testing.scripted_engine import ScriptedEngine

class Silent(ScriptedEngine):
    config_class = ScriptedConfig
    capabilities = frozenset({"weight_update"})

    async def generate(self, prompt_ids, sampling_params, request_id, multi_modal=None):
        await asyncio.Event().wait()
"""


def state_of(run: RunDir) -> tuple[str, int]:
    state = run.read_state()
    assert state is not None
    return state.status, state.step


@pytest.fixture(autouse=True)
def hears_hangups() -> Iterator[None]:
    """Tests that nohup started do not, and a run leaves it so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, list[int]]], None]:
    def set_plan(signals: dict[str, list[int]]) -> None:
        monkeypatch.setenv("TINY_SIGNALS", json.dumps(signals))

    return set_plan


@BOTH
@pytest.mark.parametrize("moment", ["on_rollout_start:2", "on_step_end:2"])
def test_a_signal_finishes_the_step_and_saves(
    fit: Fit, plan: Callable[..., None], caplog: pytest.LogCaptureFixture, number: signal.Signals, moment: str
) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    plan({moment: [number]})
    run = fit(RUN)
    assert f"{number.name}: the run stops after this step and saves a checkpoint" in caplog.text
    assert state_of(run) == ("stopped", 2)
    assert (run.checkpoints_dir / "latest").resolve().name == "step-000002"
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before

    plan({})
    fit({**RUN, "trainer.resume": "auto"})
    assert state_of(run) == ("completed", 4)
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3, 4]


@BOTH
def test_a_second_signal_stops_at_once(fit: Fit, tiny_run: Any, plan: Callable[..., None], number: int) -> None:
    plan({"on_rollout_start:2": [number, number]})
    with pytest.raises(KeyboardInterrupt):
        fit({**RUN, "trainer.checkpoint": {"interval": 1}})
    run = RunDir(tiny_run.folder / "runs" / "tiny")
    assert state_of(run) == ("stopped", 1)
    assert (run.checkpoints_dir / "latest").resolve().name == "step-000001"


def test_a_second_signal_while_records_are_written_leaves_the_checkpoint(
    fit: Fit, tiny_run: Any, plan: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    signals = [signal.SIGINT]

    def wait(writer: RecordWriter, most: int = 0) -> None:
        while signals:
            os.kill(os.getpid(), signals.pop())

    monkeypatch.setattr(RecordWriter, "wait", wait)
    monkeypatch.setattr(RecordWriter, "write", lambda *args: None)
    plan({"on_rollout_start:2": [signal.SIGINT]})
    with pytest.raises(KeyboardInterrupt):
        fit(RUN)
    run = RunDir(tiny_run.folder / "runs" / "tiny")
    assert (run.checkpoints_dir / "latest").resolve().name == "step-000002"
    assert not list(run.checkpoints_dir.glob(".*"))


@BOTH
def test_a_signal_before_the_first_step_stops_at_once(
    fit: Fit, tiny_run: Any, plan: Callable[..., None], number: int
) -> None:
    plan({"on_run_start": [number]})
    with pytest.raises(KeyboardInterrupt):
        fit(RUN)
    assert state_of(RunDir(tiny_run.folder / "runs" / "tiny")) == ("stopped", 0)


def test_training_in_another_thread_takes_no_signals(fit: Fit) -> None:
    runs: list[RunDir] = []
    thread = threading.Thread(target=lambda: runs.append(fit({"rollout.engine": {"name": "scripted"}})))
    thread.start()
    thread.join()
    assert state_of(runs[0]) == ("completed", 2)


def test_a_process_that_waits_for_the_engine_stops_at_the_second_signal(
    tiny_run: Any, start_agentrl: Callable[..., Any]
) -> None:
    tiny_run({**RUN, "rollout.engine": {"name": "./engine.py:Silent"}, "hooks": ["./hooks.py:Pause"]})
    (tiny_run.folder / "engine.py").write_text(SILENT_ENGINE, encoding="utf-8")
    started = start_agentrl("train", "config.yaml", TINY_PAUSE_AT="1")
    started.read_until("paused at step 1")
    os.kill(started.process.pid, signal.SIGTERM)
    started.read_until("SIGTERM: the run stops after this step")
    os.kill(started.process.pid, signal.SIGTERM)
    code, output = started.wait()
    assert code == 130, output
    assert "Traceback" not in output, output
    assert state_of(RunDir(tiny_run.folder / "runs" / "tiny")) == ("stopped", 0)


BLOCKING_LOOP = """
import time
from agentrl_core.api import AgentLoopBase

class Blocking(AgentLoopBase):
    async def run(self, sampling_params, *, session, raw_prompt, **row):
        print("blocked", flush=True)
        time.sleep(600)
"""


def test_a_run_that_inline_code_blocks_stops_at_the_second_signal(
    tiny_run: Any, start_agentrl: Callable[..., Any]
) -> None:
    changes = {"hooks": ["./hooks.py:Pause"], "rollout.agent.loops": [{"name": "./loop.py:Blocking"}]}
    tiny_run({**RUN, **changes})
    (tiny_run.folder / "loop.py").write_text(BLOCKING_LOOP, encoding="utf-8")
    started = start_agentrl("train", "config.yaml", TINY_PAUSE_AT="1")
    started.read_until("paused at step 1")
    os.kill(started.process.pid, signal.SIGINT)
    started.read_until("blocked")
    os.kill(started.process.pid, signal.SIGINT)
    code, output = started.wait()
    assert code == 130, output
    assert "blocked" not in output and "Traceback" not in output, output
    assert state_of(RunDir(tiny_run.folder / "runs" / "tiny")) == ("stopped", 0)


def test_a_stopped_command_says_how_to_go_on(tiny_run: Any, start_agentrl: Callable[..., Any]) -> None:
    tiny_run({**RUN, "hooks": ["./hooks.py:Pause"]})
    started = start_agentrl("train", "config.yaml", TINY_PAUSE_AT="2")
    started.read_until("paused at step 2")
    os.kill(started.process.pid, signal.SIGINT)
    code, output = started.wait()
    assert code == 128 + signal.SIGINT
    assert "agentrl train config.yaml --resume" in output
    assert state_of(RunDir(tiny_run.folder / "runs" / "tiny")) == ("stopped", 2)


def test_a_signal_in_the_last_step_stops_nothing(tiny_run: Any, start_agentrl: Callable[..., Any]) -> None:
    tiny_run({**RUN, "hooks": ["./hooks.py:Pause"]})
    started = start_agentrl("train", "config.yaml", TINY_PAUSE_AT="4")
    started.read_until("paused at step 4")
    os.kill(started.process.pid, signal.SIGTERM)
    code, output = started.wait()
    assert code == 0, output
    assert "--resume" not in output
    assert state_of(RunDir(tiny_run.folder / "runs" / "tiny")) == ("completed", 4)


STUBBORN = """
import signal, sys, time
from agentrl_core.trainer.record_writer import RecordWriter
from agentrl_core.trainer.signals import StopRequest

stop = StopRequest()
stop.may_finish_step = True
with stop.listening():
    while True:
        try:
            print("ready", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
"""


def test_a_third_signal_ends_a_run_that_foreign_code_blocks() -> None:
    command = [sys.executable, "-c", STUBBORN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in ("ready", "SIGTERM: the run stops after this step", "interrupted"):
            assert line in process.stdout.readline()
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM


def test_nohup_keeps_its_promise() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest().listening():
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
