"""A short version of ``benchmarks/long_run.py``: nothing but memory may grow, in any process."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.slow
def test_descriptors_threads_and_shared_memory_stay_flat(run_script: Callable[..., Any]) -> None:
    done = run_script("long_run.py", "--steps", "60")
    assert done.returncode == 0, done.stdout + done.stderr
    for process in ("driver", "tool", "reward"):
        assert f"| {process} |" in done.stdout
