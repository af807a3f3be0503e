"""Everything that only a GPU can show, in parts of which each is its own process: `make gpu`.

    python benchmarks/gpu.py [--parts tests local ...] [--output docs/results/gpu.md]

The page is written again after every part, so that a run that is cut keeps what it got; on CUDA it is
docs/results/gpu.md unless --output names another. Elsewhere the parts run on the CPU, with a model of kilobytes whose
figures mean nothing, and a page is written only where --output says so.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu_step import device_name
from rich.console import Console

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results" / "gpu.md"
TAIL_LINES = 12


@dataclass(frozen=True)
class Part:
    """One process.

    Args:
        title: its heading.
        command: after the interpreter's name; one that makes figures writes them to its own page.
        missing: why it cannot run here; empty where it can.
        has_page: ``--output FILE`` is added to the command.
    """

    title: str
    command: list[str]
    missing: str = ""
    has_page: bool = True


def parts(device: str, interpreters: dict[str, Path]) -> dict[str, Part]:
    """All parts by name, in the order in which they run."""
    step = ["benchmarks/gpu_step.py", "--device", device, *([] if device == "cuda" else ["--tiny"])]
    found = {
        "tests": Part("Tests", ["-m", "pytest", "-q", "-rs", "tests/gpu"], has_page=False),
        "local": Part("A step, local runtime", [*step, "--runtimes", "local"]),
        "ray": Part("A step, Ray", [*step, "--runtimes", "ray"]),
        "hf-sleep": Part(
            "A step, Ray, hf that sleeps", [*step, "--runtimes", "ray", "--set", "rollout.engine.sleep=1"]
        ),
    }
    for engine, python in interpreters.items():
        absent = "" if python.is_file() else f"no interpreter {python} (make engines-cpu, or --{engine}-python)"
        own = [*step, "--runtimes", "ray", "--set", f"rollout.engine.name={engine}", f"rollout.engine.python={python}"]
        if device == "cuda":
            # The training process and the engine share the GPU.
            own.append("rollout.engine.config.mem_fraction=0.3")
        broadcast = [*own, "rollout.engine.weight_transfer=broadcast"]
        gpus = torch.cuda.device_count()
        few = f"needs 2 CUDA devices, found {gpus}" if gpus < 2 else ""
        found |= {
            f"{engine}-sleep": Part(f"{engine}, colocated, that sleeps", [*own, "rollout.engine.sleep=2"], absent),
            f"{engine}-nccl": Part(
                f"{engine}, weights by NCCL", [*broadcast, "rollout.engine.placement=standalone"], absent or few
            ),
        }
        if engine == "vllm":
            # SGLang lacks the capability `ipc`.
            needs = "" if gpus else "needs a CUDA device"
            found[f"{engine}-ipc"] = Part(f"{engine}, weights by CUDA IPC", broadcast, absent or needs)
    return found


def run(part: Part, folder: Path, limit: float) -> list[str]:
    """Its lines of the page."""
    if part.missing:
        return [f"Not run: {part.missing}."]
    page = folder / "part.md"
    page.unlink(missing_ok=True)
    command = [sys.executable, *part.command, *(["--output", str(page)] if part.has_page else [])]
    start = time.monotonic()
    with (folder / "log").open("w+", encoding="utf-8") as log:
        try:
            code: int | str = subprocess.run(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=limit
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"none within {limit:g} s"
        log.seek(0)
        output = log.read().splitlines()
    seconds = time.monotonic() - start
    if code == 0 and page.is_file():
        # All but the title.
        return [*page.read_text(encoding="utf-8").splitlines()[2:], "", f"{seconds:.0f} s."]
    verdict = "Passed" if code == 0 else f"**Failed** (exit status {code})"
    return [f"{verdict}, {seconds:.0f} s. Its last lines:", "", "```", *output[-TAIL_LINES:], "```"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", metavar="PART", help="all by default")
    parser.add_argument("--output", type=Path, help="the page; docs/results/gpu.md on CUDA, none elsewhere")
    parser.add_argument("--limit", type=float, default=1200, help="seconds for a part")
    for engine in ("vllm", "sglang"):
        default = ROOT / ".engines" / engine / "bin" / "python"
        parser.add_argument(f"--{engine}-python", type=Path, default=default, help=f"interpreter with {engine}")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    interpreters = {"vllm": arguments.vllm_python.absolute(), "sglang": arguments.sglang_python.absolute()}
    known = parts(device, interpreters)
    unknown = set(arguments.parts or ()) - known.keys()
    if unknown:
        parser.error(f"--parts: {', '.join(sorted(unknown))}; allowed: {', '.join(known)}")
    output = arguments.output or (PAGE if device == "cuda" else None)
    console = Console(width=110, highlight=False, markup=False)
    console.print(f"on {device_name(device)}; page: {output or 'none, see --output'}")
    lines = ["# What a GPU shows", "", f"Made by `make gpu` on {device_name(device)}, torch {torch.__version__}."]
    if device == "cpu":
        lines.append("There is no GPU here: the model is tiny, and its figures mean nothing.")
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.parts or known:
            console.print(f"{name} ...")
            section = run(known[name], Path(temporary), arguments.limit)
            console.print("\n".join(section))
            lines += ["", f"## {known[name].title}", "", *section]
            if output is not None:
                output.parent.mkdir(parents=True, exist_ok=True)
                output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
