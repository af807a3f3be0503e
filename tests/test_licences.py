"""The licences of all that the distributions of this tree install, from the metadata of what is installed here."""

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution

import pytest
from packaging.requirements import Requirement

ALLOWED = re.compile(
    r"Apache|MIT|BSD|ISC|MPL|Mozilla Public|PSF|Python Software Foundation|CNRI-Python|Zlib|CC0|BSL-1\.0|Unlicense|"
    r"Public Domain|HPND|Academic Free|Boost",
    re.IGNORECASE,
)
FORBIDDEN = re.compile(r"GPL|GNU|Affero|proprietary|SSPL|Commons Clause|non-?commercial", re.IGNORECASE)
UNSTATED = {
    "openai-harmony": "Apache-2.0 in its repository",
    "prime-pydantic-config": "Apache-2.0 in its repository",
    "zss": "BSD-3-Clause in its repository",
}
"""Distributions whose metadata names no licence."""


def licence_of(found: Distribution) -> str:
    """What the metadata says: the expression, the classifiers, or the first line of the text."""
    about = found.metadata
    classifiers = [each for each in about.get_all("Classifier") or () if each.startswith("License ::")]
    return str(
        about.get("License-Expression") or "; ".join(classifiers) or (about.get("License") or "").partition("\n")[0]
    )


def installed_with(name: str, extras: frozenset[str]) -> dict[str, Distribution]:
    """The distributions that a distribution with extras installs here, itself included."""
    found: dict[str, Distribution] = {}
    waiting, seen = [(name, extras)], set[tuple[str, frozenset[str]]]()
    while waiting:
        wanted = waiting.pop()
        if wanted in seen:
            continue
        seen.add(wanted)
        try:
            one = found[wanted[0]] = distribution(wanted[0])
        except PackageNotFoundError:
            # Not for this platform, or not installed with these extras.
            continue
        for line in one.requires or ():
            requirement = Requirement(line)
            chosen = [{"extra": extra} for extra in ("", *wanted[1])]
            if requirement.marker is None or any(requirement.marker.evaluate(each) for each in chosen):
                waiting.append((requirement.name.lower().replace("_", "-"), frozenset(requirement.extras)))
    return found


INSTALLED = installed_with("agentrl-core", frozenset({"default"}))


def test_all_dependencies_are_seen() -> None:
    assert {"torch", "ray", "pyyaml", "fastapi", "agentrl-viewer"} <= INSTALLED.keys()


@pytest.mark.parametrize("name", sorted(INSTALLED))
def test_each_licence_may_be_distributed_with_apache_software(name: str) -> None:
    licence = licence_of(INSTALLED[name])
    if name in UNSTATED and not licence:
        return
    assert ALLOWED.search(licence) and not FORBIDDEN.search(licence), (
        f"{name} has the licence {licence!r}. Replace it, or move what needs it to an extra"
    )


def test_the_licences_of_the_core_are_stated() -> None:
    assert not installed_with("agentrl-core", frozenset({"train", "ray"})).keys() & UNSTATED.keys()
