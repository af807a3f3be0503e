"""The trackers that write files, and the specs."""

import importlib
import itertools
import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl_core.api import KINDS, NoConfig, PluginSpec, Tracker, TrackerContext
from agentrl_trackers_basic.metrics import read_metrics
from agentrl_trackers_basic.plugin import CONSOLE, JSONL, TENSORBOARD


def build(spec: PluginSpec, run_dir: Path, first_step: int = 1) -> Any:
    module, _, name = spec.factory.partition(":")
    factory = getattr(importlib.import_module(module), name)
    return factory(spec.config(), TrackerContext("calculator", run_dir, 20, {}, first_step))


@pytest.mark.parametrize("spec", [CONSOLE, JSONL])
def test_specs_name_trackers(spec: PluginSpec, tmp_path: Path) -> None:
    assert spec.kind == "tracker" and spec.api_version == KINDS["tracker"].api_version
    assert isinstance(build(spec, tmp_path), Tracker)


def test_specs_import_nothing_heavy() -> None:
    code = (
        "import sys, agentrl_trackers_basic.plugin, agentrl_trackers_basic.console, agentrl_core.cli.rollouts\n"
        "print([name for name in ('torch', 'ray', 'transformers', 'tensordict', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_jsonl_writes_one_object_a_step(tmp_path: Path) -> None:
    tracker = build(JSONL, tmp_path)
    tracker.log({"reward/mean": 0.5, "critic/loss": float("inf")}, 0)
    first = (tmp_path / "metrics.jsonl").read_text()
    tracker.log({"reward/mean": 1}, 1)
    tracker.finish("completed")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert json.loads(first) == rows[0]
    assert [(row["step"], row["reward/mean"]) for row in rows] == [(0, 0.5), (1, 1.0)]
    assert rows[0]["critic/loss"] is None
    assert datetime.fromisoformat(rows[0]["time"]).tzinfo is not None


def test_a_torn_line_does_not_swallow_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "rew')
    build(JSONL, tmp_path).log({}, 2)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_tensorboard_holds_each_step_once_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # Event files are read in the order of their names, which begin with the second: a resume comes later.
    seconds = itertools.count(1_700_000_000)
    monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda: float(next(seconds))))

    assert TENSORBOARD.config is NoConfig
    tracker = build(TENSORBOARD, tmp_path)
    for step in range(4):
        tracker.log({"reward/mean": step / 10, "actor/loss": float("nan")}, step)
    tracker.finish("failed")
    resumed = build(TENSORBOARD, tmp_path, first_step=2)
    for step in (2, 3):
        resumed.log({"reward/mean": step / 5}, step)
    resumed.finish("completed")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = {event.step: event.value for event in events.Scalars("reward/mean")}
    assert points == pytest.approx({0: 0.0, 1: 0.1, 2: 0.4, 3: 0.6})
    assert len(events.Scalars("reward/mean")) == 4
