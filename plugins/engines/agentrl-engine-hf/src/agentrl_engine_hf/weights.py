"""New weights into a module, in place: from buckets of bytes, or as the actor sends them."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from transformers.core_model_loading import revert_weight_conversion

from agentrl_core.api import ArrayBucket, WeightUpdate
from agentrl_core.engine_kit.model_tensors import check_weights, shapes_of
from agentrl_core.engine_kit.weight_group import WeightGroup, join_as_engine

Tensors = Iterator[tuple[str, torch.Tensor]]
Targets = dict[str, torch.Tensor]


class WeightLoader:
    """Copies updates, which have the form of the model's checkpoint, into a module's own tensors and dtypes.

    Args:
        module: a transformers model. Of tied tensors one name is enough in an update; buffers may be absent.
    """

    def __init__(self, module: Any) -> None:
        own: Targets = module.state_dict()
        self._device = next(iter(own.values())).device
        meta = {name: tensor.to("meta") for name, tensor in own.items()}
        form = revert_weight_conversion(module, dict(meta))
        self._shapes = {name: tuple(tensor.shape) for name, tensor in form.items()}
        # What a checkpoint only has under another name is the same object.
        names_there = {id(tensor): name for name, tensor in form.items()}
        alone = {name: names_there[id(tensor)] for name, tensor in meta.items() if id(tensor) in names_there}
        aliases: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(parameter), []).append(alone.get(name, name))
        self._tied = [names for names in aliases.values() if len(names) > 1]
        self._buffers = {alone.get(name, name) for name, _ in module.named_buffers()}
        fused = {name: tensor for name, tensor in own.items() if name not in alone}
        self._writers: dict[str, Callable[[torch.Tensor], object]] = {
            there: own[name].copy_ for name, there in alone.items()
        }
        if fused:
            self._writers |= _writers(module, fused)
        self._address = ""
        self._group: WeightGroup | None = None

    def load(self, update: WeightUpdate) -> None:
        """Check everything, then write.

        Raises:
            EngineError: names that the model doesn't have, parameters that are missing, other shapes, unknown dtypes or
                buckets whose bytes don't add up; nothing was written.
        """
        buckets = list(update)
        optional = self._buffers - shapes_of(buckets).keys()
        known = {name: shape for name, shape in self._shapes.items() if name not in optional}
        check_weights(buckets, known, self._tied, has_data=update.broadcast is None)
        with torch.no_grad():
            for name, tensor in self.tensors(update):
                self._writers[name](tensor)

    def tensors(self, update: WeightUpdate) -> Tensors:
        """All tensors of an update, by name."""
        if update.broadcast is not None:
            return self._received(update)
        return (tensor for bucket in update for tensor in _tensors(bucket))

    def _received(self, update: WeightUpdate) -> Tensors:
        """All tensors, which must be taken as they come: the sender waits."""
        broadcast = update.broadcast
        assert broadcast is not None
        if self._group is None or self._address != broadcast.address:
            self.close()
            self._address = broadcast.address
            self._group = join_as_engine(broadcast, broadcast.first_rank, self._device)
        for bucket in broadcast.buckets:
            yield from self._group.receive(bucket)

    def close(self) -> None:
        """Leave the group that weights are sent in."""
        if self._group is not None:
            self._group.close()
            self._group = None


def _writers(module: Any, fused: Targets) -> dict[str, Callable[[torch.Tensor], object]]:
    """For each tensor of the checkpoint that transformers fuses with others, what writes it into the module's.

    Each element of the module's tensors has a number, and the checkpoint's form of the numbers says where elements go.
    """
    numbers, starts, start = {}, {}, 0
    for name, tensor in fused.items():
        numbers[name], starts[name] = torch.arange(start, start + tensor.numel()).view(tensor.shape), start
        start += tensor.numel()

    def writer(index: torch.Tensor) -> Callable[[torch.Tensor], object]:
        flat = index.reshape(-1)
        places = []
        for name, tensor in fused.items():
            inside = (flat >= starts[name]) & (flat < starts[name] + tensor.numel())
            if bool(inside.any()):
                places.append((tensor, inside.to(tensor.device), (flat[inside] - starts[name]).to(tensor.device)))

        def write(value: torch.Tensor) -> None:
            for tensor, inside, targets in places:
                tensor.view(-1)[targets] = value.to(tensor).reshape(-1)[inside]

        return write

    return {name: writer(index) for name, index in revert_weight_conversion(module, numbers).items()}


def _tensors(bucket: ArrayBucket) -> Tensors:
    for name, shape, dtype, data in bucket.tensors():
        # A copy is aligned and writable, which torch asks for and which a slice of shared memory need not be.
        yield name, torch.from_numpy(data.reshape(-1).view(np.uint8).copy()).view(getattr(torch, dtype)).view(shape)
