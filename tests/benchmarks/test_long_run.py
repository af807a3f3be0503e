"""A short version of ``benchmarks/long_run.py``: nothing but memory may grow, in any process."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "long_run.py"


def test_descriptors_threads_and_shared_memory_stay_flat() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--steps", "60"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for process in ("driver", "tool", "reward"):
        assert f"| {process} |" in done.stdout
