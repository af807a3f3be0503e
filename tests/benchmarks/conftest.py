"""Runs the scripts of ``benchmarks/``."""

import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = """
import os, runpy, sys
os.environ.update({environment!r})
for number, path in enumerate({outputs!r}, 1):
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, number)
    os.close(file)
sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
sys.argv = {command!r}
sys.path[:0] = {paths!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Done:
    """A script that has ended, as ``subprocess.CompletedProcess``."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run_script(warm_processes: multiprocessing.context.BaseContext, tmp_path: Path) -> Callable[..., Done]:
    """``run_script("gpu.py", "--parts", "local", VARIABLE="value")`` in a process of its own that has imported torch.

    What ``PYTHONPATH`` names can be imported by the script, and by the processes that it starts.
    """

    def run(name: str, *arguments: object, **environment: str) -> Done:
        outputs = [str(tmp_path / "stdout"), str(tmp_path / "stderr")]
        code = SCRIPT.format(
            environment=environment,
            outputs=outputs,
            command=[str(BENCHMARKS / name), *map(str, arguments)],
            paths=[str(BENCHMARKS), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))],
        )
        process = warm_processes.Process(target=exec, args=(code, {"__name__": "script"}))
        process.start()
        try:
            process.join()
        finally:
            process.kill()
        assert process.exitcode is not None
        return Done(process.exitcode, *(Path(output).read_text(encoding="utf-8") for output in outputs))

    return run


@pytest.fixture(scope="module")
def import_script() -> Iterator[Callable[[str], ModuleType]]:
    """``import_script("gpu_step")``; scripts find each other, also in processes that they start."""
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))
