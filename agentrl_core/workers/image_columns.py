"""The images of a batch's rows as a tensor column, from which everything about them follows without a table.

Shapes: B rows of a batch, M images of the row with the most; l tokens of a row. An image is four numbers: two of the
hash in its name, one of its size and kind, one of the tokens that its features replace: how many, and their id.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl_core.api.training_backend import IMAGES
from agentrl_core.engine_kit.media import Size, size_of
from agentrl_core.protocol import DataProto

_KINDS = "png", "jpeg"
_UNKNOWN = 0xFFFFFFFF
"""In place of a token's id, where no processor is at hand."""
Array = np.ndarray[Any, Any]


def image_column(rows: Sequence[Sequence[str]], tokens: Callable[[Size], int], token: int) -> Tensor:
    """[B, M, 4] the column of rows that show these images, by name; -1 behind a row's last one.

    Args:
        tokens: how many tokens the features of an image of a size replace.
        token: id of those.
    """
    column_BM4 = np.full((len(rows), max(map(len, rows), default=0) or 1, 4), -1, np.int64)
    for row, names in enumerate(rows):
        for place, name in enumerate(names):
            size, kind = size_of(name), _KINDS.index(name.rpartition(".")[2])
            shape = size.width << 24 | size.height << 2 | kind
            column_BM4[row, place] = *np.frombuffer(bytes.fromhex(name[:32]), ">i8"), shape, tokens(size) << 32 | token
    return torch.from_numpy(column_BM4)


def images_to_share(batch: DataProto) -> dict[str, Tensor]:
    """The column of a batch on its way to the ranks, if it may have images: where no processor is at hand, rows with
    another first image begin with another token."""
    names = batch.non_tensor_batch.get(IMAGES)
    return {} if names is None else {IMAGES: image_column(list(names), lambda size: 0, _UNKNOWN)}


def image_name(image_4: Array) -> str:
    """The name of an image of the column."""
    shape = int(image_4[2])
    return f"{image_4[:2].astype('>i8').tobytes().hex()}-{shape >> 24}x{shape >> 2 & 0x3FFFFF}.{_KINDS[shape & 3]}"


def replaced_tokens(column_BM4: Tensor) -> Tensor:
    """[B] how many tokens the features of a row's images replace."""
    return torch.where(column_BM4[..., 2] < 0, 0, column_BM4[..., 3] >> 32).sum(-1)


def image_numbers(column_BM4: Tensor) -> Array:
    """[B, M] numbers that images share if and only if they are the same."""
    _, numbers = np.unique(column_BM4[..., :3].reshape(-1, 3).numpy(), axis=0, return_inverse=True)
    found: Array = numbers.reshape(column_BM4.shape[:2])
    return found


def at_features(ids_l: Array, images_M4: Array) -> tuple[Array, Array]:
    """The places of a row's tokens that features replace, and of which of its images they are."""
    shown = images_M4[images_M4[:, 2] >= 0]
    if not len(shown) or (token := shown[0, 3] & 0xFFFFFFFF) == _UNKNOWN:
        first = np.zeros(min(len(shown), len(ids_l), 1), np.int64)
        return first, first
    return np.flatnonzero(ids_l == token), np.repeat(np.arange(len(shown)), shown[:, 3] >> 32)
