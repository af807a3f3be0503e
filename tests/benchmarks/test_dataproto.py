"""The benchmark of the batch protocol runs to its end with a peer; how large its figures are is not judged here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.slow
@pytest.mark.ray
def test_a_tiny_run_reports_every_figure_also_of_a_peer(
    run_script: Callable[..., Any], tmp_path: Path, warm_ray: dict[str, str]
) -> None:
    (tmp_path / "some_peer.py").write_text("from _own_dataproto import *")
    sizes = ["--rows", "64", "--mib", "2", "--repetitions", "1", "--calls", "2"]
    environment = {"PYTHONPATH": str(tmp_path), **warm_ray}
    done = run_script("dataproto.py", *sizes, "--peer", "some_peer", "--output", tmp_path / "out", **environment)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "out" / "dataproto.json").read_text())["figures"]
    judged = {figure["case"] for figure in figures if figure["goal"] is not None}
    assert judged == {
        "echo, memory, agentrl",
        "put + get",
        "DP_COMPUTE_PROTO echo",
        "echo of 16×16",
        "ping",
        "concat(8)",
        "repeat ×2",
        "select half",
    }
    assert all(figure["value"] > 0 for figure in figures)
    assert sum(figure["name"].startswith("some_peer /") for figure in figures) == 7
    assert (tmp_path / "out" / "dataproto.md").read_text().count("| put + get |") == 5
