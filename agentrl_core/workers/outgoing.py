"""A model's weights on their way from a training backend to engines: as buckets, in files, or from device to device."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from agentrl_core.api.training_backend import Columns, TrainingBackend, described
from agentrl_core.api.weights import ArrayBucket
from agentrl_core.engine_kit.memory_files import WeightFile
from agentrl_core.engine_kit.weight_group import WeightGroup


class OutgoingWeights:
    """Those of one backend. All ranks must call each method."""

    def __init__(self, backend: TrainingBackend) -> None:
        self._backend = backend
        self._is_first = backend.context.rank == 0
        # A file that every update overwrites, where the backend writes none itself.
        self._file: WeightFile | None = None

    def buckets(self, bucket_bytes: int) -> Iterator[ArrayBucket]:
        """As raw bytes on the host; a tensor that has its own bucket there is not copied."""
        for tensors in self._backend.weights(bucket_bytes):
            yield replace(described(tensors), data=_flat(tensors).numpy())

    def send(self, bucket_bytes: int, group: WeightGroup | None, on_host: bool) -> None:
        """Send the buckets of the backend's layout. Ranks without a group only help to gather."""
        for tensors in self._backend.weights(bucket_bytes, on_host, everywhere=group is not None):
            if group is not None:
                group.broadcast(_flat(tensors))

    def files(self) -> tuple[str, ...]:
        """Write them to safetensors files in this host's memory, the same ones each time; their paths on rank 0."""
        written = self._backend.weight_file()
        if written is not None:
            return written
        if self._file is None:
            layout = self._backend.weight_layout(0)
            self._file = WeightFile(layout) if self._is_first else None
        # Tensor by tensor, so that nothing is gathered into a bucket only to be copied again.
        views = {} if self._file is None else self._file.views
        for tensors in self._backend.weights(0):
            for name in tensors.keys() & views.keys():
                torch.from_numpy(views[name]).copy_(_flat({name: tensors[name]}))
        return () if self._file is None else (self._file.path,)

    def close(self) -> None:
        """Remove the file. A second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _flat(tensors: Columns) -> Tensor:
    raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors.values()]
    return raw[0] if len(raw) == 1 else torch.cat(raw) if raw else torch.empty(0, dtype=torch.uint8)
