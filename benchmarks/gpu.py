"""Everything that only a GPU can show, in parts of which each is its own process: `make gpu`.

    python benchmarks/gpu.py [--parts tests local ...] [--output FOLDER] [--within SECONDS]

A part has its own time limit, and its outcome, figures and log are in the folder as soon as there are any: a part that
fails, or is killed, takes nothing of the others along. The page gpu.md is written again after every part, of all parts
whose outcome is in the folder, also of earlier calls; `--parts` without a name only writes the page.

Without a GPU the parts run on the CPU, with a model of kilobytes whose figures mean nothing: a rehearsal.
"""

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from _report import Figure, goal_of, value_of
from gpu_step import device_name
from rich.console import Console

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "runs" / "gpu"
LIMIT = 480.0
"""[s] of a part. A call on a borrowed GPU is often cut after ten minutes."""
GRACE = 10.0
"""[s] between the two signals that end a part."""
TAIL_LINES = 12
ENVIRONMENTS = ("megatron", "vllm", "sglang")
"""Below .engines."""


@dataclass(frozen=True)
class Part:
    """One process.

    Args:
        title: its heading.
        command: after the interpreter's name; ``{json}``, ``{page}`` and ``{runs}`` stand for paths in the folder.
        unseen: what only a GPU shows of it.
        missing: why it cannot run here; empty where it can.
        limit: [s] after which it is killed.
        python: the interpreter.
    """

    title: str
    command: tuple[str, ...]
    unseen: str = ""
    missing: str = ""
    limit: float = LIMIT
    python: str = sys.executable


@dataclass(frozen=True)
class Outcome:
    """How a part has ended, and where.

    Args:
        code: exit status; None where it was killed, or has not ended.
        tail: last lines of its output.
    """

    verdict: str
    seconds: float = 0.0
    code: int | None = None
    where: str = ""
    is_rehearsal: bool = False
    tail: tuple[str, ...] = ()


CHECKS = {
    "log-probs": ("Log-probs of tokens against float64", "the kernels of CUDA, memory"),
    "packing": ("Packed and padded rows in bfloat16", "attention's kernels of CUDA, memory"),
    "fsdp": ("FSDP2 on a mesh of one rank", "NCCL, streams, moves between device and host; gloo takes NCCL's place"),
    "ipc": ("Weights by IPC between two processes", "CUDA IPC: a file in memory takes the buffer's place"),
    "sleep": ("Memory of an engine that sleeps", "that memory is free again: there is no device to move from"),
    "offload": ("Offloading, with a checkpoint", "moves between device and host: on the CPU nothing moves"),
}
"""Of gpu_checks.py: titles, and what a rehearsal does not show."""


def parts(device: str, interpreters: Mapping[str, Path], limit: float = LIMIT) -> dict[str, Part]:
    """All parts by name, in the order in which they run: what is quick, and says most of a failure, comes first.

    Args:
        interpreters: of engines, by their names, and of the training backend ``megatron``.
    """
    tiny = () if device == "cuda" else ("--tiny",)
    check = ("benchmarks/gpu_checks.py", "--device", device, *tiny, "--json", "{json}")
    step = ("benchmarks/gpu_step.py", "--device", device, *tiny, "--output", "{page}", "--runs", "{runs}", "--plan")
    step += ("--steps",)
    ray = "" if importlib.util.find_spec("ray") else "Ray is not installed here"
    tests = ("-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider", "tests/gpu", *(["-m", "not ray"] if ray else []))
    speed = "time and memory"
    found = {name: Part(title, (*check, name), unseen) for name, (title, unseen) in CHECKS.items()}
    found |= {
        "local": Part("A step, local runtime, float32 weights", (*step, "2", "--runtimes", "local"), speed),
        "local-bf16": Part(
            "A step, local runtime, bfloat16 weights",
            (*step, "1", "--runtimes", "local", "--set", "model.dtype=bfloat16"),
            speed,
        ),
        "tests": Part("Tests", tests, "bfloat16 on CUDA, moves between device and host"),
        "ray": Part("A step, Ray", (*step, "1", "--runtimes", "ray"), speed, ray),
        "hf-sleep": Part(
            "A step, Ray, hf that sleeps and keeps its weights",
            (*step, "1", "--runtimes", "ray", "--set", "rollout.engine.sleep=1"),
            f"{speed}, of a device that two processes share",
            ray,
        ),
    }
    if "megatron" in interpreters:
        found |= _megatron(device, interpreters["megatron"], (*step, "1", "--runtimes", "ray", "--set"), ray)
    for engine, python in interpreters.items():
        if engine == "megatron":
            continue
        how = f"make engines-cpu-{engine}" if device == "cpu" else f"agentrl engines setup {engine}"
        absent = ray or ("" if python.is_file() else f"no interpreter {python} ({how}, or --{engine}-python)")
        own = [*step, "1", "--runtimes", "ray", "--set", f"rollout.engine.name={engine}"]
        own.append(f"rollout.engine.python={python}")
        broadcast = [*own, "rollout.engine.weight_transfer=broadcast"]
        few, gpus = _too_few(), torch.cuda.device_count()
        found |= {
            f"{engine}-sleep": Part(
                f"{engine}, colocated, that sleeps", (*own, "rollout.engine.sleep=2"), speed, absent
            ),
            f"{engine}-nccl": Part(
                f"{engine}, weights by NCCL",
                (*broadcast, "rollout.engine.placement=standalone"),
                missing=absent or few,
            ),
        }
        if engine == "vllm":
            # SGLang lacks the capability `ipc`.
            needs = "" if gpus else "needs a CUDA device"
            found[f"{engine}-ipc"] = Part(f"{engine}, weights by CUDA IPC", tuple(broadcast), missing=absent or needs)
    return {name: replace(part, limit=min(part.limit, limit)) for name, part in found.items()}


