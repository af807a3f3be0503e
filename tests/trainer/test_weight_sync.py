"""New weights that go from the actor's device to those of the engines."""

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

from agentrl_core.api import ConfigError, EngineError
from agentrl_core.api.weight_group import TIMEOUT
from agentrl_core.config import load_config
from agentrl_core.tracking.run_dir import RunDir
from agentrl_core.trainer import roles

MORTAL = """
import asyncio
import os
import signal
from pathlib import Path

from agentrl_engine_hf.config import HFEngineConfig
from agentrl_engine_hf.engine import HFEngine

UPDATES, KILLED = Path(FOLDER) / "updates.txt", Path(FOLDER) / "killed"


class Mortal(HFEngine):
    # Replica 0 is killed in the second step, once, and replica 1 waits for its return; updates are written down.
    capabilities = frozenset({"logprobs", "weight_update", "sessions", "broadcast"})

    def __init__(self, config, context):
        super().__init__(HFEngineConfig(), context)
        self.replica, self.version = context.replica, -1

    async def update_weights(self, update, version):
        await super().update_weights(update, version)
        self.version = version
        road = "files" if update.broadcast is None else f"rank {update.broadcast.first_rank} of {update.broadcast.size}"
        with UPDATES.open("a") as log:
            log.write(f"{self.replica} {version} {road}\\n")

    async def generate(self, *args):
        if self.replica == 0 and self.version == 1 and not KILLED.exists():
            KILLED.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while self.replica == 1 and self.version == 1 and "0 1 files" not in UPDATES.read_text():
            await asyncio.sleep(0.1)
        return await super().generate(*args)
"""


@pytest.mark.ray
def test_sharded_weights_are_broadcast_to_replicas_and_one_that_comes_back_joins_again(
    fit: Callable[..., RunDir], tiny_run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="agentrl_core")
    (tiny_run.folder / "mortal.py").write_text(f"FOLDER = {str(tiny_run.folder)!r}\n{MORTAL}")
    run = fit({
        "cluster": {"runtime": "ray", "processes_per_node": 2},
        "rollout.engine": {"name": "./mortal.py:Mortal", "weight_transfer": "broadcast", "health_interval": 0.2},
        "rollout.max_logprob_gap": 1e-4,
        "actor.optimizer.lr": 1e-2,
        "trainer.steps": 4,
    })  # fmt: skip
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3, 4]
    assert "engine replica 0 is back with weights 1" in caplog.text
    updates = (tiny_run.folder / "updates.txt").read_text().splitlines()
    assert sorted(updates) == sorted([
        *(f"{replica} {version} rank {1 + replica} of 3" for replica in (0, 1) for version in range(5)),
        # The one that was killed did not live to be told the second step's; the one in its place got them from files.
        "0 1 files",
    ])  # fmt: skip


@pytest.mark.ray
def test_an_engine_that_refuses_weights_ends_the_run_although_the_others_wait_for_it(
    fit: Callable[..., RunDir], tiny_run: Any
) -> None:
    refusing = MORTAL.replace(
        "    async def update_weights(self, update, version):\n",
        "    async def update_weights(self, update, version):\n"
        "        if self.replica == 1 and version == 1:\n"
        "            raise EngineError('no room for them')\n",
    ).replace("self.version == 1 and not", "False and not")
    source = f"FOLDER = {str(tiny_run.folder)!r}\nfrom agentrl_core.api import EngineError\n{refusing}"
    (tiny_run.folder / "mortal.py").write_text(source)
    start = time.monotonic()
    with pytest.raises(EngineError, match="no room for them"):
        fit({
            "cluster": {"runtime": "ray", "processes_per_node": 2},
            "rollout.engine": {"name": "./mortal.py:Mortal", "weight_transfer": "broadcast"},
        })  # fmt: skip
    # Far less than a rank waits for the others.
    assert time.monotonic() - start < TIMEOUT / 3


def test_the_local_runtime_has_nobody_to_send_to(tiny_run: Any) -> None:
    with pytest.raises(
        ConfigError, match="weight_transfer.*found broadcast.*local runtime.*weight_transfer=host_memory"
    ):
        load_config(tiny_run({"rollout.engine": {"name": "hf", "weight_transfer": "broadcast"}}))


def test_nccl_needs_a_gpu_of_its_own_for_each_rank(tiny_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "_on_gpus", lambda config: True)
    config = load_config(
        tiny_run({"cluster.runtime": "ray", "rollout.engine": {"name": "hf", "weight_transfer": "broadcast"}})
    )
    with pytest.raises(
        ConfigError, match="colocated engines have the trainer's; set rollout.engine.placement=standalone"
    ):
        roles.engine_seats(config, object())  # type: ignore[arg-type]
    config.rollout.engine.placement = "standalone"
    assert [[seat.num_gpus for seat in replica] for replica in roles.engine_seats(config, None)] == [[1]]
