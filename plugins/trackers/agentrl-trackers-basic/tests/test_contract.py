import json
from pathlib import Path

import pytest

from agentrl_testing.contracts import TrackerCase, TrackerContract
from agentrl_trackers_basic.plugin import CONSOLE, CURVE, JSONL, TENSORBOARD


def read_jsonl(run_dir: Path) -> dict[int, dict[str, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows}


def read_tensorboard(run_dir: Path) -> dict[int, dict[str, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[int, dict[str, float]] = {}
    for folder in {file.parent for file in run_dir.rglob("events.out.tfevents.*")}:
        events = EventAccumulator(str(folder)).Reload()
        for name in events.Tags()["scalars"]:
            for event in events.Scalars(name):
                found.setdefault(event.step, {})[name] = event.value
    return found


class TestJsonl(TrackerContract):
    @pytest.fixture
    def plugin(self) -> TrackerCase:
        return TrackerCase(JSONL, read=read_jsonl)


class TestTensorboard(TrackerContract):
    @pytest.fixture
    def plugin(self) -> TrackerCase:
        return TrackerCase(TENSORBOARD, read=read_tensorboard)


class TestConsole(TrackerContract):
    @pytest.fixture
    def plugin(self) -> TrackerCase:
        return TrackerCase(CONSOLE)


class TestCurve(TrackerContract):
    @pytest.fixture
    def plugin(self) -> TrackerCase:
        return TrackerCase(CURVE)
