"""What is published: each distribution holds its own package and nothing else, and says what it needs."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import agentrl_core

ROOT = Path(__file__).parents[1]
PROJECTS = [ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/*/pyproject.toml"))]
ALL = ROOT / "plugins/agentrl-all"
HEAVY = {"vllm", "sglang", "flash-attn"}


def metadata(project: Path) -> dict[str, object]:
    with (project / "pyproject.toml").open("rb") as file:
        content: dict[str, object] = tomllib.load(file)["project"]
    return content


def build(project: Path, directory: Path) -> zipfile.ZipFile:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory)]
    subprocess.run(command, cwd=project, check=True, capture_output=True, timeout=120)
    (wheel,) = directory.glob("*.whl")
    return zipfile.ZipFile(wheel)


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_wheel_holds_one_package(project: Path, tmp_path: Path) -> None:
    name = str(metadata(project)["name"]).replace("-", "_")
    package = "agentrl_core" if project == ROOT else name
    about = f"{name}-{metadata(project)['version']}.dist-info"
    with build(project, tmp_path) as wheel:
        top = {entry.split("/")[0] for entry in wheel.namelist()}
        assert top == {package, about}
        assert f"{about}/entry_points.txt" in wheel.namelist()
        assert any(entry.endswith("licenses/LICENSE") for entry in wheel.namelist()) or project != ROOT


def test_one_distribution_installs_all(tmp_path: Path) -> None:
    with build(ALL, tmp_path) as wheel:
        (found,) = (entry for entry in wheel.namelist() if entry.endswith("/METADATA"))
        lines = wheel.read(found).decode().splitlines()
    assert {entry.split("/")[0] for entry in wheel.namelist()} == {f"agentrl_all-{metadata(ALL)['version']}.dist-info"}
    (needed,) = [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist: ")]
    assert (needed.name, needed.extras) == (metadata(ROOT)["name"], {"default"})
    assert str(metadata(ROOT)["version"]) in needed.specifier


@pytest.mark.parametrize("project", [*PROJECTS, ALL], ids=lambda path: path.name)
def test_published_metadata_is_complete(project: Path) -> None:
    about = metadata(project)
    assert about["requires-python"] == ">=3.11"
    assert about["license"] == "Apache-2.0"
    assert (project / "README.md").read_text().startswith("# ")
    dependencies = [str(item) for item in about["dependencies"]]  # type: ignore[attr-defined]
    assert not {item.split("[")[0].split(">")[0].split("=")[0] for item in dependencies} & HEAVY
    if project != ROOT:
        (core,) = (Requirement(item) for item in dependencies if item.startswith("agentrl-core"))
        assert str(core.specifier) == f">={about['version']}"


def test_every_distribution_is_in_the_development_requirements() -> None:
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    editable = {line.removeprefix("-e ").split("[")[0] for line in lines if line.startswith("-e ")}
    assert editable == {"." if project == ROOT else str(project.relative_to(ROOT)) for project in PROJECTS}


def test_default_extra_names_every_plugin_of_this_tree() -> None:
    extras = metadata(ROOT)["optional-dependencies"]
    named = {item for item in extras["default"] if not item.startswith("agentrl-core")}  # type: ignore[index]
    assert named == {f"{about['name']}>={about['version']}" for about in map(metadata, PROJECTS[1:])}


def test_all_distributions_have_one_version() -> None:
    assert {metadata(project)["version"] for project in [*PROJECTS, ALL]} == {agentrl_core.__version__}
