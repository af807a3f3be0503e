"""A run so small that a step takes milliseconds: its files, in-process and in a process of its own."""

import copy
import functools
import gc
import json
import multiprocessing
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

import pytest
import yaml

from agentrl_core.plugins.registration import registrations
from agentrl_core.runs.run_dir import RunDir
from tests.warm_python import PRELOADED

Changes = Mapping[str, Any]
"""Values by dotted key of the configuration; None removes the key."""

REWARDS = '''
"""Rewards of the tiny runs."""


def lower(trajectory):
    text = trajectory.model_text
    return sum(letter.islower() for letter in text) / max(len(text), 1)


def raises(trajectory):
    raise ValueError("the judge is ill")


def sometimes(trajectory):
    if trajectory.extra_info["index"] == 0:
        raise ValueError("the judge is ill")
    return lower(trajectory)


def nan(trajectory):
    return float("nan")


def only_first(trajectory):
    return lower(trajectory) if trajectory.extra_info["index"] == 0 else 0.5
'''

HOOKS = '''
"""Hooks of the tiny runs."""

import json
import os
import signal
import socket

from agentrl_core.api import Tracker, hookimpl


class Pause:
    """Says on stdout that a step has begun, and waits until a signal has been handled."""

    def __init__(self, config, context):
        self.step = int(os.environ.get("TINY_PAUSE_AT", 0))

    @hookimpl
    def on_rollout_start(self, step):
        if step == self.step:
            # Not signal.pause(), which never returns where the signal came just before it.
            read, write = socket.socketpair()
            # Closed by hand: an exception of a signal's handler is lost where it hits a destructor.
            with read, write:
                write.setblocking(False)
                previous = signal.set_wakeup_fd(write.fileno())
                print(f"paused at step {step}", flush=True)
                read.recv(1)
                signal.set_wakeup_fd(previous)


class Signals:
    """Sends this process the signals of TINY_SIGNALS, ``{"hook:step": [number, ...]}``."""

    def __init__(self, config, context):
        self.plan = json.loads(os.environ["TINY_SIGNALS"])

    def send(self, key):
        for number in self.plan.get(key, ()):
            os.kill(os.getpid(), number)

    @hookimpl
    def on_run_start(self, config, run_dir):
        self.send("on_run_start")

    @hookimpl
    def on_rollout_start(self, step):
        self.send(f"on_rollout_start:{step}")

    @hookimpl
    def on_step_end(self, step, metrics):
        self.send(f"on_step_end:{step}")


class Record:
    """Writes every event, with the rows of its batch and the state on disk, to ``events.jsonl``."""

    def __init__(self, config, context):
        self.run_dir = context.run_dir

    def write(self, event, step=None, batch=None):
        state = json.loads((self.run_dir / "state.json").read_text())
        rows = None if batch is None else len(batch)
        with (self.run_dir / "events.jsonl").open("a") as file:
            file.write(json.dumps([event, step, rows, state["status"], state["step"]]) + "\\n")

    @hookimpl
    def on_run_start(self, config, run_dir):
        self.write("run_start")

    @hookimpl
    def on_rollout_start(self, step):
        self.write("rollout_start", step)

    @hookimpl
    def on_trajectory_end(self, step, trajectory):
        self.write(f"{trajectory.split}_trajectory", step)

    @hookimpl
    def on_rollout_end(self, step, batch):
        self.write("rollout_end", step, batch)

    @hookimpl
    def on_batch_ready(self, step, batch):
        self.write("batch_ready", step, batch)

    @hookimpl
    def on_step_end(self, step, metrics):
        self.write("step_end", step)

    @hookimpl
    def on_validation_end(self, step, metrics):
        self.write("validation_end", step)

    @hookimpl
    def on_checkpoint_saved(self, step, path):
        self.write("checkpoint_saved", step)

    @hookimpl
    def on_run_end(self, status):
        self.write("run_end")


class Halve:
    """Keeps the first half of each batch."""

    def __init__(self, config, context):
        pass

    @hookimpl
    def on_batch_ready(self, step, batch):
        return batch.slice(0, len(batch) // 2)


class Full(Tracker):
    """A tracker whose disk is full."""

    def log(self, metrics, step):
        raise OSError(28, "No space left on device")


class FullAtTheEnd(Tracker):
    """A tracker whose disk is full when the run ends."""

    def log(self, metrics, step):
        pass

    def finish(self, status):
        raise OSError(28, "No space left on device")


class Broken:
    """A hook that fails in every step."""

    def __init__(self, config, context): ...

    @hookimpl
    def on_rollout_start(self, step):
        raise OSError(28, "No space left on device")
'''

