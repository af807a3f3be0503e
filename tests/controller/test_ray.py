"""Worker groups and actors on Ray: one cluster for the whole module."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import AuthenticationError

from agentrl_core.api.errors import ConfigError, EngineError, WorkerError
from agentrl_core.controller import (
    ActorHandle,
    ActorOptions,
    ClassWithInitArgs,
    Dispatch,
    DispatchMode,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    create_colocated_worker_cls,
    make_runtime,
    ray_failures,
    register,
)
from agentrl_core.controller.dispatch import Plan
from agentrl_core.controller.ray_runtime import RayRuntime
from agentrl_core.controller.ray_start import environment
from agentrl_core.controller.runtime import ActorDiedError
from agentrl_core.protocol import DataProto

pytestmark = pytest.mark.ray


def worker_class() -> type:
    """Made in a function, so that it travels to the actors by value."""

    class Counting(Worker):
        def __init__(self, start: int = 0) -> None:
            self.start = start

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def add(self, batch: DataProto, amount: int = 1) -> DataProto:
            x = batch.batch["x"]
            return DataProto.from_dict({"x": x + amount, "rank": torch.full_like(x, self.rank)})

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def scale(self, batch: DataProto) -> float:
            mine = batch.writable() if self.rank else batch
            if self.rank:
                mine.batch["x"].mul_(100)
            return float(mine.batch["x"].sum())

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def rows(self, batch: DataProto) -> int:
            return len(batch)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def place(self) -> tuple[int, int, int, str, bool]:
            return self.rank, self.world_size, self.start, os.environ["OMP_NUM_THREADS"], self.master_port > 0

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def pid(self) -> int:
            return os.getpid()

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def fail_on(self, rank: int) -> None:
            if self.rank == rank:
                raise KeyError("only rank one")
            threading.Event().wait()

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def fail_everywhere(self) -> None:
            raise ValueError(f"from rank {self.rank}")

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def fail_alike(self, folder: str) -> None:
            while self.rank == 0 and not Path(folder, "seen").exists():
                threading.Event().wait(0.01)
            raise ValueError("the same words")

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def wait_for_ever(self) -> None:
            threading.Event().wait()

        @register(
            dispatch_mode=DispatchMode("FIRST", lambda group, args, kwargs: Plan([(args, kwargs), None], [0], list))
        )
        def first_waits(self, folder: str) -> None:
            Path(folder, "waits").touch()
            threading.Event().wait()

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def die_on(self, rank: int) -> None:
            if self.rank == rank:
                os._exit(3)
            threading.Event().wait()

    return Counting


def async_worker_class() -> type:
    class Waiting(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        async def waited(self) -> int:
            await asyncio.sleep(0)
            return os.getpid()

    return Waiting


def actor_class() -> type:
    class Echo:
        def __init__(self) -> None:
            self.cancelled = False

        async def echo(self, text: str) -> str:
            await asyncio.sleep(0)
            return text

        async def through(self, other: ActorHandle, text: str) -> str:
            return f"through {await other.call('echo', text)}"

        async def engine_error(self) -> None:
            raise EngineError("out of memory")

        async def foreign_error(self) -> None:
            raise KeyError("foreign")

        async def forever(self) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled = True
                raise

        async def was_cancelled(self) -> bool:
            while not self.cancelled:
                await asyncio.sleep(0.01)
            return True

        async def die(self) -> None:
            os._exit(3)

    return Echo


def batch_of(rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)}, {"o": [str(row) for row in range(rows)]})


@pytest.fixture(scope="module")
def runtime(ray_runtime: RayRuntime) -> RayRuntime:
    return ray_runtime


@pytest.fixture(scope="module")
def colocated(runtime: RayRuntime) -> Iterator[RayWorkerGroup]:
    classes = create_colocated_worker_cls(
        {
            "counting": ClassWithInitArgs(worker_class(), start=7),
            "waiting": ClassWithInitArgs(async_worker_class()),
        }
    )
    with RayWorkerGroup(RayResourcePool([2], strategy="PACK"), classes, owns_pool=True) as both:
        yield both


@pytest.fixture(scope="module")
def group(colocated: RayWorkerGroup) -> RayWorkerGroup:
    return colocated.spawn(["counting"])["counting"]


FREE = ActorOptions(num_cpus=0)


class Environment:
    """Says what its process sees, and may choose GPUs itself, as engines on the trainer's GPUs do."""

    def __init__(self, devices: str | None = None) -> None:
        if devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = devices

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


