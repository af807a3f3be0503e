"""Trains a random Qwen3-0.6B, vocabulary of 152k, on one GPU and says where time and memory go.

    python benchmarks/gpu_step.py [--runtimes local ray] [--output FILE] [--set KEY=VALUE ...]

Rows have about 2,048 tokens. Everything else is as it is by default, unless --set says otherwise: float32 weights that
compute in bfloat16, and the embedded engine. Without a CUDA device the script says so and exits with 0;
``--device cpu --tiny`` shows that it runs, on a model whose figures mean nothing.
"""

import argparse
import datetime
import json
import platform
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from _gpu_bench import FULL, TINY, Shape, write_run
from _gpu_plan import gpu_name, predicted
from rich.console import Console
from rich.table import Table

from agentrl_core.config import load_config
from agentrl_core.trainer import Trainer

PHASES = ("rollout", "log_probs", "update_actor", "sync_weights", "step")
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "L4": 121, "4090": 165, "3090": 71}
"""Dense bfloat16 with float32 sums, from the vendor's data sheets, by a part of the device's name."""


def update_flops(model: dict[str, Any], rows: float, prompt: float, response: float) -> float:
    """Floating-point operations of forward and backward over ``rows`` rows; recomputed activations do not count.

    Two per multiply-add and weight in the forward pass, twice that in the backward one; attention over the causal half
    of the square; the head only at positions that predict a response token.
    """
    hidden, layers, length = model["hidden_size"], model["num_hidden_layers"], prompt + response
    width = model["num_attention_heads"] * model["head_dim"]
    kv_width = model["num_key_value_heads"] * model["head_dim"]
    weights = hidden * (2 * width + 2 * kv_width) + 3 * hidden * model["intermediate_size"]
    attention = 2 * width * length**2 / 2
    per_row = layers * (weights * length + attention) + hidden * model["vocab_size"] * response
    return 6 * rows * per_row


def train(
    runtime: str, shape: Shape, device: str, steps: int, folder: Path, runs: Path, overrides: list[str]
) -> list[dict[str, float]]:
    """Metrics of all steps but the first, which warms up; ``runs/<runtime>/metrics.jsonl`` has those of each step."""
    changes = {
        "trainer": {"name": runtime, "output_dir": str(runs), "steps": steps + 1},
        "cluster": {"runtime": runtime},
    }
    run = Trainer(load_config(write_run(folder, shape, device, changes), overrides)).fit()
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if json.loads(line)["step"] > 1]


def figures(metrics: list[dict[str, float]], model: dict[str, Any], device: str) -> list[tuple[str, str]]:
    """Names and values of the table; medians over the steps."""

    def middle(name: str) -> float | None:
        values = [step[name] for step in metrics if name in step]
        return median(values) if values else None

    rows: list[tuple[str, str]] = []
    for phase in PHASES:
        seconds = middle(f"timing/{phase}")
        rows.append((f"time: {phase}", "not run" if seconds is None else f"{seconds:.2f} s"))
    prompt, response = middle("prompt_length/mean") or 0.0, middle("response_length/mean") or 0.0
    count = (middle("rollout/sampled_tokens") or 0.0) / max(response, 1.0)
    rows.append(("rows per step, tokens per row", f"{count:.0f}, {prompt + response:.0f}"))
    rows.append(("tokens per second, whole step", f"{middle('perf/tokens_per_second') or 0.0:.0f}"))
    memory = middle("actor/peak_memory_gib")
    rows.append(("peak memory of the update", "not on CUDA" if memory is None else f"{memory:.2f} GiB"))
    for name in ("mean", "max"):
        gap = middle(f"rollout/logprob_gap_{name}")
        rows.append((f"log-prob gap, {name}", "none" if gap is None else f"{gap:.2e}"))
    seconds = middle("timing/update_actor")
    if seconds:
        tflops = update_flops(model, count, prompt, response) / seconds / 1e12
        peak = peak_tflops(device)
        share = "device's peak unknown" if peak is None else f"{tflops / peak:.1%} of {peak} TFLOP/s"
        rows.append(("update: model FLOP/s", f"{tflops:.3g} TFLOP/s"))
        rows.append(("update: model-FLOPs utilisation", share))
    return rows


def peak_tflops(device: str) -> int | None:
    """The peak of the device here, if its name is known."""
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def device_name(device: str) -> str:
    """The GPU's name, or the CPU's kind."""
    return (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"
    )


def markdown(
    results: dict[str, list[tuple[str, str]]], parameters: int, device: str, overrides: list[str], note: str = ""
) -> str:
    """The page: what it was measured on, and one column for each runtime."""
    lines = [
        "# One training step on one GPU",
        "",
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, {device_name(device)}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}. A random Qwen3 of "
        f"{parameters:,} parameters, medians over the steps after the first."
        + "".join(f" `{override}`" for override in overrides),
        "",
        "Made by `python benchmarks/gpu_step.py`." + (f" No prediction: {note}." if note else ""),
        "",
        "| | " + " | ".join(results) + " |",
        "|---|" + "---:|" * len(results),
    ]
    for number, (name, _) in enumerate(next(iter(results.values()))):
        lines.append(f"| {name} | " + " | ".join(rows[number][1] for rows in results.values()) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtimes", nargs="+", choices=("local", "ray"), default=["local", "ray"])
    parser.add_argument("--steps", type=int, default=2, help="measured steps; one more warms up")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of kilobytes")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of the configuration")
    parser.add_argument("--plan", action="store_true", help="with what `agentrl plan` predicts beside it")
    parser.add_argument("--output", type=Path, help="a page of Markdown")
    parser.add_argument("--runs", type=Path, help="folder for the runs' own files, which are deleted without it")
    arguments = parser.parse_args()
    console = Console(width=110)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        console.print("skipped: torch sees no CUDA device here (--device cpu --tiny shows that the script runs)")
        sys.exit(0)
    shape = TINY if arguments.tiny else FULL
    results: dict[str, list[tuple[str, str]]] = {}
    note = ""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_run(folder, shape, arguments.device)
        model = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))
        parameters = sum(file.stat().st_size for file in (folder / "model").glob("*.safetensors")) // 4
        runs = (arguments.runs or folder / "runs").absolute()
        for runtime in arguments.runtimes:
            metrics = train(runtime, shape, arguments.device, arguments.steps, folder, runs, arguments.set)
            results[runtime] = figures(metrics, model, arguments.device)
        if arguments.plan:
            # The last runtime's configuration is in the folder.
            predictions, note = predicted(folder / "config.yaml", arguments.set)
            names = [name for name, _ in next(iter(results.values()))]
            if predictions:
                results[f"predicted for {gpu_name()}"] = [(name, predictions.get(name, "")) for name in names]
            if note:
                console.print(f"no prediction: {note}")
    table = Table(title=f"One step on {device_name(arguments.device)}", title_justify="left")
    table.add_column("figure")
    for runtime in results:
        table.add_column(runtime, justify="right")
    for number, (name, _) in enumerate(next(iter(results.values()))):
        table.add_row(name, *(rows[number][1] for rows in results.values()))
    console.print(table)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        page = markdown(results, parameters, arguments.device, arguments.set, note)
        arguments.output.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
