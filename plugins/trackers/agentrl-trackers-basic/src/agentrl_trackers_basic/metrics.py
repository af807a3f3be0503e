"""What the names of metrics mean: flat ``area/name`` keys, one dict of floats per step."""

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard

ValidationMode = Literal["greedy", "sampled"]

_ACCURACY = re.compile(r"^validation/(?P<source>.+)/accuracy_(?P<mode>greedy|sampled)$")

PHASE_LABELS = {
    "rollout": "rollout",
    "score": "score",
    "log_probs": "log-probs",
    "values": "values",
    "advantages": "advantages",
    "update_actor": "update",
    "update_critic": "update",
    "sync_weights": "sync",
    "validation": "validation",
    "checkpoint": "checkpoint",
}
"""``timing/<phase>`` in the order of a step, and the label under which a person sees it."""


class Accuracy(NamedTuple):
    """One series of validation accuracies: of which data source, and how the answers were sampled."""

    source: str
    mode: ValidationMode


def validation_accuracies(metrics: Mapping[str, Any]) -> dict[Accuracy, float]:
    """The finite ``validation/<data source>/accuracy_{greedy,sampled}`` of one step, in 0..1."""
    found: dict[Accuracy, float] = {}
    for name, value in metrics.items():
        match = _ACCURACY.match(name)
        if match and is_number(value):
            mode: ValidationMode = "greedy" if match["mode"] == "greedy" else "sampled"
            found[Accuracy(match["source"], mode)] = float(value)
    return found


def mean_accuracies(metrics: Mapping[str, Any]) -> dict[ValidationMode, float]:
    """The accuracies of one step averaged over data sources, greedy before sampled."""
    accuracies = validation_accuracies(metrics)
    means: dict[ValidationMode, float] = {}
    modes: tuple[ValidationMode, ...] = ("greedy", "sampled")
    for mode in modes:
        values = [value for accuracy, value in accuracies.items() if accuracy.mode == mode]
        if values:
            means[mode] = sum(values) / len(values)
    return means


def idle_shares(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Share of the step, with its validation and checkpoint, that the trainer waited for its batch, and in which no
    trajectory was under way, by lane; empty where one follows the other."""
    found = [metrics.get(f"timing/{phase}") for phase in ("step", "validation", "checkpoint")]
    whole = sum(seconds for seconds in found if is_number(seconds))
    waits = {
        lane: [value for name, value in metrics.items() if name.startswith(f"idle/{who}/") and is_number(value)]
        for who, lane in (("trainer", "training"), ("rollout", "rollout"))
    }
    # Between two steps passes time that belongs to no phase.
    return {lane: min(sum(values) / whole, 1.0) for lane, values in waits.items() if values} if whole > 0 else {}


def time_shares(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Share of the step's time by phase label, in the order of a step; they sum to 1. Empty without timings.

    What ``timing/step`` holds beyond the known phases is ``other``.
    """
    seconds: dict[str, float] = {}
    for phase, label in PHASE_LABELS.items():
        value = metrics.get(f"timing/{phase}")
        if is_number(value) and value > 0:
            seconds[label] = seconds.get(label, 0.0) + value
    known = sum(seconds.values())
    step = metrics.get("timing/step")
    total = max(known, step) if is_number(step) else known
    if total <= 0:
        return {}
    shares = {label: value / total for label, value in seconds.items()}
    if total > known:
        shares["other"] = 1 - known / total
    return shares


def is_number(value: Any) -> TypeGuard[float]:
    """A finite int or float."""
    return isinstance(value, int | float) and math.isfinite(value)


def metrics_file(run_dir: Path) -> Path:
    """Where the tracker ``jsonl`` writes, and the others read."""
    return run_dir / "metrics.jsonl"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps of a ``metrics.jsonl``, in the order of the file; empty without the file.

    A line that a killed process left unfinished is skipped.
    """
    rows = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with suppress(ValueError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("step"), int)]