def test_an_actor_without_a_gpu_sees_none_but_those_that_it_chooses(runtime: RayRuntime) -> None:
    async def seen(actor: ActorHandle) -> list[str]:
        return [await actor.call("variable", "CUDA_VISIBLE_DEVICES") for _ in range(2)]

    assert runtime.run(seen(runtime.actor(Environment, name="blind", options=FREE))) == ["", ""]
    assert runtime.run(seen(runtime.actor(Environment, "1,2", name="chooses", options=FREE))) == ["1,2", "1,2"]


def test_an_interpreter_that_a_node_lacks_is_named_with_the_node(
    runtime: RayRuntime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray starts it again and again, and the actor never comes."""
    # So that the node counts as another one.
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: ""))
    python = str(tmp_path / "bin" / "python")
    with pytest.raises(ConfigError, match=rf"'other' .* {python}, which is not on node \S+ \(127\.0\.0\.1\)"):
        runtime.actor(Environment, name="other", options=ActorOptions(num_cpus=0, python=python))
    runtime._check_python("this", sys.executable, ActorOptions())


def test_gloo_connects_by_the_interface_of_the_node_address(runtime: RayRuntime) -> None:
    actor = runtime.actor(Environment, name="connects", options=FREE)
    assert runtime.run(actor.call("variable", "GLOO_SOCKET_IFNAME")) == "lo"


def test_variables_of_networks_reach_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NCCL_SOCKET_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": "eth0", "PRIVATE": "x"}.items():
        monkeypatch.setenv(name, value)
    variables = environment(None)["env_vars"]
    assert (variables["NCCL_SOCKET_IFNAME"], variables["GLOO_SOCKET_IFNAME"]) == ("eth1", "eth0")
    assert "PRIVATE" not in variables


@pytest.mark.parametrize("cause", [AuthenticationError("no"), RuntimeError("ray.exceptions.AuthenticationError: no")])
def test_a_cluster_that_asks_for_a_token_says_how_to_give_it(monkeypatch: pytest.MonkeyPatch, cause: Exception) -> None:
    def refuse(**options: Any) -> None:
        # What Ray waits for is not prolonged: a cluster that refuses would be asked for as long.
        assert "RAY_gcs_server_port_wait_time_s" not in os.environ
        raise ConnectionError("Failed to connect to Ray cluster at 10.9.9.9:6379") from cause

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ConfigError, match=r"reached at 10\.9\.9\.9:6379: .* token: set RAY_AUTH_MODE=token"):
        RayRuntime(address="10.9.9.9:6379")


@pytest.mark.parametrize("rows", [0, 1, 2, 5])
def test_fewer_rows_than_workers_and_uneven_rows_keep_length_and_order(group: RayWorkerGroup, rows: int) -> None:
    out = group.add(batch_of(rows), amount=3)
    assert out.batch["x"].tolist() == [row + 3 for row in range(rows)]


def test_what_a_rank_keeps_goes_to_an_actor_without_the_driver(group: RayWorkerGroup, runtime: RayRuntime) -> None:
    class Taker:
        def total(self, batch: DataProto) -> int:
            return int(batch.batch["x"].sum())

    kept = group.keep("add", batch_of(3))
    assert isinstance(kept, ray.ObjectRef)
    taker = runtime.actor(Taker, name="taker", options=FREE)
    assert runtime.run(taker.call("total", kept)) == 0 + 1 + 2 + 3


def test_workers_know_their_place(group: RayWorkerGroup) -> None:
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    assert group.place() == [(0, 2, 7, threads, True), (1, 2, 7, threads, True)]


def test_no_reader_of_a_shared_batch_sees_the_write_of_another(group: RayWorkerGroup) -> None:
    batch = DataProto.from_dict({"x": torch.ones(200_000)})
    for _ in range(2):
        assert group.scale(batch) == [200_000.0, 20_000_000.0]


def test_ranks_that_failed_too_are_named(group: RayWorkerGroup) -> None:
    with pytest.raises(WorkerError, match=r"rank [01] of 2(.|\n)*from rank [01](.|\n)*Also failed: rank [01] of 2"):
        group.fail_everywhere()


def test_the_rank_that_failed_first_is_named_where_all_fail_with_the_same_words(
    group: RayWorkerGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ray_failures._group_error

    def after_the_first(*args: Any) -> WorkerError:
        (tmp_path / "seen").touch()
        return original(*args)

    monkeypatch.setattr(ray_failures, "_group_error", after_the_first)
    monkeypatch.setattr(ray_failures, "OTHERS_GRACE_SECONDS", 60.0)
    with pytest.raises(WorkerError, match=r"^rank 1 of 2(.|\n)*Also failed: rank 0 of 2"):
        group.fail_alike(str(tmp_path))


def test_a_rank_that_raises_or_dies_is_named_while_another_hangs(runtime: RayRuntime) -> None:
    with runtime.worker_group(ClassWithInitArgs(worker_class()), "failing", world_size=2) as group:
        with pytest.raises(
            WorkerError, match=r"rank 1 of 2 of 'failing' on node .*KeyError(.|\n)*in fail_on"
        ) as caught:
            group.fail_on(1)
        assert isinstance(caught.value.__cause__, KeyError)
        with pytest.raises(ActorDiedError, match=r"rank 1 of 2 of 'failing' on node .*'die_on'.*died"):
            group.die_on(1)


def test_a_rank_that_dies_is_named_and_not_the_one_that_lost_its_connection_to_it(runtime: RayRuntime) -> None:
    """The survivor's error comes first, as gloo's does where a node is killed."""

    class Connected(Worker):
        @register(Dispatch.ONE_TO_ALL)
        def talk(self, ports: list[int]) -> None:
            if self.rank == 1:
                with socket.create_connection(("127.0.0.1", ports[0])) as connection:
                    connection.recv(1)
                    os.kill(os.getpid(), signal.SIGKILL)
            connection, _ = self.listener.accept()
            connection.sendall(b"x")
            if not connection.recv(1):
                raise ConnectionResetError("Connection closed by peer")

        @register(Dispatch.ONE_TO_ALL)
        def port(self) -> int:
            self.listener = socket.create_server(("127.0.0.1", 0))
            return int(self.listener.getsockname()[1])

    with runtime.worker_group(ClassWithInitArgs(Connected), "connected", 2) as group:
        with pytest.raises(ActorDiedError, match="^rank 1 of 2 of 'connected'"):
            group.talk(group.port())


def test_a_rank_that_dies_idle_surfaces_and_ends_a_call_of_others_that_hangs(
    runtime: RayRuntime, tmp_path: Path
) -> None:
    with (
        runtime.worker_group(ClassWithInitArgs(worker_class()), "watched", world_size=2) as group,
        ThreadPoolExecutor(1) as pool,
    ):
        pids = group.pid()
        hanging = pool.submit(group.first_waits, str(tmp_path))
        while not (tmp_path / "waits").exists():
            time.sleep(0.01)
        os.kill(pids[1], signal.SIGKILL)
        died = r"rank 1 of 2 of 'watched' on node .* the last method called on it was watched\.pid(.|\n)*exit"
        with pytest.raises(ActorDiedError, match=died):
            hanging.result()
        with pytest.raises(ActorDiedError, match=died):
            group.pid()


def test_a_frozen_rank_is_named_instead_of_hanging_the_run(
    runtime: RayRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_failures, "FROZEN_SECONDS", 5.0)
    with runtime.worker_group(ClassWithInitArgs(worker_class()), "frozen", world_size=2) as group:
        os.kill(group.pid()[1], signal.SIGSTOP)
        frozen = (
            r"rank 1 of 2 of 'frozen' on node .* is frozen: it has given no sign of life for 5 s; the last method "
            r"called on it was frozen\.wait_for_ever"
        )
        for call in (group.wait_for_ever, group.pid):
            with pytest.raises(WorkerError, match=frozen):
                call()


@pytest.mark.slow
def test_a_rank_that_freezes_in_its_constructor_is_named_instead_of_hanging_the_start(
    runtime: RayRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Freezing(Worker):
        def __init__(self) -> None:
            # For ever: a process that something continues freezes again.
            while self.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)

    monkeypatch.setattr(ray_failures, "FROZEN_SECONDS", 5.0)
    frozen = r"rank 1 of 2 of 'stuck' on node .* is frozen(.|\n)*the last method called on it was stuck\.__init__"
    with pytest.raises(WorkerError, match=frozen):
        runtime.worker_group(ClassWithInitArgs(Freezing), "stuck", world_size=2)


def test_an_error_in_the_constructor_names_the_rank(runtime: RayRuntime) -> None:
    with pytest.raises(WorkerError, match=r"'broken'.*__init__(.|\n)*unexpected keyword"):
        runtime.worker_group(ClassWithInitArgs(worker_class(), wrong=1), "broken")


def test_colocated_classes_share_processes_and_async_methods_work(colocated: RayWorkerGroup) -> None:
    groups = colocated.spawn(["counting", "waiting"])
    assert groups["counting"].pid() == groups["waiting"].waited()
    groups["counting"].close()
    assert len(groups["waiting"].waited()) == 2
    with pytest.raises(WorkerError, match=r"no role 'reward'; it has \['counting', 'waiting'\]"):
        colocated.spawn(["reward"])


def test_a_batch_for_several_ranks_is_put_once(group: RayWorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    puts: list[object] = []
    fetched: list[object] = []
    put, get = ray.put, ray.get

    def watched_get(refs: Any, **options: Any) -> Any:
        # The liveness watch asks for single pings whenever it likes; a call fetches a list.
        fetched.extend([refs] if isinstance(refs, list) else [])
        return get(refs, **options)

    monkeypatch.setattr(ray, "put", lambda value, **options: (puts.append(value), put(value, **options))[1])
    monkeypatch.setattr(ray, "get", watched_get)
    batch = batch_of(4)
    assert group.rows(batch) == [4, 4]
    assert puts == [batch] and len(fetched) == 1


def test_a_cluster_that_is_too_small_says_what_it_has_and_what_is_needed(runtime: RayRuntime) -> None:
    with pytest.raises(WorkerError, match="could not place the pool 'big'"):
        RayResourcePool([100], name_prefix="big").bundles(timeout=0)
    with pytest.raises(WorkerError, match="--num-cpus=101` or more"):
        runtime.actor(actor_class(), name="too much", options=ActorOptions(num_cpus=101))


def test_actors_are_called_from_any_loop_and_can_be_passed_on(runtime: RayRuntime) -> None:
    first = runtime.actor(actor_class(), name="first", options=ActorOptions(num_cpus=0))
    second = runtime.actor(actor_class(), name="second", options=ActorOptions(num_cpus=0, python=sys.executable))
    assert runtime.run(first.call("echo", "a")) == "a"
    assert asyncio.run(first.call("echo", text="b")) == "b"
    assert runtime.run(first.call("through", second, "c")) == "through c"
    assert runtime.run(first.call("echo", second)) == second != first

    async def many() -> list[str]:
        return await asyncio.gather(*(first.call("echo", str(number)) for number in range(50)))

    assert runtime.run(many()) == [str(number) for number in range(50)]

    with pytest.raises(EngineError, match="out of memory"):
        runtime.run(first.call("engine_error"))
    with pytest.raises(WorkerError, match=r"actor 'first', in 'foreign_error': KeyError(.|\n)*foreign") as caught:
        runtime.run(first.call("foreign_error"))
    assert isinstance(caught.value.__cause__, KeyError)

    async def cancel() -> bool:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(first.call("forever"), timeout=0.2)
        return await asyncio.wait_for(first.call("was_cancelled"), timeout=20)

    assert runtime.run(cancel())

    with pytest.raises(WorkerError, match="actor 'second', in 'die'.*died"):
        runtime.run(second.call("die"))
    first.kill()
    with pytest.raises(WorkerError, match="'first'"):
        runtime.run(first.call("echo", "d"))


def test_a_runtime_leaves_a_ray_that_it_did_not_start(runtime: RayRuntime) -> None:
    with make_runtime("ray"):
        pass
    assert ray.is_initialized()


@pytest.mark.slow
def test_a_ray_that_a_run_starts_listens_on_loopback_only() -> None:
    """In a process of its own: here the fixture's Ray may have been started by another test."""
    code = """
import os
from pathlib import Path
from agentrl_core.controller import make_runtime
from agentrl_core.hosting.processes import family

class Pid:
    def pid(self): return os.getpid()

with make_runtime("ray", num_cpus=2) as runtime:
    runtime.run(runtime.actor(Pid, name="pid").call("pid"))
    sockets = set()
    for pid in family(os.getpid()):
        for each in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                sockets.add(os.readlink(each))
            except OSError:
                pass
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                print("listens:", fields[1].partition(":")[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    found = {line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("listens:")}
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert found and found <= loopback, done.stdout + done.stderr


def test_an_actor_that_restarts_and_has_a_handle_brings_no_warning_of_ray(
    runtime: RayRuntime, capfd: pytest.CaptureFixture[str]
) -> None:
    class Asking:
        def __init__(self, other: ActorHandle) -> None:
            self.other = other

        async def ask(self) -> int:
            answer: int = await self.other.call("pid")
            return answer

        async def die(self) -> None:
            os._exit(1)

    class Pid:
        def pid(self) -> int:
            return os.getpid()

    other = runtime.actor(Pid, name="other")
    asking = runtime.actor(Asking, other, name="asking", options=ActorOptions(restarts=1))
    pid = runtime.run(other.call("pid"))
    assert runtime.run(asking.call("ask")) == pid
    with pytest.raises(WorkerError, match="died"):
        runtime.run(asking.call("die"))
    assert runtime.run(asking.call("ask")) == pid
    assert "constructor arguments" not in capfd.readouterr().err


@pytest.mark.parametrize("is_here", [True, False])
def test_a_frozen_actor_is_killed_where_ray_gives_up(
    runtime: RayRuntime, monkeypatch: pytest.MonkeyPatch, is_here: bool
) -> None:
    """As Ray does for a process that was frozen for minutes: its connection is lost."""

    class Pid:
        def pid(self) -> int:
            return os.getpid()

    actor = runtime.actor(Pid, name="frozen", options=ActorOptions(restarts=1))
    pid = runtime.run(actor.call("pid"))
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    monkeypatch.setattr(ray, "kill", lambda *_, **__: None)
    if not is_here:
        # As if the driver were on another node than the actor.
        elsewhere = type("Elsewhere", (), {"get_node_id": lambda self: ""})
        monkeypatch.setattr(ray, "get_runtime_context", elsewhere)
    actor.restart()
    monkeypatch.undo()

    async def another() -> int:
        while True:
            try:
                answer: int = await actor.call("pid")
            except WorkerError:
                continue
            return answer

    assert runtime.run(another()) != pid
    actor.kill()
