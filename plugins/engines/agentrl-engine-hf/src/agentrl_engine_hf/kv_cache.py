"""Keys and values of all requests and idle sessions, in rows, and the experts that their tokens were sent to.

Shapes: R rows, H heads of keys and values, C capacity of a row in tokens, D size of a head.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from transformers import Cache

_GRAIN = 64
"""Capacity grows in steps of so many tokens; a multiple of what CUDA's attention kernels want masks aligned to."""


def round_up(tokens: int) -> int:
    return -(-tokens // _GRAIN) * _GRAIN


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer stores for one token.

    Args:
        dtype: of what is stored; None: that of the cache.
    """

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype | None = None


class KVCache:
    """Per layer ``[R, H, C, D]``; a row holds one sequence, aligned to the left.

    Rows trade places lazily: :meth:`swap` only notes it, :meth:`flush` moves the data once, before the next forward.
    """

    def __init__(self, layers: SequenceOf[LayerShape], dtype: torch.dtype, device: torch.device) -> None:
        self.rows = 0
        self.capacity = 0
        self._layers = tuple(layers)
        self._dtype = dtype
        self._device = device
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._origins: list[int] = []
        self._moved = False

    def resize(self, rows: int, capacity: int) -> None:
        """Make room for ``rows`` x ``capacity`` and keep what fits. To shrink, flush first."""
        if (rows, capacity) == (self.rows, self.capacity):
            return
        kept_rows, kept_capacity = min(rows, self.rows), min(capacity, self.capacity)
        for layer, shape in enumerate(self._layers):
            for store, dim in ((self._keys, shape.key_dim), (self._values, shape.value_dim)):
                # Zeros, not empty memory: a masked position still multiplies its value by 0, and 0 x nan is nan.
                dtype = shape.dtype or self._dtype
                grown = torch.zeros(rows, shape.heads, capacity, dim, dtype=dtype, device=self._device)
                if layer < len(store):
                    grown[:kept_rows, :, :kept_capacity] = store[layer][:kept_rows, :, :kept_capacity]
                    store[layer] = grown
                else:
                    store.append(grown)
        self.rows, self.capacity = rows, capacity

    def release(self) -> None:
        """Give the memory back."""
        self.rows = self.capacity = 0
        self._keys, self._values, self._origins, self._moved = [], [], [], False

    def clear(self) -> None:
        """Forget all contents."""
        for tensor in (*self._keys, *self._values):
            tensor.zero_()
        self._origins, self._moved = [], False

    def clear_rows(self, rows: SequenceOf[int]) -> None:
        """Forget the contents of some rows."""
        for tensor in (*self._keys, *self._values):
            tensor[torch.tensor(rows, device=self._device)] = 0

    def swap(self, left: int, right: int) -> None:
        """Note that two rows trade places; a row may be one that the next :meth:`resize` makes."""
        self._origins.extend(range(len(self._origins), max(left, right) + 1))
        origins = self._origins
        origins[left], origins[right] = origins[right], origins[left]
        self._moved = True

    def flush(self, lengths: SequenceOf[int]) -> None:
        """Carry out the noted swaps; ``lengths[row]`` tokens of each row (as it is after them) are worth moving."""
        if not self._moved:
            return
        targets = [row for row, origin in enumerate(self._origins) if origin != row and lengths[row] > 0]
        if targets:
            sources = [self._origins[row] for row in targets]
            self.copy(sources, targets, max(lengths[row] for row in targets))
        self._origins, self._moved = [], False

    def copy(self, sources: SequenceOf[int], targets: SequenceOf[int], length: int) -> None:
        """Copy the first ``length`` tokens between rows, all at once."""
        source_R = torch.tensor(sources, device=self._device)
        target_R = torch.tensor(targets, device=self._device)
        for tensor in (*self._keys, *self._values):
            tensor[target_R, :, :length] = tensor[source_R, :, :length]

    def write(self, layer: int, rows_N: torch.Tensor, positions_N: torch.Tensor, keys_NHD: torch.Tensor,
              values_NHD: torch.Tensor) -> None:  # fmt: skip
        # Under autocast a model can give float32 keys, from their norm, and bfloat16 values.
        keys, values = self._keys[layer], self._values[layer]
        keys[rows_N, :, positions_N] = keys_NHD.to(keys.dtype)
        values[rows_N, :, positions_N] = values_NHD.to(values.dtype)

    def read(self, layer: int, first_row: int, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views ``[rows, H, length, D]``."""
        window = slice(first_row, first_row + rows)
        return self._keys[layer][window, :, :length], self._values[layer][window, :, :length]

    def row(self, row: int, layer: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one row ``[H, length, D]``, whose data may not have been moved yet."""
        place = self._origins[row] if row < len(self._origins) else row
        return self._keys[layer][place, :, :length], self._values[layer][place, :, :length]

    def windows(self, rows: int, length: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values of every layer as views ``[rows, H, length, D]`` of the first rows."""
        return (
            [keys[:rows, :, :length] for keys in self._keys],
            [values[:rows, :, :length] for values in self._values],
        )


class ForwardCache(Cache):  # type: ignore[misc]  # transformers has no complete types
    """What a model's forward sees: it writes the new tokens of a run of rows and attends to the rows' first tokens.

    Args:
        rows_N, positions_N: where each new token goes; its index among the forward's tokens is in ``tokens_N``
            (row-major over ``[rows, T]``), None where no token is padding.
        length: how many tokens of each row are attended to; the mask hides what a row doesn't have.
    """

    def __init__(self, store: KVCache, first_row: int, rows: int, length: int, rows_N: torch.Tensor,
                 positions_N: torch.Tensor, tokens_N: torch.Tensor | None) -> None:  # fmt: skip
        super().__init__(layers=[])
        self._store = store
        self._window = (first_row, rows, length)
        self._rows_N = rows_N
        self._positions_N = positions_N
        self._tokens_N = tokens_N

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object,
               **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        self._store.write(
            layer_idx, self._rows_N, self._positions_N, self._tokens(key_states), self._tokens(value_states)
        )
        return self._store.read(layer_idx, *self._window)

    def _tokens(self, states_BHTD: torch.Tensor) -> torch.Tensor:
        states_NHD = states_BHTD.transpose(1, 2).flatten(0, 1)
        return states_NHD if self._tokens_N is None else states_NHD[self._tokens_N]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._window[2]


class ProbeCache(Cache):  # type: ignore[misc]  # transformers has no complete types
    """Learns from one forward what each layer stores."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, LayerShape] = {}
        self.dtype: torch.dtype | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object,
               **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        self.shapes[layer_idx] = LayerShape(key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
        self.dtype = key_states.dtype
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def layers_in_order(self) -> Iterable[LayerShape]:
        return (self.shapes[layer] for layer in sorted(self.shapes))
