"""New weights that go from the actor's device to those of the engines."""

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

from agentrl_core.api import ConfigError, EngineError
from agentrl_core.config import load_config
from agentrl_core.engine_kit.weight_group import TIMEOUT
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.serving import weight_transport

MORTAL = """
import asyncio
import os
import signal
from pathlib import Path

from agentrl_core.api import EngineError
from agentrl_engine_hf.config import HFEngineConfig
from agentrl_engine_hf.engine import HFEngine

UPDATES, KILLED = Path(FOLDER) / "updates.txt", Path(FOLDER) / "killed"


class Mortal(HFEngine):
    # Replica 0 is killed in the second step, once, and replica 1 waits for its return; updates are written down.
    # Replica 1 refuses the last ones.
    capabilities = frozenset({"logprobs", "weight_update", "sessions", "broadcast", "ipc"})

    def __init__(self, config, context):
        super().__init__(HFEngineConfig(), context)
        self.replica, self.version = context.replica, -1

    async def update_weights(self, update, version):
        if self.replica == 1 and version == 4:
            raise EngineError("no room for them")
        await super().update_weights(update, version)
        self.version = version
        sent = "files" if update.broadcast is None else f"rank {update.broadcast.first_rank} of {update.broadcast.size}"
        with UPDATES.open("a") as log:
            log.write(f"{self.replica} {version} {sent}\\n")

    async def generate(self, *args):
        if self.replica == 0 and self.version == 1 and not KILLED.exists():
            KILLED.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while self.replica == 1 and self.version == 1 and "0 1 rank 1 of 2" not in UPDATES.read_text():
            await asyncio.sleep(0.1)
        return await super().generate(*args)
"""


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("backend", ["gloo", "ipc"])
def test_sharded_weights_are_sent_to_replicas_until_one_refuses_them_and_one_that_comes_back_joins_again(
    fit: Callable[..., RunDir], tiny_run: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    backend: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(weight_transport, "broadcast_backend", lambda config, on_gpus: backend)
    caplog.set_level(logging.WARNING, logger="agentrl_core")
    # By IPC both of the actor's processes hand their buffers over.
    first = {"gloo": 1, "ipc": 2}[backend]
    source = MORTAL.replace("0 1 rank 1 of 2", f"0 1 rank {first} of {first + 1}")
    (tiny_run.folder / "mortal.py").write_text(f"FOLDER = {str(tiny_run.folder)!r}\n{source}")
    start = time.monotonic()
    with pytest.raises(EngineError, match="no room for them"):
        fit({
            "cluster": {"runtime": "ray", "processes_per_node": 2},
            "rollout.engine": {"name": "./mortal.py:Mortal", "weight_transfer": "broadcast", "health_interval": 0.2},
            "rollout.max_logprob_gap": 1e-4,
            "actor.optimizer.lr": 1e-2,
            "trainer.steps": 4,
        })  # fmt: skip
    # Far less than a rank waits for the others.
    assert time.monotonic() - start < TIMEOUT / 3
    run = RunDir(tiny_run.folder / "runs" / "tiny")
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3]
    assert "engine replica 0 is back with weights 1" in caplog.text
    updates = (tiny_run.folder / "updates.txt").read_text().splitlines()
    updates = [each for each in updates if each.split()[1] != "4"]
    assert sorted(updates) == sorted([
        *(f"{replica} {version} rank {first + replica} of {first + 2}" for replica in (0, 1) for version in range(4)),
        # The one that was killed did not live to get the second step's; the one in its place got the first's alone.
        f"0 1 rank {first} of {first + 1}",
    ])  # fmt: skip


def test_the_local_runtime_has_nobody_to_send_to(tiny_run: Any) -> None:
    with pytest.raises(
        ConfigError, match="weight_transfer.*found broadcast.*local runtime.*weight_transfer=host_memory"
    ):
        load_config(tiny_run({"rollout.engine": {"name": "hf", "weight_transfer": "broadcast"}}))