def _megatron(device: str, python: Path, step: tuple[str, ...], ray: str) -> dict[str, Part]:
    """Parts of the training backend.

    Args:
        step: command of a step on Ray, to which configuration is added.
        ray: why Ray is missing.
    """
    how = "make megatron-env" if device == "cpu" else "agentrl backends setup megatron"
    absent = "" if python.is_file() else f"no interpreter {python} ({how}, or --megatron-python)"
    fast = any(python.parents[1].glob("lib/python*/site-packages/transformer_engine"))
    few = _too_few() if device == "cuda" else ""
    slow = "" if fast or device == "cpu" else f"Transformer Engine is not installed in {python.parents[1]}"
    check = ("benchmarks/gpu_megatron.py", "--device", device, *(("--tiny",) if device == "cpu" else ()))
    own = (*step, "trainer.backend.name=megatron", f"trainer.backend.python={python}")
    two, mesh = (*own, "cluster.processes_per_node=2"), "trainer.backend.config"
    unseen = "CUDA's kernels, NCCL, time and memory"
    return {
        "megatron": Part("Megatron-Core and FSDP2 in bfloat16", (*check, "--json", "{json}"), unseen, absent,
                         python=str(python)),
        "megatron-step": Part("A step, Megatron-Core", own, unseen, ray or absent),
        "megatron-tensor": Part("A step, Megatron-Core, each layer split over two ranks",
                                (*two, f"{mesh}.tensor_parallel=2"), unseen, ray or absent or few),
        "megatron-context": Part("A step, Megatron-Core, each row split over two ranks",
                                 (*two, f"{mesh}.context_parallel=2"), unseen, ray or absent or few or slow),
    }  # fmt: skip


def _too_few() -> str:
    """Why two ranks of NCCL cannot run here; empty where they can."""
    gpus = torch.cuda.device_count()
    return f"needs 2 CUDA devices, found {gpus}" if gpus < 2 else ""


@dataclass(frozen=True)
class Results:
    """The folder: of each part outcome, figures, table and log, and the page of all of them."""

    folder: Path

    def file(self, name: str, kind: str) -> Path:
        return self.folder / f"{name}.{kind}"

    def save(self, name: str, outcome: Outcome) -> None:
        self.file(name, "outcome.json").write_text(json.dumps(asdict(outcome), indent=2) + "\n", encoding="utf-8")

    def outcome(self, name: str) -> Outcome | None:
        """None where the part has not run."""
        file = self.file(name, "outcome.json")
        if not file.is_file():
            return None
        return Outcome(**json.loads(file.read_text(encoding="utf-8")))

    def figures(self, name: str) -> list[Figure]:
        """Those that the part has measured so far."""
        file = self.file(name, "json")
        if not file.is_file():
            return []
        found = json.loads(file.read_text(encoding="utf-8"))["figures"]
        return [Figure(**{key: value for key, value in each.items() if key != "verdict"}) for each in found]

    def write_page(self, known: Mapping[str, Part]) -> Path:
        lines = ["# What a GPU shows", "", "Made by `make gpu`.", "", "| part | outcome | seconds |", "|---|---|---:|"]
        for name in known:
            outcome = self.outcome(name)
            if outcome is not None:
                lines.append(f"| {name} | {outcome.verdict} | {outcome.seconds:.0f} |")
        for name, part in known.items():
            lines += self._section(name, part)
        page = self.folder / "gpu.md"
        page.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return page

    def _section(self, name: str, part: Part) -> Iterator[str]:
        outcome = self.outcome(name)
        if outcome is None:
            return
        yield from ("", f"## {part.title}", "", f"{outcome.verdict}, {outcome.seconds:.0f} s. {outcome.where}")
        if outcome.is_rehearsal and outcome.code is not None:
            yield from ("", "A rehearsal: the model is tiny, and its figures mean nothing.")
            yield f"It does not show: {part.unseen}." if part.unseen else ""
        table = self.file(name, "page.md")
        if table.is_file():
            # All but the title.
            yield from ("", *table.read_text(encoding="utf-8").splitlines()[2:])
        figures = self.figures(name)
        if figures:
            yield from ("", "| case | figure | value | goal | |", "|---|---|---:|---:|---|")
        for each in figures:
            yield f"| {each.case} | {each.name} | {value_of(each)} | {goal_of(each)} | {each.verdict} |"
        if outcome.tail:
            yield from ("", "Last lines of its output:", "", "```", *outcome.tail, "```")


