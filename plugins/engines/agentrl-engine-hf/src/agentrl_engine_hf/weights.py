"""New weights from buckets of bytes, or from a broadcast, into a module, in place."""

import difflib
from collections.abc import Iterator

import numpy as np
import torch

from agentrl_core.api import ArrayBucket, WeightUpdate
from agentrl_core.api.errors import EngineError
from agentrl_core.api.weights import Broadcast
from agentrl_core.engine_kit.model_tensors import broken_buckets
from agentrl_core.engine_kit.weight_buffer import WeightBuffer, join_as_engine
from agentrl_core.engine_kit.weight_group import WeightGroup

Tensors = Iterator[tuple[str, torch.Tensor]]


def load_weights(module: torch.nn.Module, update: WeightUpdate, receiver: "Receiver") -> None:
    """Copy every tensor of ``update`` into the module's own, cast to its dtype.

    Everything is checked before the first byte is written. Of tied tensors one name is enough; buffers may be absent.

    Raises:
        EngineError: names that the module doesn't have, parameters that are missing, other shapes, unknown dtypes or
            buckets whose bytes don't add up.
    """
    targets, buckets = module.state_dict(), list(update)
    has_data = update.broadcast is None
    problems = [*broken_buckets(buckets, has_data), *_name_problems(module, targets, buckets)]
    if problems:
        raise EngineError("weights refused, nothing was written:\n" + "\n".join(f"  - {line}" for line in problems))
    if update.broadcast is None:
        tensors = (tensor for bucket in buckets for tensor in _tensors(bucket))
    else:
        device = next(iter(targets.values())).device
        tensors = receiver.receive(update.broadcast, device)
    with torch.no_grad():
        for name, tensor in tensors:
            targets[name].copy_(tensor)


def _name_problems(
    module: torch.nn.Module, targets: dict[str, torch.Tensor], buckets: list[ArrayBucket]
) -> Iterator[str]:
    given = {name: tuple(shape) for bucket in buckets for name, shape in zip(bucket.names, bucket.shapes, strict=False)}
    for name, shape in given.items():
        if name not in targets:
            near = difflib.get_close_matches(name, targets, n=1)
            yield f"{name}: the model has no such tensor" + (f" (nearest: {near[0]})" if near else "")
        elif shape != tuple(targets[name].shape):
            yield f"{name}: shape {list(shape)} was given, the model has {list(targets[name].shape)}"
    aliases: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    for names in aliases.values():
        if not any(name in given for name in names):
            yield f"{' = '.join(names)}: missing"


def _tensors(bucket: ArrayBucket) -> Tensors:
    for name, shape, dtype, data in bucket.tensors():
        # A copy is aligned and writable, which torch asks for and which a slice of shared memory need not be.
        yield name, torch.from_numpy(data.reshape(-1).view(np.uint8).copy()).view(getattr(torch, dtype)).view(shape)


class Receiver:
    """A rank of the group that an actor sends weights in, joined when the first update comes."""

    def __init__(self) -> None:
        self._address = ""
        self._group: WeightGroup | WeightBuffer | None = None

    def receive(self, broadcast: Broadcast, device: torch.device) -> Tensors:
        """All tensors, which must be taken as they come: the sender waits."""
        if self._group is None or self._address != broadcast.address:
            self.close()
            self._address = broadcast.address
            self._group = join_as_engine(
                broadcast.address, broadcast.backend, broadcast.first_rank, broadcast.size, device
            )
        for bucket in broadcast.buckets:
            yield from self._group.receive(bucket.names, bucket.shapes, bucket.dtypes)

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
            self._group = None