@pytest.mark.parametrize(
    ("engine", "shares", "hosts", "transport"),
    [
        ({}, True, 1, "shared_module"),
        ({}, False, 1, "host_memory"),
        ({}, False, 2, "broadcast"),
        ({"nodes": 2, "tensor_parallel": 2}, False, 1, "broadcast"),
        ({"weight_transfer": "broadcast"}, False, 1, "broadcast"),
        ({"nodes": 2, "tensor_parallel": 2, "weight_transfer": "host_memory"}, False, 2, "host_memory"),
    ],
)
def test_the_transport_follows_capabilities_hosts_and_one_key(
    tiny_run: Any, monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any], shares: bool, hosts: int, transport: str
) -> None:
    config = load_config(tiny_run({"cluster.runtime": "ray"}))
    for key, value in engine.items():
        setattr(config.rollout.engine, key, value)
    monkeypatch.setattr(type(config.rollout.engine), "has", lambda slot, capability: capability == "broadcast")
    assert weight_transport.choose_transport(config, shares, hosts=hosts) == transport
    if transport == "broadcast" and "weight_transfer" not in engine:
        monkeypatch.setattr(type(config.rollout.engine), "has", lambda slot, capability: False)
        assert weight_transport.choose_transport(config, shares, hosts=hosts) == "host_memory"


def test_an_engine_that_cannot_take_weights_on_the_actors_gpu_is_refused(
    tiny_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(tiny_run({"cluster.runtime": "ray", "rollout.engine.weight_transfer": "broadcast"}))
    monkeypatch.setattr(type(config.rollout.engine), "has", lambda slot, capability: capability != "ipc")
    with pytest.raises(ConfigError, match="weight_transfer: found broadcast.*capability 'ipc'.*placement=standalone"):
        weight_transport.choose_transport(config, False, on_gpus=True)
    config.rollout.engine.weight_transfer = "auto"
    assert weight_transport.choose_transport(config, False, on_gpus=True, hosts=2) == "host_memory"
    config.rollout.engine.weight_transfer = "broadcast"
    monkeypatch.setattr(type(config.rollout.engine), "has", lambda slot, capability: True)
    assert weight_transport.choose_transport(config, False, on_gpus=True) == "broadcast"


@pytest.mark.parametrize(
    ("device", "placement", "backend"),
    [("cpu", "standalone", "gloo"), ("cuda", "standalone", "nccl"), ("cuda", "colocated", "ipc")],
)
def test_the_way_between_devices_follows_their_places(tiny_run: Any, device: str, placement: str, backend: str) -> None:
    engine = {"name": "hf", "weight_transfer": "broadcast", "placement": placement}
    config = load_config(tiny_run({"cluster.runtime": "ray", "rollout.engine": engine}))
    assert weight_transport.broadcast_backend(config, device == "cuda") == backend


@pytest.mark.parametrize(
    ("placement", "transfer", "address", "expected"),
    [
        ("standalone", "broadcast", None, True),
        ("standalone", "auto", "auto", True),
        ("standalone", "auto", None, False),
        ("standalone", "host_memory", "auto", False),
        ("colocated", "broadcast", "auto", False),
    ],
)
def test_one_nccl_is_needed_where_weights_may_go_by_it(
    tiny_run: Any, placement: str, transfer: str, address: str | None, expected: bool
) -> None:
    engine = {"name": "hf", "weight_transfer": transfer, "placement": placement}
    config = load_config(tiny_run({"cluster": {"runtime": "ray", "address": address}, "rollout.engine": engine}))
    assert weight_transport.may_share_nccl(config) is expected


def test_steps_that_warm_up_the_critic_send_no_weights(
    fit: Callable[..., RunDir], tiny_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    newest = weight_transport.ActorWeights.newest

    def counted(self: Any, version: int) -> Any:
        sent.append(version)
        return newest(self, version)

    monkeypatch.setattr(weight_transport.ActorWeights, "newest", counted)
    fit({"trainer.steps": 3, "critic.warmup_steps": 2, "algorithm.advantage.name": "gae"})
    assert sent == [0, 3]