def run(name: str, part: Part, results: Results, seconds: float, is_rehearsal: bool) -> Outcome:
    """Run a part for at most so many seconds; its outcome is on disk when this returns, and before it begins."""
    where = (
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, {device_name('cpu' if is_rehearsal else 'cuda')}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}."
    )

    def ended(verdict: str, **values: Any) -> Outcome:
        outcome = Outcome(verdict, where=where, is_rehearsal=is_rehearsal, **values)
        results.save(name, outcome)
        return outcome

    for kind in ("json", "page.md", "log"):
        results.file(name, kind).unlink(missing_ok=True)
    if part.missing:
        return ended(f"Not run: {part.missing}")
    ended("**Has not ended**")
    page = results.file(name, "page.md")
    places = {"{json}": results.file(name, "json"), "{page}": page, "{runs}": results.folder / name}
    command = [part.python, *(str(places.get(word, word)) for word in part.command)]
    environment = {**os.environ, **({"AGENTRL_GPU_REHEARSAL": "1"} if is_rehearsal else {})}
    start = time.monotonic()
    log = results.file(name, "log")
    with log.open("w", encoding="utf-8") as output:
        code = _status(command, output, environment, seconds)
    tail = tuple(log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:])
    misses = sum(figure.verdict == "miss" for figure in results.figures(name))
    verdict = (
        f"**Cut** after {seconds:.3g} s" if code is None
        else f"**Failed** (exit status {code})" if code
        else f"**Goals missed: {misses}**" if misses
        else "Passed"
    )  # fmt: skip
    is_told = not code and (results.figures(name) or page.is_file())
    values = {"seconds": round(time.monotonic() - start, 1), "code": code}
    return ended(verdict, **values, tail=() if is_told and code is not None else tail)


def _status(command: list[str], output: Any, environment: dict[str, str], seconds: float) -> int | None:
    """The exit status; None where the time was up. Nothing of the process is left: the next part needs its memory."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            # Its group outlives it where it has left processes behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", metavar="PART", help="all by default; none: only write the page")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder for page, figures and logs")
    parser.add_argument("--limit", type=float, default=LIMIT, help="most seconds for a part")
    parser.add_argument(
        "--within", type=float, default=float("inf"), help="seconds for this call; what is left is named"
    )
    for engine in ENVIRONMENTS:
        default = ROOT / ".engines" / engine / "bin" / "python"
        parser.add_argument(f"--{engine}-python", type=Path, default=default, help=f"interpreter with {engine}")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    interpreters = {name: getattr(arguments, f"{name}_python").absolute() for name in ENVIRONMENTS}
    known = parts(device, interpreters, arguments.limit)
    chosen = list(known) if arguments.parts is None else arguments.parts
    unknown = set(chosen) - known.keys()
    if unknown:
        parser.error(f"--parts: {', '.join(sorted(unknown))}; allowed: {', '.join(known)}")
    # So that the part that runs is ended with this.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    end = time.monotonic() + arguments.within
    results = Results(arguments.output.absolute())
    results.folder.mkdir(parents=True, exist_ok=True)
    console = Console(width=110, highlight=False, markup=False)
    console.print(f"on {device_name(device)}; folder: {results.folder}")
    left: list[str] = []
    for name in chosen:
        seconds = min(known[name].limit, end - time.monotonic() - GRACE)
        if seconds <= 0 and not known[name].missing:
            left.append(name)
            continue
        console.print(f"{name} ... ", end="")
        outcome = run(name, known[name], results, seconds, device == "cpu")
        console.print(f"{outcome.verdict}, {outcome.seconds:.0f} s")
        if outcome.code is None and seconds < known[name].limit and not known[name].missing:
            left.append(name)
        results.write_page(known)
    console.print(f"page: {results.write_page(known)}")
    if left:
        console.print(f"no time was left for: --parts {' '.join(left)}")


if __name__ == "__main__":
    main()
