import importlib
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from agentrl_core.plugins.requirements import requirement_states, unmet


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(site: Path, distribution: str, version: str, package: str) -> None:
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "top_level.txt").write_text(f"{package}\n")
    (site / f"{package}.py").touch()
    importlib.invalidate_caches()


def test_what_is_missing_or_too_old_is_unmet(site: Path) -> None:
    install(site, "oddthing", "0.31", "oddthing")
    assert [(state.requirement, state.found) for state in unmet(["oddthing>=0.32", "nowhere", "oddthing>=0.3"])] == [
        ("oddthing>=0.32", "0.31"),
        ("nowhere", ""),
    ]


def test_another_build_of_the_same_package_counts(site: Path) -> None:
    install(site, "oddthing-cpu", "0.32.0", "oddthing")
    (state,) = requirement_states(["oddthing>=0.32"])
    assert (state.found, state.met) == ("0.32.0", True)
    assert not requirement_states(["oddthing>=0.33"])[0].met


class Refusing:
    """A finder that lets nobody import ``oddthing``."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name == "oddthing":
            raise ModuleNotFoundError("oddthing is blocked", name=name)
        return None


def test_a_package_that_a_finder_refuses_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [Refusing(), *sys.meta_path])
    assert [state.found for state in unmet(["oddthing"])] == [""]


def test_a_stand_in_for_a_package_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "oddthing", ModuleType("oddthing"))
    assert [state.found for state in unmet(["oddthing"])] == [""]
