"""Reading metrics."""

from pathlib import Path

from agentrl_core.runs.run_dir import read_metrics


def test_reading_passes_over_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\n7\n{"step": 2, "a": "\xe2\x80')
    assert read_metrics(path) == [{"step": 1}]
