"""Replicas that fail in every way, on the local runtime."""

import asyncio
import itertools
import logging
import re
import sys
import textwrap
import time
from typing import Any

import pytest

from agentrl_core.api import EngineError, RolloutError
from agentrl_core.plugins import boundary
from agentrl_core.serving import replicas as replicas_module
from agentrl_core.serving.server import Progress
from agentrl_core.serving.weight_transport import ReplicaState, Weights
from agentrl_core.trainer.metrics import engine_metric

ENGINE = """
import asyncio
import threading
from agentrl_core.api import InferenceEngine, PolicySpan, TokenOutput

MADE = []
OPEN = threading.Event()
SKIP = []  # called by an engine that takes long to start
PLAN = {}  # what the nth engine made does wrong

class Frail(InferenceEngine):
    capabilities = frozenset({"logprobs", "weight_update", "sleep", "parallel", "multi_node"})

    def __init__(self, config, context):
        self.fault, self.version, self.requests = PLAN.get(len(MADE)), 0, 0
        self.calls = []
        self.context = context
        self.looks = 0
        MADE.append(self)

    async def start(self):
        if self.fault == "start":
            raise RuntimeError("no such device")
        if self.fault == "takes long":
            SKIP[0]()
        if self.fault == "slow":
            # Until the rollout is over.
            while not OPEN.is_set():
                await asyncio.sleep(0)

    async def health(self):
        if self.fault == "ill" and self.requests:
            raise RuntimeError("the scheduler has died")
        if self.fault == "hangs" and self.requests:
            await asyncio.Event().wait()
        self.looks += 1
        if self.fault == "lost" and self.looks > 1:
            raise RuntimeError("the host is gone")

    async def generate(self, prompt_ids, params, request_id, multi_modal=None):
        self.requests += 1
        if self.fault == "ill":
            raise RuntimeError("cannot reach the scheduler")
        await (asyncio.Event().wait() if self.fault in ("hangs", "stuck") else asyncio.sleep(0))
        return TokenOutput([65], [-1.0], "length", [PolicySpan(self.version, 0, 1)])

    async def update_weights(self, update, version):
        if self.fault == "dies" and version > 5:
            self.fault, self.requests = "ill", 1
            raise RuntimeError("a worker has ended")
        if self.fault == "refuses" and version > 5:
            raise RuntimeError("no such tensor")
        if self.fault == "frozen" and version > 5:
            await asyncio.Event().wait()
        self.version = version
        self.calls.append(f"update {version}")

    async def sleep(self, level):
        if self.fault == "sleep":
            raise RuntimeError("a request holds it awake")
        if self.fault == "never sleeps":
            await asyncio.Event().wait()
        self.calls.append(f"sleep {level}")

    async def wake_up(self, tags=None):
        self.calls.append(f"wake {tags}")

    async def close(self):
        self.calls.append("close")

class Counting(Frail):
    # Says whether it computes. What is "busy" does, and answers nobody for a while.

    async def progress(self):
        self.steps = getattr(self, "steps", 0) + (self.fault == "busy")
        return float(self.steps)

    async def generate(self, *args):
        if self.fault == "busy" and self.requests < 2:
            self.requests += 1
            await asyncio.Event().wait()
        return await super().generate(*args)
"""
LOOP = """
from agentrl_core.api import AgentLoopBase

class Once(AgentLoopBase):
    async def run(self, sampling_params, *, session, raw_prompt, **row):
        trajectory = session.trajectory(raw_prompt)
        turn = await trajectory.generate(sampling_params)
        return trajectory.finish(turn.termination)
"""


_numbers = itertools.count()


