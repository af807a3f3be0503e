"""Resources and placement groups of a Ray cluster."""

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentrl_core.api.errors import WorkerError


def available_resources() -> dict[str, float]:
    """What the cluster's nodes have free now."""
    return dict(ray.available_resources())


def create_placement_groups(
    bundles_by_node: Sequence[list[dict[str, float]]], strategy: str, name: str, timeout: float, detached: bool = False
) -> list[Any]:
    """One placement group per node. Raises WorkerError with what is missing if they are not ready in ``timeout``."""
    lifetime = "detached" if detached else None
    groups = [placement_group(bundles, strategy=strategy, lifetime=lifetime) for bundles in bundles_by_node]
    deadline = time.monotonic() + timeout
    for group in groups:
        if not group.wait(max(deadline - time.monotonic(), 0.0)):
            remove_placement_groups(groups)
            raise WorkerError(
                f"Ray could not place the pool {name!r} within {timeout:g} s: needed {bundles_by_node} ({strategy} on "
                f"each node), free {available_resources()}, in all {dict(ray.cluster_resources())}"
            )
    return groups


def remove_placement_groups(groups: Sequence[Any]) -> None:
    """Gives placement groups back."""
    for group in groups:
        remove_placement_group(group)


def in_bundle(group: Any, bundle: int) -> Any:
    """The scheduling strategy for an actor in one bundle of a placement group."""
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
