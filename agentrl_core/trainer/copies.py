"""The weights of policies that are not trained: those that another one had before, or those of a directory."""

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from agentrl_core.api import CheckpointError, WeightUpdate
from agentrl_core.api.weights import ArrayBucket, map_safetensors
from agentrl_core.config.schema import ResolvedConfig
from agentrl_core.engine_kit.memory_files import merged, write_safetensors
from agentrl_core.fsdp2.adapters import CONFIG_FILE, WEIGHTS_FILE, stored_adapter
from agentrl_core.plugins.boundary import boundary
from agentrl_core.serving.weight_transport import BUCKET_BYTES
from agentrl_core.workers.protocols import Actor

VERSIONS_FILE = "versions.json"
"""In the checkpoint of a copy, of which of its source's versions it has the weights."""


class Copy:
    """A policy that plays with the weights that another one had some steps before.

    Args:
        name: of it.
        source: whose weights they are.
        base: directory of the model that the adapters belong to.
        steps: how many steps before; until there are so many, the first weights of the run.
    """

    def __init__(self, name: str, source: Actor, steps: int, base: str) -> None:
        self._source = source
        self._base = base
        adapter = source.adapter()
        assert adapter is not None, "policies are adapters"
        self.adapter = replace(adapter, name=name)
        self._past: deque[tuple[int, ArrayBucket]] = deque(maxlen=steps + 1)

    def weights(self, version: int) -> WeightUpdate:
        """Those that it has while the source has this version."""
        if not self._past or self._past[-1][0] != version:
            # A copy: buckets may be the source's own memory, which the next update changes.
            self._past.append((version, merged(self._source.weight_buckets(BUCKET_BYTES))))
        return WeightUpdate(buckets=[self._past[0][1]], adapter=self.adapter)

    def save_checkpoint(self, folder: Path) -> None:
        """Write its weights as PEFT reads them, and those of later steps into the same folder."""
        folder.mkdir(parents=True)
        config = {**self.adapter.config, "base_model_name_or_path": self._base, "inference_mode": True}
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (folder / VERSIONS_FILE).write_text(json.dumps([version for version, _ in self._past]), encoding="utf-8")
        for number, (_, bucket) in enumerate(self._past):
            write_safetensors(folder / _file(number), bucket)

    def load_checkpoint(self, folder: Path) -> None:
        """Take over what :meth:`save_checkpoint` wrote.

        Raises:
            CheckpointError: there is no such policy in it.
        """
        with boundary(CheckpointError, f"{folder}: the policy's earlier weights cannot be read:"):
            versions = json.loads((folder / VERSIONS_FILE).read_text(encoding="utf-8"))
            # Copies: the run may delete this checkpoint while it still plays with these weights.
            found = [merged([map_safetensors(str(folder / _file(number)))]) for number in range(len(versions))]
        self._past = deque(zip(versions, found, strict=True), maxlen=self._past.maxlen)


def _file(number: int) -> str:
    """Name of a file with a copy's weights: 0 is what it plays with now, the others come later."""
    return f"later-{number:04d}.safetensors" if number else WEIGHTS_FILE


class Frozen:
    """A policy that always has the adapter of a directory."""

    def __init__(self, name: str, path: str) -> None:
        self.adapter = stored_adapter(path, name)
        self._file = str(Path(path) / WEIGHTS_FILE)

    def weights(self, version: int) -> WeightUpdate:
        """The same for all versions."""
        # Not as a file, which another host may not have.
        return WeightUpdate(buckets=[map_safetensors(self._file)], adapter=self.adapter)


def untrained(config: ResolvedConfig, actors: Mapping[str, Actor]) -> dict[str, Copy | Frozen]:
    """The policies with an adapter that are not trained, by name.

    Args:
        actors: of those that are.
    """
    found: dict[str, Copy | Frozen] = {}
    for name, policy in config.policies.items():
        if policy.copy_of is not None:
            found[name] = Copy(name, actors[policy.copy_of], policy.updates_ago, config.model.path)
        elif policy.frozen and policy.adapter is not None and policy.adapter.path is not None:
            found[name] = Frozen(name, policy.adapter.path)
    return found