START = """
import os, sys
os.chdir({folder!r})
os.environ.update({environment!r}, COLUMNS="1000")
output = os.open({fifo!r}, os.O_WRONLY)
os.dup2(output, 1)
os.dup2(output, 2)
os.close(output)
sys.stdout = open(1, "w", closefd=False)
sys.stderr = open(2, "w", closefd=False)
sys.argv = ["agentrl", *{arguments!r}]
import agentrl_core.cli.main
agentrl_core.cli.main.main()
"""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Importing everything leaves no garbage, and the collector would look through it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        # Together to the oldest generation, without a look at them. Left frozen, they would make full collections
        # frequent.
        gc.freeze()
        gc.unfreeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """What is left goes with the process: pytest would look through all of it five times."""
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with a byte tokenizer."""
    from agentrl_testing.tiny_model import save_tiny_model

    path = tmp_path_factory.mktemp("tiny-model")
    save_tiny_model(path, initializer_range=0.1)
    return path


def tiny_config(model: Path, folder: Path) -> dict[str, Any]:
    """Two prompts with two samples of up to eight tokens, embedded engine, one loop without tools."""
    return {
        "model": {"path": str(model)},
        "data": {"train_files": ["train.jsonl"], "batch_size": 2, "max_prompt_length": 64},
        "rollout": {
            "engine": {"name": "hf"},
            "agent": {"loops": ["single_turn"]},
            "n": 2,
            "max_response_length": 8,
            "retries": 0,
        },
        "reward": {"functions": [{"name": "./rewards.py:lower", "isolation": "inline"}]},
        "actor": {"optimizer": {"lr": 1e-3}},
        "trainer": {
            "name": "tiny",
            "output_dir": str(folder / "runs"),
            "steps": 2,
            "trackers": ["jsonl"],
            "checkpoint": {"interval": 0},
        },
        "cluster": {"device": "cpu"},
    }


def tiny_rows(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Rows in the field's layout."""
    return [
        {
            "data_source": "tiny",
            "prompt": [{"role": "user", "content": f"say {index}"}],
            "reward_model": {"ground_truth": str(index)},
            "extra_info": {"index": index},
            **fields,
        }
        for index in range(count)
    ]


def with_changes(tree: dict[str, Any], changes: Changes) -> dict[str, Any]:
    """The tree with values set by dotted key."""
    for key, value in changes.items():
        *above, last = key.split(".")
        section = tree
        for name in above:
            section = section.setdefault(name, {})
        if value is None:
            section.pop(last, None)
        else:
            section[last] = copy.deepcopy(value)
    return tree


class TinyRuns:
    """Writes ``config.yaml`` with its files into a folder, and returns its path.

    ``tiny_run({"rollout.n": 4}, rows=[...])``; without ``rows`` there are six, and three for validation.
    """

    def __init__(self, model: Path, folder: Path) -> None:
        self.model = model
        self.folder = folder

    def __call__(self, changes: Changes | None = None, rows: list[dict[str, Any]] | None = None) -> Path:
        self.write_rows("train.jsonl", self.rows(6) if rows is None else rows)
        self.write_rows("validation.jsonl", self.rows(3))
        (self.folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
        (self.folder / "hooks.py").write_text(HOOKS, encoding="utf-8")
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump(with_changes(tiny_config(self.model, self.folder), changes or {})))
        return path

    def rows(self, count: int, **fields: Any) -> list[dict[str, Any]]:
        """Rows in the field's layout."""
        return tiny_rows(count, **fields)

    def write_rows(self, name: str, rows: list[dict[str, Any]]) -> Path:
        """As JSON lines."""
        path = self.folder / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path


@pytest.fixture
def tiny_run(tmp_path: Path, tiny_model: Path) -> TinyRuns:
    return TinyRuns(tiny_model, tmp_path)


@pytest.fixture(scope="session")
def tiny_runs_in(tiny_model: Path) -> Callable[[Path], TinyRuns]:
    """As ``tiny_run``, in a folder that several tests share."""
    return functools.partial(TinyRuns, tiny_model)


@pytest.fixture(scope="session")
def installed_plugins() -> Callable[[], Any]:
    return functools.cache(registrations)


@pytest.fixture
def fit(
    tiny_run: Callable[..., Path],
    installed_plugins: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Callable[..., RunDir]:
    """Trains a tiny run in this process; arguments as of ``tiny_run``."""
    marks = {mark.name for mark in request.node.iter_markers()}
    # Variables that a test sets for CUDA would not reach the processes of a cluster that runs already.
    if "ray" in marks and "gpu" not in marks:
        request.getfixturevalue("ray_runtime")
    # Reading the metadata of all installed packages for every slot takes longer than a tiny run.
    monkeypatch.setattr("agentrl_core.plugins.resolution.registrations", installed_plugins)

    def run(changes: Changes | None = None, rows: list[dict[str, Any]] | None = None) -> RunDir:
        from agentrl_core.config import load_config
        from agentrl_core.trainer import Trainer

        return RunDir(Trainer(load_config(tiny_run(changes, rows))).fit())

    return run


@dataclass
class Started:
    """``agentrl`` in a process of its own, standard output and errors in one pipe."""

    process: BaseProcess
    output: TextIO

    def read_until(self, text: str) -> str:
        """Everything up to the line with this text; fails if the process ends before."""
        read = ""
        for line in self.output:
            read += line
            if text in line:
                return read
        raise AssertionError(f"the process ended without writing {text!r}:\n{read}")

    def wait(self) -> tuple[int, str]:
        """Exit code (negative: of a signal) and the rest of the output."""
        rest = self.output.read()
        self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode, rest


@pytest.fixture(scope="session")
def warm_processes() -> multiprocessing.context.BaseContext:
    """Forks from a process that has imported everything: a start takes a moment instead of many seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@pytest.fixture
def start_agentrl(
    warm_processes: multiprocessing.context.BaseContext, tmp_path: Path
) -> Iterator[Callable[..., Started]]:
    """``start_agentrl("train", "config.yaml", TINY_PAUSE_AT="3")`` in ``tmp_path``; killed at the end."""
    started: list[Started] = []

    def start(*arguments: str, **environment: str) -> Started:
        fifo = str(tmp_path / f"output-{len(started)}")
        os.mkfifo(fifo)
        code = START.format(folder=str(tmp_path), environment=environment, arguments=arguments, fifo=fifo)
        process = warm_processes.Process(target=exec, args=(code, {"__name__": "tiny"}))
        process.start()
        started.append(Started(process, open(fifo, encoding="utf-8")))
        return started[-1]

    yield start
    for each in started:
        if each.process.is_alive():
            each.process.kill()
        each.process.join()
        each.output.close()
