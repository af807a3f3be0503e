"""Draws how often a run found the number, against binary search.

    python examples/guess_number/plot.py runs/guess_number guess_number.png

The two paths are the run's folder and the picture.
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

OPTIMUM, WARM_START = 63 / 64, 0.48

run, picture = map(Path, sys.argv[1:])
lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
found = [(line["step"], line["reward/environment/found"]) for line in lines if "reward/environment/found" in line]

figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
axes.plot(*zip(*found, strict=True), label="the model, sampled")
axes.axhline(OPTIMUM, color="black", linewidth=1, label="binary search, 0.98")
axes.axhline(0.8 * OPTIMUM, color="black", linewidth=1, linestyle=":", label="80% of it")
axes.axhline(WARM_START, color="gray", linewidth=1, linestyle="--", label="the player of the warm start, 0.48")
axes.set(xlabel="step", ylabel="found within six guesses", ylim=(0.4, 1.0))
axes.legend(loc="lower right")
figure.savefig(picture, dpi=110)
