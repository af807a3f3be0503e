"""`make release` and the workflows: every project gets the version, and what is incomplete is not published."""

import importlib.util
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = ROOT / ".github/workflows"
TOOL = "plugins/tools/agentrl-tools-basic"
PARTS = [".ci/release.py", ".gitignore", "agentrl_core/__init__.py", "pyproject.toml", "README.md", "LICENSE"]
PARTS += [f"{TOOL}/README.md", f"{TOOL}/pyproject.toml", f"{TOOL}/src/agentrl_tools_basic/__init__.py"]


def commit(tree: Path) -> None:
    git = ["git", "-c", "user.name=someone", "-c", "user.email=someone@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "a change"]):
        subprocess.run([*git, *command], cwd=tree, check=True)


@pytest.fixture
def release(tmp_path: Path) -> ModuleType:
    """The script in a repository of two projects."""
    tree = tmp_path / "tree"
    for part in PARTS:
        (tree / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / part, tree / part)
    commit(tree)
    spec = importlib.util.spec_from_file_location("release", tree / ".ci/release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_version_is_written_everywhere(release: ModuleType) -> None:
    old = release.metadata(release.ROOT)["version"]
    assert release.set_version("9.1.0")
    assert [release.metadata(project)["version"] for project in release.projects()] == ["9.1.0", "9.1.0"]
    assert release.metadata(release.ROOT / TOOL)["dependencies"] == ["agentrl-core>=9.1.0"]
    assert "agentrl-tools-basic>=9.1.0" in release.metadata(release.ROOT)["optional-dependencies"]["default"]
    changed = [part for part in PARTS if part.endswith(("pyproject.toml", "__init__.py"))]
    assert not [part for part in changed if f'{old}"' in (release.ROOT / part).read_text()]
    assert not release.set_version("9.1.0")


def test_an_older_version_and_changes_that_are_not_committed_are_rejected(release: ModuleType) -> None:
    with pytest.raises(release.ReleaseError, match=r"version 0\.0\.1 is older than .*: choose a newer one"):
        release.set_version("0.0.1")
    (release.ROOT / "README.md").write_text("# changed\n")
    with pytest.raises(release.ReleaseError, match="uncommitted changes"):
        release.set_version("9.1.0")


@pytest.mark.parametrize("version", ["", "v1", "1.0-final", "latest"])
def test_what_is_no_version_is_rejected(release: ModuleType, version: str) -> None:
    with pytest.raises(release.ReleaseError, match="is not a version in the form of PEP 440: write one like 0.2.0"):
        release.release(version, [])


def test_a_missing_interpreter_is_named(release: ModuleType) -> None:
    with pytest.raises(release.ReleaseError, match=r"^Python 3\.99 is not on the search path: install it, or name it"):
        release.interpreter("3.99", ["/no/such/python3.99"])


def remove_a_wheel(dist: Path) -> None:
    next(dist.glob("agentrl_tools_basic-*.whl")).unlink()


def remove_an_sdist(dist: Path) -> None:
    next(dist.glob("agentrl_core-*.tar.gz")).unlink()


def cut_an_sdist(dist: Path) -> None:
    """Without the package's only file, as with a pattern too few in pyproject.toml."""
    sdist = next(dist.glob("agentrl_tools_basic-*.tar.gz"))
    with tarfile.open(sdist) as archive:
        archive.extractall(dist.parent, filter="data")
    folder = dist.parent / sdist.name.removesuffix(".tar.gz")
    (folder / "src/agentrl_tools_basic/__init__.py").write_text("# other\n")
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(folder, folder.name)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_a_wheel, "a wheel is missing or has another version: .*agentrl-tools-basic"),
        (remove_an_sdist, "a sdist is missing or has another version: .*agentrl-core"),
        (cut_an_sdist, "agentrl_tools_basic.*tar.gz: a wheel built from it differs"),
    ],
)
def test_what_is_incomplete_is_not_released(
    release: ModuleType, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    dist = tmp_path / "dist"
    release.build(dist)
    version = release.metadata(release.ROOT)["version"]
    release.check(dist, version)
    damage(dist)
    with pytest.raises(release.ReleaseError, match=message):
        release.check(dist, version)


def test_workflows_run_commands_of_this_repository() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    steps = [
        step["run"]
        for file in WORKFLOWS.glob("*.yml")
        for job in yaml.safe_load(file.read_text())["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    assert "bash .ci/run" in steps
    assert {name for step in steps for name in re.findall(r"make ([a-z-]+)", step)} == {"release", "test"} & targets


def test_no_workflow_skips_the_tests_of_bubblewrap() -> None:
    """The runners have none, and their kernel denies it namespaces."""
    workflow = yaml.safe_load((WORKFLOWS / "ci.yml").read_text())
    assert workflow["env"] == {"AGENTRL_TEST_BOUNDARIES": "bubblewrap"}
    for job in workflow["jobs"].values():
        *_, install, tests = [step["run"] for step in job["steps"] if "run" in step]
        assert tests in ("bash .ci/run", "make test test-slow")
        assert re.search(r"apt-get install .*\bbubblewrap$", install, re.MULTILINE)
        assert "kernel.apparmor_restrict_unprivileged_userns=0" in install


def test_publishing_needs_a_release_that_was_tried_and_no_password() -> None:
    text = (WORKFLOWS / "release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in text
