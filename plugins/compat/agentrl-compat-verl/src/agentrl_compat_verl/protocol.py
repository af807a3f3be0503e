"""`DataProto` with the methods that code for verl calls and agentrl does not.

Such code imports it from here instead of from ``verl``. Batches that agentrl made are turned into it with
``DataProto(batch.batch, batch.non_tensor_batch, batch.meta_info)``; worker groups take and return both.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDictBase

from agentrl_compat_verl import storage
from agentrl_core.api import ProtocolError
from agentrl_core.protocol import DataProto as CoreDataProto
from agentrl_core.protocol import checked_methods

logger = logging.getLogger(__name__)


AUTO_PADDING_KEY = "_auto_padding"


@checked_methods
class DataProto(CoreDataProto):
    """A batch of rows; the operations of agentrl's own batch are inherited."""

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Any] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """As agentrl's own. With ``auto_padding`` a worker group pads the batch to a multiple of its ranks instead of
        giving some ranks a row less."""
        meta = {**(meta_info or {}), **({AUTO_PADDING_KEY: True} if auto_padding else {})}
        return super().from_dict(tensors, non_tensors, meta, num_batch_dims)

    def is_padding_enabled(self) -> bool:
        """Whether a worker group shall pad this batch to a multiple of its ranks."""
        return is_padding_enabled(self)

    def save_to_disk(self, path: str | Path) -> None:
        """Writes one safetensors file, atomically. Raises ProtocolError on an object that JSON cannot hold."""
        storage.save(Path(path), self.batch, self.non_tensor_batch, self.meta_info)

    @classmethod
    def load_from_disk(cls, path: str | Path) -> Self:
        """Reads what `save_to_disk` wrote. Executes nothing that is in the file."""
        return cls._of(*storage.load(Path(path)))

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None, auto_padding: bool = False
    ) -> Self:
        """A batch of one dictionary: tensors become tensor columns, lists and arrays become object columns."""
        tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor | TensorDictBase)}
        others = {key: value for key, value in data.items() if key not in tensors}
        return cls.from_dict(tensors, others, meta_info, auto_padding=auto_padding)

    def print_size(self, prefix: str = "") -> None:
        """Logs the number of rows and the size of the tensors."""
        logger.info("%s%d rows, %.3f MiB of tensors", prefix and f"{prefix}: ", len(self), self.nbytes() / 2**20)

    def sample_level_repeat(self, repeat_times: Sequence[int] | torch.Tensor | np.ndarray[Any, Any]) -> Self:
        """Row i ``repeat_times[i]`` times, in order."""
        times = torch.as_tensor(repeat_times, dtype=torch.int64).reshape(-1)
        if len(times) != len(self) or bool((times < 0).any()):
            raise ProtocolError(
                f"sample_level_repeat: got {len(times)} counts for {len(self)} rows; one for each, none negative"
            )
        return self.select_idxs(torch.arange(len(self)).repeat_interleave(times))

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, bool] | None = None,
    ) -> Iterator[Self]:
        """``epochs`` times all rows in batches of ``mini_batch_size``, the last of an epoch perhaps shorter.

        With a seed each epoch has its own order, the same for the same seed; without one rows stay in order.
        ``dataloader_kwargs`` may hold ``shuffle`` (False keeps the order even with a seed, True without a
        seed counts as seed 0) and ``drop_last``.
        """
        options = {"shuffle": seed is not None, "drop_last": False, **(dataloader_kwargs or {})}
        if len(options) > 2:
            raise ProtocolError(f"make_iterator: dataloader_kwargs has {sorted(options)}, allowed: shuffle, drop_last")
        if mini_batch_size < 1 or epochs < 0:
            raise ProtocolError(f"make_iterator: mini_batch_size {mini_batch_size} (at least 1), epochs {epochs} (≥ 0)")
        return self._iterate(mini_batch_size, epochs, seed if seed is not None else 0, **options)

    def _iterate(self, size: int, epochs: int, seed: int, *, shuffle: bool, drop_last: bool) -> Iterator[Self]:
        generator = torch.Generator().manual_seed(seed)
        end = len(self) - len(self) % size if drop_last else len(self)
        for _ in range(epochs):
            order = torch.randperm(len(self), generator=generator) if shuffle else None
            for start in range(0, end, size):
                rows = slice(start, start + size)
                yield self.slice(start, start + size) if order is None else self.select_idxs(order[rows])

    def padding(self, padding_size: int, padding_candidate: str = "last") -> Self:
        """Adds ``padding_size`` copies of the ``first`` or ``last`` row at the end. Modifies self and returns it."""
        if padding_candidate not in ("first", "last"):
            raise ProtocolError(f"padding: padding_candidate is {padding_candidate!r}, allowed are 'first' and 'last'")
        if padding_size < 0 or (padding_size and not len(self)):
            raise ProtocolError(f"padding: cannot add {padding_size} copies of a row to a batch of {len(self)} rows")
        row = 0 if padding_candidate == "first" else len(self) - 1
        padded = self.select_idxs([*range(len(self)), *[row] * padding_size])
        self.batch, self.non_tensor_batch, self.meta_info = padded.batch, padded.non_tensor_batch, padded.meta_info
        return self

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> Self:
        """Every row becomes ``n_split`` rows: ``split_keys`` [rows, n·k, …] are cut along dim 1, others repeat.

        A column with a list in each row, all of one length, counts as [rows, n·k].
        """
        tensors = {} if self.batch is None else dict(self.batch.items())
        columns, keys = {**self.non_tensor_batch, **tensors}, set(split_keys or ())
        lists = {key: _matrix(column) for key, column in self.non_tensor_batch.items() if key in keys}
        columns |= {key: matrix for key, matrix in lists.items() if matrix is not None}
        unknown = sorted(keys - columns.keys())
        if n_split < 1 or unknown:
            raise ProtocolError(f"unfold_column_chunks: n_split is {n_split} (at least 1), unknown keys: {unknown}")
        for key in sorted(keys):
            if isinstance(columns[key], torch.Tensor) and columns[key].is_nested:
                raise ProtocolError(f"unfold_column_chunks: {key!r} is a nested tensor, it has no common dimension 1")
            shape = list(columns[key].shape)
            if len(shape) < 2 or shape[1] % n_split:
                raise ProtocolError(
                    f"unfold_column_chunks: {key!r} of shape {shape} cannot be cut into {n_split} along dim 1"
                )
        others = [key for key in tensors if key not in keys], [key for key in self.non_tensor_batch if key not in keys]
        unfolded = self.select(*others).repeat(n_split)
        for key in sorted(keys):
            _, width, *rest = columns[key].shape
            column = columns[key].reshape(len(self) * n_split, width // n_split, *rest)
            if key in tensors:
                unfolded.batch[key] = column
            else:
                # A row that had a list has a list again.
                unfolded.non_tensor_batch[key] = column.copy() if lists[key] is None else _column(column.tolist())
        return unfolded

    def fold_batch_dim(self, new_batch_size: int) -> Self:
        """From [rows, …] to [new_batch_size, rows / new_batch_size, …]."""
        if new_batch_size < 1 or len(self) % new_batch_size:
            raise ProtocolError(f"fold_batch_dim: {len(self)} rows cannot be folded into {new_batch_size} equal rows")
        return self._reshaped(1, (new_batch_size, len(self) // new_batch_size))

    def unfold_batch_dim(self, batch_dims: int = 2) -> Self:
        """From [a, b, …] back to [a · b, …]: the inverse of `fold_batch_dim`."""
        return self._reshaped(batch_dims, None)

    def _reshaped(self, dims: int, shape: tuple[int, ...] | None) -> Self:
        """The first ``dims`` dimensions of every column reshaped to ``shape`` (None: to one dimension)."""
        batch, columns = self.batch, self.non_tensor_batch
        if batch is not None and len(batch.batch_size) < dims:
            raise ProtocolError(f"the batch has {len(batch.batch_size)} batch dimensions, fewer than {dims}")
        for key, column in columns.items():
            if column.ndim < dims:
                raise ProtocolError(
                    f"non_tensor_batch[{key!r}] has shape {list(column.shape)}, fewer than {dims} dimensions"
                )
        if batch is not None and any(isinstance(each, torch.Tensor) and each.is_nested for each in batch.values(True)):
            raise ProtocolError("nested tensors have one batch dimension only: pad them before folding")
        sizes = batch.batch_size if batch is not None else next(iter(columns.values()), np.empty(0)).shape
        new = list(shape) if shape is not None else [math.prod(sizes[:dims])]
        return type(self)(
            None if batch is None else batch.reshape(*new, *batch.batch_size[dims:]),
            {key: column.reshape(*new, *column.shape[dims:]).copy() for key, column in columns.items()},
            self.meta_info,
        )


def is_padding_enabled(batch: CoreDataProto) -> bool:
    """Whether a worker group shall pad this batch to a multiple of its ranks."""
    return bool(batch.meta_info.get(AUTO_PADDING_KEY, False))


def pad_dataproto_to_divisor(data: CoreDataProto, size_divisor: int) -> tuple[CoreDataProto, int]:
    """A batch whose length is a multiple of ``size_divisor``, and the number of rows added at its end.

    The added rows repeat the batch from its start. A batch without rows stays as it is. ``data`` is not modified.
    """
    if size_divisor < 1:
        raise ProtocolError(f"pad_dataproto_to_divisor: size_divisor is {size_divisor}, it must be at least 1")
    rows = len(data)
    pad_size = -rows % size_divisor
    return data.select_idxs([row % rows for row in range(rows + pad_size)]) if pad_size else data.slice(), pad_size


def unpad_dataproto(data: CoreDataProto, pad_size: int) -> CoreDataProto:
    """The batch without its last ``pad_size`` rows. ``data`` is not modified."""
    if not 0 <= pad_size <= len(data):
        raise ProtocolError(f"unpad_dataproto: cannot remove {pad_size} rows from a batch of {len(data)}")
    return data.slice(0, len(data) - pad_size)


def _matrix(column: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """[rows, items] of a column [rows] with a list of the same length in each row; None for another column."""
    if column.ndim != 1 or not all(isinstance(row, list | tuple) for row in column) or len({*map(len, column)}) != 1:
        return None
    items = [item for row in column for item in row]
    return _column(items).reshape(len(column), len(column[0]))


def _column(items: Sequence[Any]) -> np.ndarray[Any, Any]:
    """[items] with whatever they are: ``np.array`` would look into those that are lists."""
    return np.fromiter(iter(items), dtype=object, count=len(items))


def all_gather_data_proto(data: CoreDataProto, process_group: Any = None) -> CoreDataProto:
    """The batches of all ranks in rank order, on every rank, on the device of ``data``.

    Columns must agree between the ranks; lengths may differ. meta_info is merged as by `DataProto.concat`.
    """
    device = data.batch.device if data.batch is not None else None
    parts: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(parts, data, group=process_group)
    gathered = type(data).concat(parts)
    return gathered.to(device) if device is not None else gathered
