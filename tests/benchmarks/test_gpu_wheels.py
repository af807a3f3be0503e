"""The wheels for a GPU without a network: that none is missing, and that they fit into folders."""

import random
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType

import pytest

from agentrl_core.config import load_config
from agentrl_core.config.slots import Slot
from agentrl_core.plugins.official import OFFICIAL

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def gpu_wheels(import_script: Callable[[str], ModuleType]) -> ModuleType:
    return import_script("gpu_wheels")


def distributions(value: object) -> set[str]:
    """Those of all plugins of a configuration."""
    found = {OFFICIAL.get((value.kind, value.name))} if isinstance(value, Slot) else set()
    parts = value if isinstance(value, list) else vars(value).values() if is_dataclass(value) else ()
    return {each for each in found.union(*map(distributions, parts)) if each is not None}


def test_every_plugin_of_the_parts_is_among_the_projects(
    gpu_wheels: ModuleType, import_script: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    bench = import_script("_gpu_bench")
    used = distributions(load_config(bench.write_run(tmp_path, bench.TINY, "cpu")))
    carried = {
        tomllib.loads((ROOT / project / "pyproject.toml").read_text())["project"]["name"]
        for project in gpu_wheels.PROJECTS
    }
    assert "agentrl-engine-hf" in used and used <= carried


def test_requirements_are_those_of_the_projects_without_what_nothing_uses(gpu_wheels: ModuleType) -> None:
    names = {gpu_wheels.name_of(each) for each in gpu_wheels.requirements()}
    assert {"ray", "torch", "transformers", "tensordict", "datasets", "omegaconf", "pytest"} <= names
    assert not names & {"matplotlib", "tensorboard", "agentrl-core"}


def test_a_wheel_without_a_folder_has_the_other_files_as_they_were(gpu_wheels: ModuleType, tmp_path: Path) -> None:
    files = {"ray/__init__.py": "x = 1\n", "ray/jars/a.jar": "bytes", "ray-1.dist-info/METADATA": "Name: ray\n"}
    wheel = tmp_path / "ray-1-py3-none-any.whl"
    record = "".join(f"{name},sha256=x,{len(text)}\n" for name, text in files.items())
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in {**files, "ray-1.dist-info/RECORD": record}.items():
            archive.writestr(name, text)
    gpu_wheels.without(wheel, "ray/jars/")
    with zipfile.ZipFile(wheel) as archive:
        found = {name: archive.read(name).decode() for name in archive.namelist()}
    record = found.pop("ray-1.dist-info/RECORD")
    assert found == {name: text for name, text in files.items() if "jars" not in name}
    assert [line.partition(",")[0] for line in record.splitlines()] == list(found)
    assert list(tmp_path.iterdir()) == [wheel]


class Wheel:
    """Of a size."""

    def __init__(self, size: int) -> None:
        self.st_size = size

    def stat(self) -> "Wheel":
        return self


@pytest.mark.parametrize("seed", range(20))
def test_every_wheel_is_in_one_share_and_no_share_is_too_large(gpu_wheels: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 20) for _ in range(seed)]
    wheels = [Wheel(size) for size in sizes]
    shares = list(gpu_wheels.shares(wheels, 10))
    assert sorted(map(id, sum(shares, []))) == sorted(map(id, wheels))
    assert all(len(share) == 1 or sum(wheel.st_size for wheel in share) <= 10 for share in shares)
