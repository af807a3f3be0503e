"""How a run starts or joins Ray: its patience, the environment of every process, and what a refusal means."""

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
from ray._private import services
from ray.exceptions import AuthenticationError

from agentrl_core.engine_kit.ports import use_ray_interface

_HIDES_GPUS = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
"""With 1 a process that was given no GPU sees none; by itself Ray shows it all."""
_OF_NETWORKS = ("GLOO_", "NCCL_", "TORCH_NCCL_")
"""Beginnings of the variables that choose interfaces and tune collectives."""


def missing_token(error: BaseException | None) -> str:
    """What to do where Ray refuses a connection without the cluster's token; empty for other errors."""
    while error is not None:
        if isinstance(error, AuthenticationError) or AuthenticationError.__name__ in str(error):
            return (
                ". The cluster takes only those who know its token: set RAY_AUTH_MODE=token for agentrl and for each "
                "`ray start`, and give all nodes the same ~/.ray/auth_token (`ray get-auth-token --generate` makes one)"
            )
        error = error.__cause__
    return ""


@contextmanager
def patient_start(limit: float) -> Iterator[None]:
    """Let Ray's processes take up to ``limit`` seconds to start. Ray gives each 30 s; for the raylet it has no
    switch, but counts only when a question about it has failed."""
    get_node, name = services.get_node, "RAY_gcs_server_port_wait_time_s"
    end, before, began = time.monotonic() + limit, os.environ.get(name), time.time()

    def patiently(*args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                return get_node(*args, **kwargs)
            except RuntimeError as error:
                if time.monotonic() > end:
                    raise
                if _raylet_exited(began):
                    logs = "/tmp/ray/session_latest/logs/raylet.err and raylet.out"
                    # Ray goes on asking after a RuntimeError.
                    raise ConnectionError(f"its raylet exited as it started; {logs} may say why. Try again") from error
                time.sleep(0.1)

    services.get_node = patiently
    os.environ.setdefault(name, str(math.ceil(limit)))
    try:
        yield
    finally:
        services.get_node = get_node
        if before is None:
            del os.environ[name]


def _raylet_exited(since: float) -> bool:
    """Whether one that this process has started since then has ended: nobody has waited for it yet."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it may be gone by now
            is_new = child.create_time() >= since - 1
            if is_new and child.status() == psutil.STATUS_ZOMBIE and child.name() == "raylet":
                return True
    return False


def environment(cpu_threads: int | None) -> dict[str, Any]:
    """One OpenMP thread per process, as many share a node, no progress bars or notes of libraries on the screen, and no
    GPUs that are others', unless the user's environment says otherwise. What it says of networks counts on every node.
    """
    threads = os.environ.get("OMP_NUM_THREADS", "1") if cpu_threads is None else str(cpu_threads)
    defaults = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", _HIDES_GPUS: "1"}
    given = {name: value for name, value in os.environ.items() if name in defaults or name.startswith(_OF_NETWORKS)}
    setup = f"{use_ray_interface.__module__}.{use_ray_interface.__name__}"
    return {"env_vars": {"OMP_NUM_THREADS": threads, **defaults, **given}, "worker_process_setup_hook": setup}
