"""Profiles of a process: a trace that Perfetto opens, Python's stacks and, on CUDA, a snapshot of the memory."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger(__name__)
_MOST_ALLOCATIONS = 1_000_000
_PY_SPY_SECONDS = 60
"""Time for py-spy to write what it has seen."""
_active: Any = None
"""A process can have one profiler; the first who asks for it names the files."""


def start_profile() -> bool:
    """Start the profiler of this process; False where it runs already."""
    global _active
    if _active is not None:
        return False
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    _active = profile(activities=activities, experimental_config=all_threads)
    with _without_marks():
        _active.start()
    return True


def stop_profile(path: Path) -> None:
    """Stop it and write ``<path>.json.gz``, and on CUDA ``<path>.memory.pickle`` for ``pytorch.org/memory_viz``."""
    global _active
    profiler, _active = _active, None
    with _without_marks():
        profiler.stop()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(f"{path}.json.gz")
    if torch.cuda.is_available():
        torch.cuda.memory._dump_snapshot(f"{path}.memory.pickle")  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)


@contextmanager
def _without_marks() -> Iterator[None]:
    """Keep the marks off the terminal that torch writes for tracers of the system.

    Its own log level cannot: they rank above errors.
    """
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
            written.seek(0)
            os.write(2, b"".join(line for line in written if not line.startswith(b"USDT:")))


@contextmanager
def stacks_sampled(path: Path) -> Iterator[None]:
    """Sample the stacks of this process's threads with py-spy into a speedscope file; nothing where it isn't installed.

    py-spy may not be allowed to look at this process. That is a warning.
    """
    beside = Path(sys.executable).with_name("py-spy")
    py_spy = str(beside) if beside.exists() else shutil.which("py-spy")
    if py_spy is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [py_spy, "record", "--pid", str(os.getpid()), "--format", "speedscope", "--threads", "--nonblocking"]
    sampler = subprocess.Popen(
        [*command, "--output", str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        sampler.send_signal(signal.SIGINT)
        try:
            _, errors = sampler.communicate(timeout=_PY_SPY_SECONDS)
        except subprocess.TimeoutExpired:
            sampler.kill()
            _, errors = sampler.communicate()
        if sampler.returncode or not path.exists():
            reason = errors.decode(errors="replace").strip() or f"exit code {sampler.returncode}"
            logger.warning("py-spy wrote no stacks of this process: %s", reason.splitlines()[-1])
