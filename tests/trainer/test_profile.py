"""Traces in the format of Chrome's tracing, which Perfetto reads: objects with ph, ts, dur, pid and name."""

import gzip
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import ConfigError
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.workers.profiling import stacks_sampled

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


def test_the_driver_profiles_the_chosen_step(fit: Callable[..., RunDir], capfd: pytest.CaptureFixture[str]) -> None:
    run = fit({**SCRIPTED, "trainer.profile.steps": [2]})
    files = [file.relative_to(run.path / "profiles") for file in (run.path / "profiles").rglob("*.*")]
    assert Path("step-000002/driver.json.gz") in files
    assert "USDT" not in capfd.readouterr().err
    events = durations(run.path / "profiles/step-000002/driver.json.gz")
    assert {"step", "rollout", "score", "update_actor"} <= events.keys() and "aten::mm" in events
    (update,) = events["update_actor"]
    assert any(update["ts"] <= each["ts"] <= update["ts"] + update["dur"] for each in events["aten::mm"])


STAND_IN = """#!{python}
import json, signal, sys, time
def stop(*_):
    with open(sys.argv[sys.argv.index("--output") + 1], "w") as file:
        json.dump(sys.argv[1:], file)
    sys.exit({code})
signal.signal(signal.SIGINT, stop)
{ready}
# A signal just before signal.pause() would not end it.
while True:
    time.sleep(0.01)
"""


@pytest.fixture
def py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Puts a stand-in for py-spy on the path; it makes the returned file once it listens."""

    def install(code: int) -> Path:
        ready, folder = tmp_path / "ready", tmp_path / "bin"
        folder.mkdir()
        file = folder / "py-spy"
        file.write_text(STAND_IN.format(python=sys.executable, code=code, ready=f"open({str(ready)!r}, 'w')"))
        file.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
        return ready

    return install


def sampled(path: Path, ready: Path) -> None:
    with stacks_sampled(path):
        deadline = time.monotonic() + 60
        while not ready.exists() and time.monotonic() < deadline:
            os.sched_yield()


def test_stacks_are_sampled_where_py_spy_is_installed(py_spy: Callable[[int], Path], tmp_path: Path) -> None:
    path = tmp_path / "profiles/driver.speedscope.json"
    sampled(path, py_spy(0))
    arguments = json.loads(path.read_text())
    assert arguments[:3] == ["record", "--pid", str(os.getpid())] and "speedscope" in arguments


def test_a_py_spy_that_fails_is_a_warning(
    py_spy: Callable[[int], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sampled(tmp_path / "stacks.json", py_spy(3))
    assert "py-spy wrote no stacks of this process: exit code 3" in caplog.text


def test_a_step_that_never_comes_is_refused(fit: Callable[..., RunDir]) -> None:
    with pytest.raises(ConfigError, match=r"trainer.profile.steps: \[3\] are no steps of this run, which has 1 to 2"):
        fit({**SCRIPTED, "trainer.profile.steps": [3]})
