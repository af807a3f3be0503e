"""Collects the wheels that `make gpu` needs on a machine with a GPU and without a network.

    PYTHON benchmarks/gpu_wheels.py FOLDER [--mib 60]

PYTHON is that of an environment which has what the other machine has: the same version of Python, torch and
transformers; whatever is installed there is not collected. The wheels come in folders 1, 2, ... of at most 60 MiB,
because a file transfer may be limited, and are installed without looking at dependencies:

    python -m venv --system-site-packages GPU && GPU/bin/pip install --no-index --no-deps FOLDER/*/*.whl

Ray's wheel loses its Java archives, two fifths of it. Trackers other than `jsonl` and engines other than `hf` are left
out, with the packages that they need.
"""

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECTS = (
    ".",
    "plugins/agent_loops/agentrl-loop-single-turn",
    "plugins/algorithms/agentrl-algorithms",
    "plugins/cli/agentrl-engines",
    "plugins/cli/agentrl-plan",
    "plugins/datasets/agentrl-dataset-prompts",
    "plugins/engines/agentrl-engine-hf",
    "plugins/engines/agentrl-engine-sglang",
    "plugins/engines/agentrl-engine-vllm",
    "plugins/rewards/agentrl-rewards-basic",
    "plugins/testing/agentrl-testing",
    "plugins/tools/agentrl-tool-parsers",
    "plugins/trackers/agentrl-trackers-basic",
)
UNUSED = {"matplotlib", "tensorboard"}
"""Of the trackers `curve` and `tensorboard`."""
TESTS = ("pytest", "pytest-timeout")
JARS = "ray/jars/"
MIB = 2**20


def pip(*arguments: str | Path) -> str:
    """Standard output of this environment's pip."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def name_of(requirement: str) -> str:
    """``ray`` of ``ray[default]>=2.49``."""
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def requirements() -> list[str]:
    """What the projects need of others."""
    found: set[str] = set(TESTS)
    for project in PROJECTS:
        about = tomllib.loads((ROOT / project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = about.get("optional-dependencies", {})
        found |= {*about["dependencies"], *extras.get("train", ()), *extras.get("ray", ())}
    return sorted(each for each in found if name_of(each) not in UNUSED and not name_of(each).startswith("agentrl-"))


def missing(folder: Path) -> list[str]:
    """What this environment lacks of them, as ``name==version``: the tested versions, where there is a choice."""
    installed = {name_of(each.metadata["Name"]) for each in importlib.metadata.distributions()}
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    constraints = folder / "constraints.txt"
    free = [line for line in pins if line and not line.startswith("#") and name_of(line) not in installed]
    constraints.write_text("\n".join(free) + "\n", encoding="utf-8")
    report = folder / "report.json"
    pip("install", "--quiet", "--dry-run", "--report", report, "-c", constraints, *requirements())
    lacking = json.loads(report.read_text(encoding="utf-8"))["install"]
    return [f"{each['metadata']['name']}=={each['metadata']['version']}" for each in lacking]


def without(wheel: Path, prefix: str) -> None:
    """Rewrite a wheel without the files below ``prefix``."""
    smaller = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            if item.filename.startswith(prefix):
                continue
            data = old.read(item)
            if item.filename.endswith(".dist-info/RECORD"):
                lines = data.decode().splitlines(keepends=True)
                data = "".join(line for line in lines if not line.startswith(prefix)).encode()
            new.writestr(item, data)
    smaller.replace(wheel)


def shares(wheels: list[Path], limit: int) -> Iterator[list[Path]]:
    """Wheels that are at most ``limit`` bytes together; one that is larger is alone."""
    left = sorted(wheels, key=lambda wheel: wheel.stat().st_size, reverse=True)
    while left:
        share, size = [left[0]], left[0].stat().st_size
        for wheel in left[1:]:
            if size + wheel.stat().st_size <= limit:
                share.append(wheel)
                size += wheel.stat().st_size
        left = [wheel for wheel in left if wheel not in share]
        yield share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="is made; must not exist")
    parser.add_argument("--mib", type=int, default=60, help="most of a folder's wheels together")
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        pip("wheel", "--quiet", "--no-deps", "-w", folder, *(ROOT / project for project in PROJECTS))
        pip("wheel", "--quiet", "--no-deps", "-w", folder, *missing(place))
    for wheel in folder.glob("ray-*.whl"):
        without(wheel, JARS)
    for number, share in enumerate(list(shares(list(folder.glob("*.whl")), arguments.mib * MIB)), 1):
        (folder / str(number)).mkdir()
        size = sum(wheel.stat().st_size for wheel in share) / MIB
        print(f"{folder.name}/{number}: {len(share)} wheels, {size:.1f} MiB")  # noqa: T201 - a script's output
        for wheel in share:
            print(f"  {wheel.stat().st_size / MIB:6.1f} {wheel.name}")  # noqa: T201
            wheel.rename(folder / str(number) / wheel.name)


if __name__ == "__main__":
    main()
