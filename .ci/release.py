# ruff: noqa: T201 - a command that prints what it does
"""Makes a release ready: every distribution built, checked, installed from a local index, and used.

`make release VERSION=0.2.0` runs this in five parts, each of which stops at the first problem:

1. The version is written into every project, and the fragments of `changelog.d` into `CHANGELOG.md`.
2. Each project becomes a wheel and an sdist in `dist/`.
3. Each is checked: metadata, README, one version, and a wheel built from the sdist has the same files.
4. For each Python: a clean environment gets `agentrl-all` from an index on this machine, and lists its plugins.
5. In it, the calculator example is prepared and trained to its accuracy.

Nothing is uploaded, and nothing is committed: the last lines say how.
"""

import argparse
import contextlib
import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
ACCURACY = "validation/calculator/accuracy_sampled"
GOAL = 0.9
"""What the calculator reaches on problems that it has not seen, see docs/results/calculator.md."""


class ReleaseError(Exception):
    """Why there is no release, and what to do."""


def run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """Standard output of a command; its whole output in the error if it fails."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def projects() -> list[Path]:
    """Folders of all distributions that are published, the core first."""
    files = run("git", "ls-files", "pyproject.toml", "plugins/*pyproject.toml").split()
    return [(ROOT / file).parent for file in files]


def metadata(project: Path) -> dict[str, str]:
    with (project / "pyproject.toml").open("rb") as file:
        about: dict[str, str] = tomllib.load(file)["project"]
    return about


def set_version(new: str) -> bool:
    """Writes the version into every project, and as the lower bound wherever one of them needs another.

    False if it was there already.
    """
    old = metadata(ROOT)["version"]
    if new == old:
        return False
    if Version(new) < Version(old):
        raise ReleaseError(f"version {new} is older than {old}, the version of pyproject.toml: choose a newer one")
    if run("git", "status", "--porcelain"):
        raise ReleaseError("there are uncommitted changes (git status): commit or stash them, then run this again")
    bound = re.compile(rf'("agentrl-[a-z-]+(?:\[[a-z,]+\])?>=){re.escape(old)}"')
    for file in [project / "pyproject.toml" for project in projects()]:
        text = file.read_text().replace(f'\nversion = "{old}"\n', f'\nversion = "{new}"\n', 1)
        file.write_text(bound.sub(rf'\g<1>{new}"', text))
    core = ROOT / "agentrl_core/__init__.py"
    core.write_text(core.read_text().replace(f'__version__ = "{old}"', f'__version__ = "{new}"'))
    return True


def build(dist: Path) -> None:
    shutil.rmtree(dist, ignore_errors=True)
    for project in projects():
        run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", dist, cwd=project)


def members(wheel: Path) -> dict[str, int]:
    """Files of a wheel with their checksums, without the list of them."""
    with zipfile.ZipFile(wheel) as archive:
        return {item.filename: item.CRC for item in archive.infolist() if not item.filename.endswith("/RECORD")}


def check(dist: Path, version: str) -> None:
    names = {canonicalize_name(metadata(project)["name"]) for project in projects()}
    wheels = {parse_wheel_filename(file.name)[:2]: file for file in dist.glob("*.whl")}
    sdists = {parse_sdist_filename(file.name): file for file in dist.glob("*.tar.gz")}
    wanted = {(name, Version(version)) for name in names}
    for kind, found in (("wheel", wheels), ("sdist", sdists)):
        if found.keys() != wanted:
            raise ReleaseError(f"{dist}: a {kind} is missing or has another version: {sorted(found.keys() ^ wanted)}")
    run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir())
    for key, sdist in sdists.items():
        with tempfile.TemporaryDirectory() as folder, tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
            (source,) = Path(folder).iterdir()
            run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=source)
            (again,) = Path(folder).glob("*.whl")
            if members(again) != members(wheels[key]):
                raise ReleaseError(f"{sdist.name}: a wheel built from it differs from {wheels[key].name}")


@contextlib.contextmanager
def index_of(dist: Path) -> Iterator[str]:
    """An index of packages on this machine (PEP 503) that serves a folder's files; its URL."""
    with tempfile.TemporaryDirectory() as folder:
        for file in dist.iterdir():
            name = file.name.partition("-")[0].replace("_", "-")
            (Path(folder) / name).mkdir(exist_ok=True)
            shutil.copy(file, Path(folder) / name / file.name)
        handler = functools.partial(_Quiet, directory=folder)
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}/"
            server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """One line for each file of each environment would hide what matters."""


