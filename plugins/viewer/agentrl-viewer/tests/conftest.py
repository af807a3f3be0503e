import json
from pathlib import Path

import pytest

from agentrl_viewer.run import Run
from benchmarks._sample_run import SampleRun

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\u2028"


@pytest.fixture
def evil(tmp_path: Path) -> Run:
    """A run in which everything that a model, a tool or a user names is an attack."""
    sample = SampleRun(tmp_path / "evil", prompts=1, samples=1).write(1, 1)
    (record,) = sample.record(1, 0, 0)
    record |= {"error": EVIL, "uid": EVIL, "data_source": EVIL, "ground_truth": EVIL, "prompt_text": EVIL}
    record["messages"] = [
        {"role": "user", "content": EVIL}, {"role": EVIL, "content": EVIL},
        {"role": "assistant", "content": EVIL, "reasoning_content": EVIL,
         "tool_calls": [{"function": {"name": EVIL, "arguments": {EVIL: EVIL}}}]},
        {"role": "tool", "content": EVIL},
    ]  # fmt: skip
    record["tool_calls"] = [{"name": EVIL, "arguments": {}, "response": EVIL, "failed": True}]
    record["tool_schemas"] = [{"function": {"name": EVIL}}]
    record["reward_components"] = record["reward_metrics"] = {EVIL: 1.0}
    record["timings"] = {EVIL: 1.0}
    record["spans"] = [(EVIL, 1.0, 1.0)]
    sample.write_records(1, [record])
    metrics = {"step": 1, "time": EVIL, f"reward/{EVIL}": 1.0, "timing/rollout": 1.0}
    (sample.path / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    (sample.path / "config.yaml").write_text(json.dumps({EVIL: EVIL}))
    (sample.path / "state.json").write_text(
        json.dumps({"status": EVIL, "step": EVIL, "warnings": [{"message": EVIL}, EVIL]})
    )
    run = Run(sample.path, "evil")
    run.index.refresh()
    return run
