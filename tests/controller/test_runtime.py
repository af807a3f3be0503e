"""The local runtime: actors, and coroutines run from synchronous code."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from agentrl_core.api.errors import ConfigError, WorkerError
from agentrl_core.controller import ActorHandle, ActorOptions, ClassWithInitArgs, Worker, make_runtime


class Echo:
    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def now(self, text: str) -> str:
        return self.prefix + text

    async def later(self, text: str) -> str:
        await asyncio.sleep(0)
        return self.prefix + text

    async def fail(self) -> None:
        raise KeyError("as it was raised")


def test_actor_methods_async_or_not_are_awaited() -> None:
    with make_runtime("local") as runtime:
        echo = runtime.actor(Echo, "> ", name="echo")
        assert isinstance(echo, ActorHandle) and echo.name == "echo"
        assert runtime.run(echo.call("now", "a")) == "> a"
        assert runtime.run(echo.call("later", text="b")) == "> b"
        with pytest.raises(KeyError, match="as it was raised"):
            runtime.run(echo.call("fail"))
        echo.kill()
        with pytest.raises(WorkerError, match="'echo'.*killed"):
            runtime.run(echo.call("now", "c"))


def test_run_uses_the_calling_thread_and_one_loop() -> None:
    async def here() -> tuple[threading.Thread, asyncio.AbstractEventLoop]:
        return threading.current_thread(), asyncio.get_running_loop()

    with make_runtime("local") as runtime:
        first, second = runtime.run(here()), runtime.run(here())
        assert first == second and first[0] is threading.current_thread()


def test_run_works_where_a_loop_already_runs() -> None:
    async def inner() -> threading.Thread:
        await asyncio.sleep(0)
        return threading.current_thread()

    async def notebook() -> tuple[threading.Thread, threading.Thread]:
        with make_runtime("local") as runtime:
            return runtime.run(inner()), runtime.run(inner())

    first, second = asyncio.run(notebook())
    assert first is second and first is not threading.current_thread()


def test_run_inside_run_does_not_deadlock() -> None:
    with make_runtime("local") as runtime:

        async def inner() -> int:
            return 3

        async def outer() -> int:
            return runtime.run(inner())

        assert runtime.run(outer()) == 3


def test_worker_groups_of_the_runtime_are_closed_with_it() -> None:
    closed = []

    class Closing(Worker):
        def close(self) -> None:
            closed.append(self.rank)

    with make_runtime("local") as runtime:
        group = runtime.worker_group(ClassWithInitArgs(Closing), "closing", world_size=2)
        assert (group.role, group.world_size) == ("closing", 2)
    runtime.shutdown()
    assert closed == [0, 1]


def test_unsuitable_settings_are_config_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'slurm', allowed are 'local' and 'ray'"):
        make_runtime("slurm")
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "agentrl_core.controller.ray_runtime", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'agentrl-core\[ray\]'"):
        make_runtime("ray")
    with make_runtime("local") as runtime, pytest.raises(ConfigError, match="cluster.runtime=ray"):
        runtime.actor(Echo, "", name="engine", options=ActorOptions(python="/env/bin/python"))


def test_a_ray_that_does_not_come_up_in_time_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def late(**_: object) -> None:
        raise Exception("The current node timed out during startup.")  # noqa: TRY002 - the class that Ray raises

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", late)
    with pytest.raises(WorkerError, match=r"within 7 s \(rollout.engine.start_timeout\): The current.*less busy"):
        make_runtime("ray", num_cpus=2, start_timeout=7.0)


def test_what_only_the_collector_frees_is_gone_before_ray_shuts_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference to an object of Ray that is freed while Ray shuts down ends the process without a word."""
    ray = pytest.importorskip("ray")

    class Reference:
        """In a cycle, as in the traceback of an exception that is kept."""

        def __init__(self) -> None:
            self.itself = self

    alive: list[bool] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    runtime = make_runtime("ray", num_cpus=2)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "shutdown", lambda: alive.append(reference() is not None))
    gc.disable()
    try:
        reference = weakref.ref(Reference())
        runtime.shutdown()
    finally:
        gc.enable()
    assert alive == [False]


def test_ray_may_take_longer_to_start_than_ray_allows_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    from ray._private import services

    late = iter([True, True, False])

    def get_node(*_: object) -> str:
        if next(late):
            raise RuntimeError("The current node timed out during startup.")
        return f"up within {os.environ['RAY_gcs_server_port_wait_time_s']} s"

    def init(**_: object) -> None:
        raise ValueError(services.get_node("address", "id"))

    monkeypatch.delenv("RAY_gcs_server_port_wait_time_s", raising=False)
    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConfigError, match="up within 300 s"):
        make_runtime("ray", num_cpus=2, start_timeout=300.0)
    assert services.get_node is get_node and "RAY_gcs_server_port_wait_time_s" not in os.environ


def test_ray_does_not_wait_for_a_raylet_that_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    from ray._private import services

    def get_node(*_: object) -> str:
        raise RuntimeError("The current node timed out during startup.")

    def init(**_: object) -> None:
        (tmp_path / "raylet").symlink_to("/bin/true")
        process = subprocess.Popen([tmp_path / "raylet"])
        try:
            services.get_node("address", "id")
        finally:
            process.wait()

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConfigError, match=r"Ray cannot be started: its raylet exited as it started; .*raylet.err"):
        make_runtime("ray", num_cpus=2, start_timeout=300.0)
