"""For all tests of this tree: none depends on how busy the machine is."""

import faulthandler
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

# Not in the environments of engines.
with suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")


STDERR = pytest.StashKey[int]()
HANG_SECONDS = 60.0
"""After its timeout, for a test to end."""


def pytest_configure(config: pytest.Config) -> None:
    # Nothing is captured yet.
    config.stash[STDERR] = os.dup(2)


def pytest_runtest_setup() -> None:
    if time.time() > float(os.environ.get("AGENTRL_TESTS_END", "inf")):
        pytest.skip("no time is left: AGENTRL_TESTS_END, in seconds since 1970, has passed")


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Ends a process whose test hangs in a library, where no signal reaches Python, and shows where it hangs."""
    marker = item.get_closest_marker("timeout")
    # Third parties' environments have no pytest-timeout.
    limit = 0.0
    if item.config.pluginmanager.hasplugin("timeout"):
        limit = float(marker.args[0] if marker else item.config.getini("timeout") or 0)
    if limit:
        faulthandler.dump_traceback_later(limit + HANG_SECONDS, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def console_of_stdout() -> None:
    """A command with ``--json`` leaves rich's console at standard error, where the next test in this process would not
    look."""
    # Not in the environments of engines.
    with suppress(ImportError):
        import rich

        rich.get_console().stderr = False


@pytest.fixture(scope="session")
def warm_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment with which the processes of a Ray that starts are forked from one that has imported everything."""
    folder, address = Path(__file__).parent / "tests", str(tmp_path_factory.mktemp("warm") / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        # Before the server has imported anything: those who ask wait for it.
        listener.bind(address)
        listener.listen(64)
        command = [sys.executable, "-c", f"import warm_python; warm_python.serve({listener.fileno()})"]
        server = subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
    with server:
        runtime_env = {"py_executable": f"{sys.executable} -S {folder}/warm_python.py {address}"}
        yield {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": runtime_env})}
        assert server.poll() is None, "it ends with its standard input"


@pytest.fixture(scope="module")
def ray_runtime(warm_ray: dict[str, str]) -> Iterator[Any]:
    """One warm cluster for a whole module, and for the runs of ``fit`` in it."""
    import ray

    from agentrl_core.controller import make_runtime

    with pytest.MonkeyPatch.context() as patch:
        for name, value in warm_ray.items():
            patch.setenv(name, value)
        made = make_runtime("ray", num_cpus=32)
    with made:
        yield made
    assert not ray.is_initialized()
