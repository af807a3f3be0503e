"""What `agentrl plan` says of a run before it is measured."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

GPUS = {
    "H100 PCIe": "h100-pcie-80g", "H100": "h100-80g", "H200": "h200-141g", "B200": "b200-180g", "L40S": "l40s-48g",
    "A100": "a100-80g", "A6000": "rtx-a6000-48g", "4090": "rtx-4090-24g", "3090": "rtx-3090-24g",
}  # fmt: skip
"""Names of `agentrl plan --gpu`, by a part of the device's own; the first match."""
ELSEWHERE = "h100-80g"
"""Where there is no GPU: that a prediction can be made, and nothing to compare it with."""
GIB = 2**30
SECONDS = 240.0
"""[s] that a prediction may take."""

Phases = Mapping[str, Mapping[str, Any]]


def _seconds(phase: str) -> Callable[[Phases], str]:
    return lambda phases: f"≥ {phases[phase]['seconds']:.2f} s" if phase in phases else ""


def _tensors(phases: Phases) -> str:
    """What the process that trains has in tensors, without the engine and without CUDA's own."""
    others = ("CUDA contexts", "engine weights", "KV cache")
    memory = phases["update"]["memory"] if "update" in phases else {}
    return f"{sum(size for part, size in memory.items() if part not in others) / GIB:.2f} GiB" if memory else ""


ROWS: dict[str, Callable[[Phases], str]] = {
    "time: rollout": _seconds("rollout"),
    "time: log_probs": _seconds("log-probs"),
    "time: update_actor": _seconds("update"),
    "time: sync_weights": _seconds("send weights"),
    "peak memory of the update": _tensors,
}
"""By the name of the figure that is measured. Times are lower bounds, for rows that all have their full length."""


def gpu_name() -> str:
    """Of `agentrl plan`, "" for a GPU that it does not know."""
    if not torch.cuda.is_available():
        return ELSEWHERE
    name = torch.cuda.get_device_name()
    if "A100" in name and torch.cuda.get_device_properties(0).total_memory < 60 * GIB:
        return "a100-40g"
    return next((known for part, known in GPUS.items() if part in name), "")


def predicted(config: Path, overrides: Sequence[str]) -> tuple[dict[str, str], str]:
    """Predictions by the name of the measured figure; where there are none, why."""
    gpu = gpu_name()
    if not gpu:
        return {}, f"agentrl plan does not know {torch.cuda.get_device_name()}"
    start = "from agentrl_core.cli.main import main; main()"
    command = [sys.executable, "-c", start, "plan", str(config), "--gpu", gpu, "--json", "--no-advise"]
    try:
        done = subprocess.run(
            [*command, *overrides, "cluster.device=auto"],
            capture_output=True, text=True, timeout=SECONDS, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {}, f"agentrl plan has not ended within {SECONDS:g} s"
    try:
        # Its status is 1 where the run does not fit; it says what takes the memory then, too.
        answer = json.loads(done.stdout)
        phases, seconds = answer["phases"], answer["step_seconds"]
    except (ValueError, KeyError):
        return {}, f"agentrl plan: {_words(done.stderr or done.stdout) or f'exit status {done.returncode}'}"
    return {name: row(phases) for name, row in ROWS.items()} | {"time: step": f"≥ {seconds:.2f} s"}, ""


def _words(output: str) -> str:
    """An error without its frame."""
    lines = (line.strip("│╭╮╰╯─ ") for line in output.splitlines())
    return " ".join(line for line in lines if line and not line.startswith(("Usage", "Try", "Error")))[-300:]