def interpreter(version: str, given: Sequence[str]) -> str:
    """The command of this Python: one of those that were given, or one of the search path."""
    for command in [*given, f"python{version}", "python3"]:
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        with contextlib.suppress(OSError):
            done = subprocess.run([command, "-c", code], capture_output=True, text=True)
            if done.stdout.strip() == version:
                return command
    raise ReleaseError(
        f"Python {version} is not on the search path: install it, or name it with "
        f'PYTHONS="/path/to/python{version} …"; a release is tried with {", ".join(PYTHONS)}'
    )


def try_out(python: str, version: str, index: str) -> str:
    """Installs the release into a clean environment and trains the calculator there; what was seen."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    env = kept | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(prefix="agentrl-release-") as folder:
        place = Path(folder)
        run(python, "-m", "venv", place / "venv", env=env)
        of_venv = place / "venv/bin"
        install = [
            of_venv / "python",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-compile",
            "-c",
            ROOT / "constraints.txt",
        ]
        torch = next(line for line in (ROOT / "constraints.txt").read_text().split() if line.startswith("torch=="))
        run(*install, torch, cwd=place, env=env)
        run(*install, "--extra-index-url", index, f"agentrl-all=={version}", cwd=place, env=env)
        rows = json.loads(run(of_venv / "agentrl", "plugins", "list", "--json", cwd=place, env=env))["plugins"]
        ours = [row for row in rows if row["package"].startswith("agentrl-")]
        broken = [f"{row['kind']} {row['name']}: {row['status']}" for row in ours if row["status"] == "broken"]
        if broken or {row["version"] for row in ours} != {version}:
            raise ReleaseError(f"{python}: plugins that don't work, or of another version than {version}: {broken}")
        shutil.copytree(
            ROOT / "examples/calculator", place / "calculator", ignore=shutil.ignore_patterns("model", "data")
        )
        shutil.copy(ROOT / "examples/warm_start.py", place)
        run(of_venv / "python", "calculator/prepare.py", cwd=place, env=env)
        run(of_venv / "agentrl", "train", "calculator/config.yaml", cwd=place, env=env)
        lines = (place / "runs/calculator/metrics.jsonl").read_text().splitlines()
        reached = [step[ACCURACY] for step in map(json.loads, lines) if ACCURACY in step][-1]
        if reached < GOAL:
            raise ReleaseError(f"{python}: the calculator reached {reached:.3f}, it must reach {GOAL}")
    return f"{len(ours)} plugins, calculator {reached:.3f}"


def release(version: str, pythons: Sequence[str]) -> None:
    with contextlib.suppress(InvalidVersion):
        if str(Version(version)) == version:
            return prepare(version, pythons)
    raise ReleaseError(f"VERSION={version} is not a version in the form of PEP 440: write one like 0.2.0 or 0.2.0rc1")


def prepare(version: str, pythons: Sequence[str]) -> None:
    interpreters = {number: interpreter(number, pythons) for number in PYTHONS}
    if set_version(version):
        run("make", "changelog", f"VERSION={version}")
    dist = ROOT / "dist"
    build(dist)
    check(dist, version)
    print(f"dist: {len(list(dist.iterdir()))} files of {len(projects())} distributions, built and checked", flush=True)
    with index_of(dist) as index:
        for number, command in interpreters.items():
            print(f"Python {number}: {try_out(command, version, index)}", flush=True)
    print(f"Ready. Now publish it:\n  git commit -am 'Release {version}' && git tag v{version} && git push --tags")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="of all distributions, such as 0.2.0")
    parser.add_argument("pythons", nargs="*", help="interpreters to try, where the search path lacks one")
    options = parser.parse_args()
    try:
        release(options.version, options.pythons)
    except ReleaseError as error:
        sys.exit(f"error: {error}")
