"""Rows of micro-batches as data of the API, and the server's log-probabilities as tensors.

Shapes: b rows, p prompt and r response tokens of a micro-batch; N predictions of a row, one for each token but the
first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from agentrl_backend_tinker.messages import Array, Datum
from agentrl_core.api.errors import WorkerError
from agentrl_core.api.training_backend import MicroBatch


@dataclass(frozen=True)
class Row:
    """A row with sampled tokens.

    Args:
        micro, row: its place.
        ids: [N+1] int32.
        response: [r] where each of its response tokens is among the N predictions; -1: nowhere, or not sampled.
    """

    micro: int
    row: int
    ids: Array
    response: Array

    def datum(self, weights_r: Array | None = None) -> Datum:
        """With weights of its response tokens, or none."""
        weights = np.zeros(len(self.ids) - 1, np.float32)
        if weights_r is not None:
            seen = self.response >= 0
            weights[self.response[seen]] = weights_r[seen]
        return Datum(self.ids, weights)


def rows_of(micros: Sequence[MicroBatch]) -> list[Row]:
    """The rows with sampled tokens; of the others nothing is read.

    Raises:
        WorkerError: a row has gaps, or positions of its own: the API has sequences from the first token on.
    """
    return [row for number, micro in enumerate(micros) for row in _rows(number, micro)]


def _rows(number: int, micro: MicroBatch) -> list[Row]:
    attended_bl = micro["attention_mask"].bool().cpu().numpy()
    ids_bl, positions_bl = micro["input_ids"].cpu().numpy(), micro["position_ids"].cpu().numpy()
    mask_br = micro["response_mask"].bool().cpu().numpy()
    prompt = ids_bl.shape[1] - mask_br.shape[1]
    found = []
    for row in np.flatnonzero(mask_br.any(1)):
        places = np.flatnonzero(attended_bl[row])
        if not np.array_equal(positions_bl[row][places], np.arange(len(places))):
            raise WorkerError(
                f"row {int(micro.rows[row])} of the batch has positions that are not 0, 1, 2, …; servers of the Tinker "
                "API compute sequences from their first token on"
            )
        # The token at place i is prediction i-1 of the row.
        order = np.full(attended_bl.shape[1], -1)
        order[places] = np.arange(-1, len(places) - 1)
        response = np.where(mask_br[row], order[prompt:], -1)
        found.append(Row(number, int(row), ids_bl[row][places].astype(np.int32), response))
    return found


def log_probs_of(micros: Sequence[MicroBatch], rows: Sequence[Row], found: Sequence[Array]) -> list[Tensor]:
    """[b, r] float32 of each micro-batch; 0 where no token was sampled."""
    results = [torch.zeros(micro["response_mask"].shape) for micro in micros]
    for row, log_probs_N in zip(rows, found, strict=True):
        seen = row.response >= 0
        results[row.micro][row.row, torch.from_numpy(seen)] = torch.from_numpy(log_probs_N[row.response[seen]].copy())
    return results
