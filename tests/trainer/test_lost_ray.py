"""A run on Ray as the command line starts it: what goes to its log, and a Ray that dies under it.

Ray then ends the process without a word to Python.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.hosting.processes import family
from agentrl_core.runs.run_dir import RunDir

pytestmark = pytest.mark.ray

NOISY = '''
import sys
import threading
import warnings

from ray._private.ray_logging import global_worker_stdstream_dispatcher

from agentrl_core.api import hookimpl
from agentrl_testing.scripted_config import ScriptedConfig
from agentrl_testing.scripted_engine import ScriptedEngine


class Engine(ScriptedEngine):
    capabilities = frozenset({"logprobs", "weight_update", "sessions"})

    def __init__(self, config, context):
        super().__init__(ScriptedConfig(log_prob=-4.0), context, script=lambda *_: [66, 260])

    async def generate(self, *args):
        print("the engine prints")
        warnings.warn("the engine warns", stacklevel=1)
        sys.stderr.write("the engine has answered\\n")
        return await super().generate(*args)


class Heard:
    """Ends the first rollout when Ray has brought here what the engine wrote, which may come after it."""

    def __init__(self, config, context):
        self.lines, self.all = [], threading.Event()
        global_worker_stdstream_dispatcher.add_handler("heard", self.hear)

    def hear(self, data):
        self.lines += data["lines"]
        if all(any(end in line for line in self.lines) for end in ("engine prints", "engine has answered")):
            self.all.set()

    @hookimpl
    def on_rollout_end(self, step, batch):
        warnings.warn("the driver warns", stacklevel=1)
        self.all.wait()


'''
QUIET = ("the engine prints", "the engine warns", "the engine has answered", "the driver warns")


@pytest.mark.slow
def test_engines_print_to_the_log_only_and_a_run_whose_ray_was_killed_has_failed(
    tiny_run: Any, start_agentrl: Callable[..., Any]
) -> None:
    (tiny_run.folder / "noisy.py").write_text(NOISY)
    changes = {"cluster.runtime": "ray", "trainer.steps": 3, "rollout.engine": {"name": "./noisy.py:Engine"}}
    tiny_run(changes | {"hooks": ["./noisy.py:Heard", "./hooks.py:Pause"]})
    started = start_agentrl("train", "config.yaml", TINY_PAUSE_AT="2")
    shown = started.read_until("paused at step 2")
    names = {Path(f"/proc/{each}/comm").read_text().strip(): each for each in family(started.process.pid)}
    os.kill(names["raylet"], signal.SIGKILL)
    shown += started.read_until("Ray's raylet died: the run ends here")
    run = RunDir(tiny_run.folder / "runs" / "tiny")
    state = run.read_state()
    assert state is not None and (state.status, state.step) == ("failed", 1)
    logged = run.log_file.read_text()
    assert [text for text in QUIET if text not in logged or text in shown] == []
