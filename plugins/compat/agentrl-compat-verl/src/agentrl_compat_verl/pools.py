"""Resource pools by role, and parts of pools."""

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from agentrl_core.api import ConfigError, WorkerError
from agentrl_core.controller import RayResourcePool as CoreRayResourcePool

POLL_SECONDS = 0.5


class RayResourcePool(CoreRayResourcePool):
    """A pool whose processes' resources up to ``max_colocate_count`` worker groups may share.

    A ``detached`` pool outlives the driver that made it.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        num_gpus: float = 0.0,
        num_cpus: float = 1,
        max_colocate_count: int = 1,
        strategy: str = "STRICT_PACK",
        name_prefix: str = "",
        detached: bool = False,
    ) -> None:
        if max_colocate_count < 1:
            raise ConfigError(f"a resource pool needs max_colocate_count of at least 1, found {max_colocate_count}")
        super().__init__(process_on_nodes, num_gpus, num_cpus, strategy, name_prefix)
        self.max_colocate_count = max_colocate_count
        self.detached = detached
        self.lifetime = "detached" if detached else None

    def actor_options(self, rank: int) -> dict[str, Any]:
        """Options of ``ray.remote`` for one more actor in the bundle of a rank: on its node, and on its GPU.

        It holds one of the ``max_colocate_count`` shares of the bundle, as the group's own process of that rank does.
        """
        options = super().actor_options(rank)
        shares = {name: options[name] / self.max_colocate_count for name in ("num_cpus", "num_gpus")}
        return {**options, **shares}


class _SharedPool(RayResourcePool):
    """A pool over bundles of other pools with the same resources for each process."""

    def __init__(self, like: RayResourcePool, bundles: list[tuple[Any, int]]) -> None:
        counts = [len(list(same)) for _, same in itertools.groupby(bundles, key=lambda bundle: bundle[0])]
        super().__init__(
            counts,
            like.num_gpus,
            like.num_cpus,
            like.max_colocate_count,
            like.strategy,
            like.name_prefix,
            like.detached,
        )
        self._bundles = bundles


def split_resource_pool(pool: RayResourcePool, split_size: int | Sequence[int]) -> list[RayResourcePool]:
    """Pools over parts of one pool's processes: of ``split_size`` each, or of the sizes listed."""
    sizes = [split_size] * (pool.world_size // split_size) if isinstance(split_size, int) else list(split_size)
    if sum(sizes) != pool.world_size or min(sizes, default=0) < 1:
        raise ConfigError(f"a pool of {pool.world_size} processes cannot be split into {split_size}")
    bundles = iter(pool.bundles())
    return [_SharedPool(pool, list(itertools.islice(bundles, size))) for size in sizes]


def merge_resource_pool(first: RayResourcePool, second: RayResourcePool) -> RayResourcePool:
    """One pool over the processes of two."""
    if first.bundle != second.bundle:
        raise ConfigError(f"pools with {first.bundle} and {second.bundle} per process cannot be merged")
    return _SharedPool(first, first.bundles() + second.bundles())


class ResourcePoolManager:
    """Named pools, and the pool of every role.

    ``resource_pool_spec`` maps pool names to processes per node, ``mapping`` maps roles to pool names.
    """

    def __init__(
        self,
        resource_pool_spec: Mapping[str, Sequence[int]],
        mapping: Mapping[str, str],
        num_gpus: float = 0.0,
        num_cpus: float = 1,
    ) -> None:
        unknown = {role: pool for role, pool in mapping.items() if pool not in resource_pool_spec}
        if unknown:
            raise ConfigError(
                [
                    f"role {role!r} is mapped to the pool {pool!r}; pools are {sorted(resource_pool_spec)}"
                    for role, pool in unknown.items()
                ],
                "the resource pools",
            )
        sharing = {name: sum(pool == name for pool in mapping.values()) for name in resource_pool_spec}
        self.mapping = dict(mapping)
        self.resource_pools = {
            name: RayResourcePool(counts, num_gpus, num_cpus, max(sharing[name], 1), name_prefix=name)
            for name, counts in resource_pool_spec.items()
        }

    def get_resource_pool(self, role: str) -> RayResourcePool:
        """The pool of a role. Raises ConfigError that names the roles there are."""
        if role not in self.mapping:
            raise ConfigError(f"role {role!r} has no resource pool; roles are {sorted(self.mapping)}")
        return self.resource_pools[self.mapping[role]]

    def needed(self) -> dict[str, float]:
        """The resources of all pools together."""
        total: dict[str, float] = {}
        for pool in self.resource_pools.values():
            for resource, amount in pool.bundle.items():
                total[resource] = total.get(resource, 0.0) + amount * pool.world_size
        return total

    def check_resource_available(self, timeout: float = 30.0) -> None:
        """Waits until the cluster has what all pools need together.

        Raises WorkerError with what was seen and what is needed after ``timeout`` seconds.
        """
        needed = self.needed()
        deadline = time.monotonic() + timeout
        while True:
            seen = ray.available_resources()
            missing = {name: amount for name, amount in needed.items() if seen.get(name, 0.0) < amount}
            if not missing:
                return
            if time.monotonic() >= deadline:
                parts = [f"{name}: {seen.get(name, 0.0):g} seen, {amount:g} needed" for name, amount in missing.items()]
                raise WorkerError(
                    f"the Ray cluster lacks resources after {timeout:g} s ({'; '.join(parts)}): "
                    "make the pools smaller, add nodes, or start Ray with more (ray start --num-cpus=… --num-gpus=…)"
                )
            time.sleep(POLL_SECONDS)
