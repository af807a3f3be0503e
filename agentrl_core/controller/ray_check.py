"""Checks plugins inside of a Ray worker: what is found on the driver must be found and imported there too."""

import sys
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from agentrl_core.plugins.check import Finding, answer, examine


def examine_in_ray(chosen: list[list[str]], seconds: float) -> list[Finding]:
    """Findings of a Ray worker for plugins given as kind, name and distribution, each within ``seconds``."""
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    task = ray.remote(max_retries=0, max_calls=0)(_examine)
    findings = []
    for kind, name, dist in chosen:
        reference: Any = task.remote(kind, name, dist)
        head = f"package {dist}, {kind} {name!r}, in a Ray worker: "
        try:
            finding: Finding = ray.get(reference, timeout=seconds)
        except GetTimeoutError:
            ray.cancel(reference, force=True)
            finding = Finding("failed", f"{head}the check did not finish within {seconds:g} s")
        except RayError as error:
            finding = Finding("failed", f"{head}{type(error).__name__}", str(error))
        findings.append(finding)
    return findings


def _examine(kind: str, name: str, dist: str) -> Finding:
    return examine(kind, name, dist, fresh=False)


if __name__ == "__main__":
    answer(lambda chosen: examine_in_ray(chosen, float(sys.argv[-2])))
