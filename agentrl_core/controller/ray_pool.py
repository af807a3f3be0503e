"""Resource pools: on how many processes of which nodes a role runs."""

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentrl_core.api.errors import ConfigError, WorkerError


class RayResourcePool:
    """A number of processes on each of some nodes: ``[8, 8]`` is two nodes with eight each. Each node has a placement
    group with a bundle for each process; they are made when first needed.

    ``strategy`` is Ray's, for the bundles of one node. ``num_cpus`` and ``num_gpus`` (a fraction where processes share
    one) belong to each process, shared by the groups that are colocated in it.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        num_gpus: float = 0.0,
        num_cpus: float = 1,
        strategy: str = "STRICT_PACK",
        name_prefix: str = "",
    ) -> None:
        if not process_on_nodes or min(process_on_nodes) < 1:
            raise ConfigError(
                f"a resource pool needs at least one process on every node, found {list(process_on_nodes)}"
            )
        self.process_on_nodes = list(process_on_nodes)
        self.lifetime: str | None = None
        """Of the placement groups, for Ray; None: that of the driver."""
        self.num_gpus = num_gpus
        self.num_cpus = num_cpus
        self.strategy = strategy
        self.name_prefix = name_prefix
        self._bundles: list[tuple[Any, int]] | None = None

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return sum(self.process_on_nodes)

    @property
    def local_world_size_list(self) -> list[int]:
        """For every rank the number of ranks on its node."""
        return [count for count in self.process_on_nodes for _ in range(count)]

    @property
    def local_rank_list(self) -> list[int]:
        """For every rank its number on its node."""
        return [local for count in self.process_on_nodes for local in range(count)]

    @property
    def use_gpu(self) -> bool:
        """Processes of this pool see a GPU."""
        return self.num_gpus > 0

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one process."""
        return {"CPU": self.num_cpus, **({"GPU": self.num_gpus} if self.use_gpu else {})}

    def actor_options(self, rank: int) -> dict[str, Any]:
        """Options of ``ray.remote`` for an actor in the bundle of a rank: on its node, and on its GPU."""
        group, bundle = self.bundles()[rank]
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        return {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, "scheduling_strategy": strategy}

    def bundles(self, timeout: float = 60.0) -> list[tuple[Any, int]]:
        """For every rank its placement group and bundle. Raises WorkerError if Ray cannot place them in ``timeout``."""
        if self._bundles is None:
            nodes = [[self.bundle] * count for count in self.process_on_nodes]
            groups = [placement_group(bundles, strategy=self.strategy, lifetime=self.lifetime) for bundles in nodes]
            self._bundles = [(group, bundle) for group in groups for bundle in range(group.bundle_count)]
            deadline = time.monotonic() + timeout
            if not all(group.wait(max(deadline - time.monotonic(), 0.0)) for group in groups):
                self.close()
                raise WorkerError(
                    f"Ray could not place the pool {self.name_prefix!r} within {timeout:g} s: needed {nodes} "
                    f"({self.strategy} on each node), free {ray.available_resources()}, in all "
                    f"{ray.cluster_resources()}"
                )
        return self._bundles

    def close(self) -> None:
        """Gives the placement groups back."""
        for group in dict.fromkeys(group for group, _ in self._bundles or ()):
            remove_placement_group(group)
        self._bundles = None