class Fleet:
    """A rollout whose nth engine has the nth fault."""

    def __init__(self, make_rollout: Any, faults: dict[int, str], **engine: Any) -> None:
        source = textwrap.dedent(ENGINE).replace("PLAN = {}", f"PLAN = {faults!r}")
        # A file with the same text is the same module, with its list.
        source += f"# {next(_numbers)}\n"
        slot = {"name": "./frail.py:Frail", "health_interval": 0.01, "health_timeout": 0.05, **engine}
        others = {key: slot.pop(key) for key in list(slot) if "." in key}
        changes = {
            "cluster.runtime": "local",
            "rollout.retries": slot.pop("retries", 0),
            **others,
            "rollout.engine": slot,
            "rollout.agent": {"loops": [{"name": "./once.py:Once"}]},
        }
        self.rollout = make_rollout(changes, {"frail.py": source, "once.py": LOOP})
        self.replicas = self.rollout.replicas
        self.replicas.update_weights(Weights(5))

    def versions(self) -> list[int]:
        return [engine.version for engine in self.rollout.engines]


@pytest.mark.parametrize("fault", ["ill", "hangs", "stuck"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_replica_that_cannot_serve_any_more_is_replaced(
    make_rollout: Any, make_row: Any, fault: str, replicas: int
) -> None:
    fleet = Fleet(make_rollout, {0: fault}, replicas=replicas, restarts=1, health_timeout=0.5)
    faulty = fleet.rollout.engines[0]
    if fault != "ill":
        # Here an engine that hangs keeps its request, as no process ends; on Ray it would fail with the process.
        for worker in fleet.rollout.workers:
            worker._engines._turn_timeout = 2.0
    for _ in range(20):
        results = fleet.rollout([make_row(str(index)) for index in range(4)])
        assert all(result.status == "trained" and result.attempts == 1 for result in results)
        assert {version for result in results for version in result.outputs[0].policy_versions} == {5}
        if fleet.rollout.engines[0] is not faulty and fleet.versions() == [5] * replicas:
            break
    else:
        pytest.fail("the replica was not replaced during 20 rollouts")
    assert fleet.replicas.metrics()["restarts"] == 1


def test_a_replica_that_computes_is_not_replaced_however_long_its_requests_wait(
    make_rollout: Any, make_row: Any
) -> None:
    """A request of agentrl's own would wait behind those that wait already."""
    fleet = Fleet(make_rollout, {0: "busy"}, name="./frail.py:Counting", restarts=1, retries=2)
    for worker in fleet.rollout.workers:
        worker._engines._turn_timeout = 0.2
    (result,) = fleet.rollout([make_row("a")])
    assert result.status == "trained" and result.attempts > 1
    assert len(fleet.rollout.engines) == 1 and "restarts" not in fleet.replicas.metrics()


def test_a_replica_that_computes_nothing_is_replaced_before_a_request_has_timed_out(
    make_rollout: Any, make_row: Any
) -> None:
    fleet = Fleet(make_rollout, {0: "stuck"}, name="./frail.py:Counting", restarts=1)
    faulty = fleet.rollout.engines[0]
    for worker in fleet.rollout.workers:
        # On Ray the request would fail with the process.
        worker._engines._turn_timeout = 2.0
    (result,) = fleet.rollout([make_row("a")])
    assert (result.status, result.attempts) == ("trained", 1)
    assert fleet.rollout.engines[0] is not faulty and fleet.replicas.metrics()["restarts"] == 1


def test_only_time_in_which_requests_wait_counts_as_standing_still(make_rollout: Any) -> None:
    replicas, member = Fleet(make_rollout, {}, health_timeout=10.0).replicas, ReplicaState([], 0)
    clock = [0.0]

    async def look(number: float, in_flight: int, is_measured: bool = True) -> None:
        asyncio.get_running_loop().time = lambda: clock[0]  # type: ignore[method-assign]
        replicas._note_progress(member, Progress(number, in_flight, is_measured))

    def after(seconds: float, *progress: Any) -> None:
        clock[0] += seconds
        asyncio.run(look(*progress))

    after(0.0, 5, 0)
    after(100.0, 5, 1)  # it may just have come
    after(9.0, 5, 1)
    after(2.0, 6, 1)
    after(9.0, 6, 1)
    after(100.0, 6, 0)
    after(1.0, 6, 3, False)
    after(100.0, 6, 3, False)  # no answer in 100 seconds may be a long answer
    member.looked = None
    after(0.0, 6, 3)
    with pytest.raises(EngineError, match="computed nothing for 11 s, with 3 requests"):
        after(11.0, 6, 3)


def test_the_hosts_of_a_replica_are_started_and_replaced_together(make_rollout: Any, make_row: Any) -> None:
    hosts = {"cluster.runtime": "ray", "tensor_parallel": 4, "nodes": 2}
    fleet = Fleet(make_rollout, {1: "lost"}, replicas=1, restarts=1, **hosts)
    (member,) = fleet.replicas._members
    before = [server._instance._engine for server in member.servers]
    assert [each.context.node_rank for each in before] == [0, 1]
    assert before[0].context.rendezvous == before[1].context.rendezvous != ""
    # Only the first host gets weights and requests.
    assert [each.version for each in before] == [5, 0]

    async def until_replaced() -> None:
        while fleet.replicas._restarts < 1:
            await asyncio.sleep(0.01)

    fleet.replicas.runtime.run(asyncio.wait_for(fleet.replicas.watched(until_replaced()), 10))
    assert fleet.rollout([make_row()])[0].status == "trained"
    after = [server._instance._engine for server in member.servers]
    assert after[0] is not before[0] and after[0].version == 5
    assert after[1] is not before[1] and [each.context.node_rank for each in after] == [0, 1]
    assert after[0].context.rendezvous == after[1].context.rendezvous
    assert (before[0].requests, before[1].requests, after[0].requests, after[1].requests) == (0, 0, 1, 0)


def plugin_of(fleet: Fleet) -> Any:
    """The module of the fleet's engines."""
    return sys.modules[type(fleet.rollout.engines[0]).__module__]


def test_time_in_which_a_replica_restarts_counts_against_no_trajectory(
    make_rollout: Any, make_row: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"rollout.trajectory_timeout": 60.0, "rollout.turn_timeout": 60.0}
    fleet = Fleet(make_rollout, {0: "ill", 1: "takes long"}, restarts=1, **limits)
    clock, skipped = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + sum(skipped))
    plugin_of(fleet).SKIP.append(lambda: skipped.append(300.0))
    (result,) = fleet.rollout([make_row()])
    assert sum(skipped) == 300.0
    assert result.error is None and result.attempts == 1


@pytest.mark.parametrize("level", [1, 2])
def test_a_replica_that_is_still_starting_when_engines_go_to_sleep_sleeps_too(
    make_rollout: Any, make_row: Any, level: int
) -> None:
    fleet = Fleet(make_rollout, {0: "ill", 2: "slow"}, replicas=2, restarts=1, sleep=level)
    plugin = plugin_of(fleet)
    assert fleet.rollout([make_row(), make_row()])[0].status == "trained"
    plugin.OPEN.set()
    fleet.replicas.sleep()
    assert plugin.MADE[2].calls == (["update 5"] if level == 1 else []) + [f"sleep {level}"]
    fleet.replicas.update_weights(Weights(6))
    woken = ["wake ['weights']", "update 6", "wake ['kv_cache']"]
    assert [engine.calls[-3:] for engine in plugin.MADE[1:]] == [woken, woken]
    # Those that are awake are not woken.
    fleet.replicas.wake_up()
    assert [engine.calls[-3:] for engine in plugin.MADE[1:]] == [woken, woken]


def test_engines_whose_weights_were_discarded_get_them_back_without_an_update(make_rollout: Any) -> None:
    fleet = Fleet(make_rollout, {}, sleep=2)
    fleet.replicas.sleep()
    fleet.replicas.wake_up()
    expected = ["update 5", "sleep 2", "wake ['weights']", "update 5", "wake ['kv_cache']"]
    assert fleet.rollout.engines[0].calls == expected


def test_every_host_of_a_replica_is_closed(make_rollout: Any) -> None:
    hosts = {"cluster.runtime": "ray", "tensor_parallel": 4, "nodes": 2}
    fleet = Fleet(make_rollout, {}, replicas=2, **hosts)
    plugin = plugin_of(fleet)
    fleet.replicas.close()
    fleet.replicas.close()
    assert [engine.calls[-1] for engine in plugin.MADE] == ["close"] * 4
    assert [engine.calls.count("close") for engine in plugin.MADE] == [1] * 4


def test_closing_ends_a_restart_with_the_server_that_it_has_made(make_rollout: Any, make_row: Any) -> None:
    fleet = Fleet(make_rollout, {0: "ill", 2: "slow"}, replicas=2, restarts=3)
    plugin, handlers = plugin_of(fleet), list(logging.getLogger().handlers)
    fleet.rollout([make_row(), make_row()])
    assert len(plugin.MADE) == 3
    fleet.replicas.close()
    assert [engine.calls[-1:] for engine in plugin.MADE[1:]] == [["close"], ["close"]]
    left = [each for each in logging.getLogger().handlers if each not in handlers]
    assert not left

    async def later() -> None:
        plugin.OPEN.set()
        await asyncio.sleep(0.02)

    fleet.replicas.runtime.run(fleet.replicas.watched(later()))
    assert len(plugin.MADE) == 3


def test_a_start_says_what_it_waits_for(
    make_rollout: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="agentrl_core")
    monkeypatch.setattr(boundary, "WAIT_SECONDS", 0.01)
    lines: list[str] = []

    class Opens(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waiting for" in record.getMessage():
                lines.append(record.getMessage())
                for name, module in list(sys.modules.items()):
                    if "frail" in name:
                        module.OPEN.set()

    handler = Opens()
    logging.getLogger("agentrl_core").addHandler(handler)
    try:
        Fleet(make_rollout, {1: "slow"}, replicas=2)
    finally:
        logging.getLogger("agentrl_core").removeHandler(handler)
    text = r"waiting for engine-1: .*frail.py:Frail to load the model and to be healthy.* \(\d+ s so far\)"
    assert re.search(text, "\n".join(lines), re.DOTALL)


def test_without_restarts_the_last_replica_ends_the_rollout(make_rollout: Any, make_row: Any) -> None:
    fleet = Fleet(make_rollout, {0: "ill"}, restarts=0)
    with pytest.raises(RolloutError, match="(?s)the scheduler has died.*no engine replica is alive; the last one: "):
        fleet.rollout([make_row()])


def test_a_replica_that_cannot_be_started_again_is_given_up(make_rollout: Any, make_row: Any) -> None:
    fleet = Fleet(make_rollout, {0: "ill", 1: "start", 2: "start"}, restarts=2)
    with pytest.raises(RolloutError, match="(?s)none can be started.*no such device"):
        fleet.rollout([make_row()])
    with pytest.raises(EngineError, match="no engine replica is alive to take the new weights"):
        fleet.replicas.update_weights(Weights(6))


def test_requests_beyond_the_limit_queue_at_the_replica(make_rollout: Any, make_row: Any) -> None:
    fleet = Fleet(make_rollout, {}, max_in_flight=3)
    results = fleet.rollout([make_row(str(index)) for index in range(10)])
    metrics = fleet.replicas.metrics()
    queued = sorted(seconds for result in results for seconds in [node.request.wait for node in result.turns])
    assert len(queued) == 10 and queued[:3] == [0.0] * 3 and queued[-1] > 0
    assert metrics["running_max"] == 3 and metrics["queue_max"] > 0 and metrics["requests"] == 10
    assert fleet.replicas.metrics() == {}


def test_the_longest_pause_of_each_replica_is_a_metric(make_rollout: Any, make_row: Any) -> None:
    fleet = Fleet(make_rollout, {}, replicas=3)
    fleet.rollout([make_row(str(index)) for index in range(12)])
    for replica, seconds in [(0, 0.2), (0, 0.5), (0, 0.1), (2, 0.3)]:
        fleet.replicas.servers[replica]._instance._requests.paused(seconds)
    found = {engine_metric(name): value for name, value in fleet.replicas.metrics().items()}
    pauses = {name: value for name, value in found.items() if "pause" in name}
    assert pauses == {
        "timing/engine/pause": 0.5, "timing/engine/pause/replica_0": 0.5, "timing/engine/pause/replica_2": 0.3,
    }  # fmt: skip


def test_engines_sleep_from_the_rollout_to_the_next_weights(make_rollout: Any, make_row: Any) -> None:
    fleet = Fleet(make_rollout, {}, replicas=2, sleep=2)
    fleet.rollout([make_row()])
    fleet.replicas.sleep()
    fleet.replicas.update_weights(Weights(6))
    fleet.replicas.update_weights(Weights(7))
    expected = ["update 5", "sleep 2", "wake ['weights']", "update 6", "wake ['kv_cache']", "update 7"]
    assert [engine.calls for engine in fleet.rollout.engines] == [expected] * 2


def test_results_say_which_replica_served_each_request(make_rollout: Any, make_row: Any) -> None:
    fleet = Fleet(make_rollout, {0: "ill"}, replicas=2, restarts=0)
    results = fleet.rollout([make_row(str(index)) for index in range(4)])
    assert [[(node.request.replica, node.request.wait) for node in result.turns] for result in results] == [
        [(1, 0.0)]
    ] * 4


def test_engines_do_not_sleep_unless_told_to(make_rollout: Any) -> None:
    fleet = Fleet(make_rollout, {})
    fleet.replicas.sleep()
    fleet.replicas.update_weights(Weights(6))
    assert fleet.rollout.engines[0].calls == ["update 5", "update 6"]


def test_an_engine_that_cannot_sleep_says_why(make_rollout: Any) -> None:
    fleet = Fleet(make_rollout, {0: "sleep"}, sleep=1)
    with pytest.raises(EngineError, match="sleep failed: RuntimeError: a request holds it awake"):
        fleet.replicas.sleep()


def test_an_engine_that_never_falls_asleep_holds_nobody_up(make_rollout: Any, caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(make_rollout, {0: "never sleeps"}, sleep=1, start_timeout=0.2)
    fleet.replicas.sleep()
    assert "has not fallen asleep within 0.2 s" in caplog.text
    fleet.replicas.update_weights(Weights(6))
    assert fleet.rollout.engines[0].calls == ["update 5", "wake ['weights']", "update 6", "wake ['kv_cache']"]


def test_a_replica_that_is_frozen_before_a_weight_update_does_not_hang_the_run(
    make_rollout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own deadline, in the frozen process, is out of reach: START_GRACE makes the one outside come first here."""
    fleet = Fleet(make_rollout, {0: "frozen"}, start_timeout=60.0, restarts=1)
    monkeypatch.setattr(replicas_module, "START_GRACE", -59.8)
    fleet.replicas.update_weights(Weights(6))
    assert fleet.versions() == [6] and fleet.replicas.metrics()["restarts"] == 1


def test_a_replica_whose_process_dies_in_a_weight_update_is_replaced(make_rollout: Any) -> None:
    fleet = Fleet(make_rollout, {0: "dies"}, restarts=1)
    fleet.replicas.update_weights(Weights(6))
    assert fleet.versions() == [6] and fleet.replicas.metrics()["restarts"] == 1


def test_a_healthy_replica_that_refuses_weights_ends_the_run(make_rollout: Any) -> None:
    fleet = Fleet(make_rollout, {0: "refuses"}, replicas=2, restarts=1)
    with pytest.raises(EngineError, match="update_weights failed: RuntimeError: no such tensor"):
        fleet.replicas.update_weights(Weights(6))
    assert "restarts" not in fleet.replicas.metrics()
