"""Those parts of ``benchmarks/engines.py`` that need the engines' environments run to their end.

Run in the trainer's environment by ``make test-engines``, which builds the others.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_engines_beside_their_own_servers(tmp_path: Path) -> None:
    report = tmp_path / "figures.json"
    command = [
        sys.executable, ROOT / "benchmarks" / "engines.py", "--parts", "embedded", "router", "--requests", "4",
        "--tokens", "8", "--repetitions", "1", "--json", report,
    ]  # fmt: skip
    for engine in ("vllm", "sglang"):
        command += [f"--{engine}-python", ROOT / ".engines" / engine / "bin" / "python"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = {figure["case"] for figure in json.loads(report.read_text(encoding="utf-8"))["figures"]}
    assert {"4 ragged requests, vLLM", "2 at once, vllm, tiny", "2 at once, sglang, tiny"} <= cases
