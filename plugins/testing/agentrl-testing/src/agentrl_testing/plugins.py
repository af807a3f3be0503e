"""A pytest fixture for tests of discovery: only the distributions that a test declares are found.

from agentrl_testing.plugins import IsolatedPlugins, isolated_plugins

def test_my_tool_is_listed(isolated_plugins: IsolatedPlugins) -> None:
    isolated_plugins.add("acme-tools", {"agentrl.tools": {"shout": "acme_tools.plugin:PLUGIN"}},
                         modules={"acme_tools/plugin.py": "..."})
    assert [row.name for row in discover()] == ["shout"]
"""

import importlib
import importlib.metadata
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.plugins.resolution import resolve_ref


class IsolatedPlugins:
    """Makes distributions in a folder that is on ``sys.path`` while the test runs.

    Args:
        path: the folder; a subprocess finds the same distributions with it on its ``PYTHONPATH``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._allowed: set[str] = set()

    def add(
        self,
        dist: str,
        entry_points: Mapping[str, Mapping[str, str]] | None = None,
        *,
        version: str = "0.1.0",
        modules: Mapping[str, str] | None = None,
    ) -> None:
        """Install a distribution.

        Args:
            dist: its name.
            entry_points: group -> name -> ``"module:attribute"``.
            version: its version; adding it again under another one replaces it.
            modules: file below the folder -> source; packages get an empty ``__init__.py``.
        """
        groups = (entry_points or {}).items()
        text = "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
            for group, entries in groups
        )
        self.add_metadata(dist, text, version=version)
        for file, source in (modules or {}).items():
            self._write_module(Path(file), source)

    def add_metadata(self, dist: str, entry_points_txt: str, *, version: str = "0.1.0") -> None:
        """Install a distribution of metadata only, with this text as its ``entry_points.txt``."""
        stem = dist.replace("-", "_")
        for old in self.path.glob(f"{stem}-*.dist-info"):
            shutil.rmtree(old)
        info = self.path / f"{stem}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(entry_points_txt, encoding="utf-8")
        importlib.invalidate_caches()
        resolve_ref.cache_clear()

    def allow(self, *dists: str) -> None:
        """Also find these distributions of the environment, such as ``agentrl-core``."""
        self._allowed.update(dists)

    def distributions(
        self, found: Iterable[importlib.metadata.Distribution]
    ) -> Iterator[importlib.metadata.Distribution]:
        """Those of ``found`` that the test may see: all without plugins, and the declared ones."""
        for dist in found:
            has_plugins = "[agentrl." in (dist.read_text("entry_points.txt") or "")
            if not has_plugins or self._is_own(dist) or dist.name in self._allowed:
                yield dist

    def forget_modules(self) -> None:
        """Drop what was imported from the folder."""
        inside = str(self.path)
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(inside):
                del sys.modules[name]

    def _is_own(self, dist: importlib.metadata.Distribution) -> bool:
        return Path(str(dist.locate_file(""))) == self.path

    def _write_module(self, file: Path, source: str) -> None:
        target = self.path / file
        target.parent.mkdir(parents=True, exist_ok=True)
        for package in file.parents[:-1]:
            (self.path / package / "__init__.py").touch()
        target.write_text(source, encoding="utf-8")
        importlib.invalidate_caches()


@pytest.fixture
def isolated_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[IsolatedPlugins]:
    """Nothing but what the test declares is discovered; ``sys.path`` and ``sys.modules`` are as before afterwards."""
    plugins = IsolatedPlugins(tmp_path / "site")
    plugins.path.mkdir()
    everything = importlib.metadata.distributions

    def visible(**context: Any) -> Iterator[importlib.metadata.Distribution]:
        return plugins.distributions(everything(**context))

    monkeypatch.syspath_prepend(str(plugins.path))
    monkeypatch.setattr(importlib.metadata, "distributions", visible)
    # What a test allows changes no file, so nothing may be remembered.
    monkeypatch.setattr("agentrl_core.plugins.registration.SETTLED_NS", 1 << 63)
    monkeypatch.delenv("AGENTRL_PLUGINS_BLOCK", raising=False)
    resolve_ref.cache_clear()
    yield plugins
    resolve_ref.cache_clear()
    plugins.forget_modules()
