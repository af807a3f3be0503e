"""Traces in the format of Chrome's tracing, which Perfetto reads: objects with ph, ts, dur, pid and name."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import ConfigError
from agentrl_core.runs.run_dir import RunDir

SCRIPTED = {"rollout.engine": {"name": "scripted"}}


def durations(file: Path) -> dict[str, list[dict[str, Any]]]:
    """The complete events of a trace, by name."""
    with gzip.open(file) as trace:
        events = json.load(trace)["traceEvents"]
    found: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        assert event["ph"] in "XBEisftMCbne" and "name" in event
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0 and "pid" in event and "tid" in event
            found.setdefault(event["name"], []).append(event)
    return found


def test_the_driver_profiles_the_chosen_step(fit: Callable[..., RunDir]) -> None:
    run = fit({**SCRIPTED, "trainer.profile.steps": [2]})
    files = [file.relative_to(run.path / "profiles") for file in (run.path / "profiles").rglob("*.*")]
    assert files == [Path("step-000002/driver.json.gz")]
    events = durations(run.path / "profiles" / files[0])
    assert {"step", "rollout", "score", "update_actor"} <= events.keys() and "aten::mm" in events
    (update,) = events["update_actor"]
    assert any(update["ts"] <= each["ts"] <= update["ts"] + update["dur"] for each in events["aten::mm"])


def test_a_step_that_never_comes_is_refused(fit: Callable[..., RunDir]) -> None:
    with pytest.raises(ConfigError, match=r"trainer.profile.steps: \[3\] are no steps of this run, which has 1 to 2"):
        fit({**SCRIPTED, "trainer.profile.steps": [3]})


@pytest.mark.ray
def test_every_rank_writes_its_profile(fit: Callable[..., RunDir]) -> None:
    cluster = {"cluster.runtime": "ray", "cluster.processes_per_node": 2, "trainer.steps": 1}
    run = fit({**SCRIPTED, **cluster, "trainer.profile.steps": [1]})
    files = sorted(file.name for file in (run.path / "profiles/step-000001").iterdir())
    assert files == ["actor-rank-0.json.gz", "actor-rank-1.json.gz", "driver.json.gz"]
    processes = set()
    for rank in (0, 1):
        events = durations(run.path / f"profiles/step-000001/actor-rank-{rank}.json.gz")
        processes |= {event["pid"] for event in events["aten::mm"]}
    assert len(processes) == 2
