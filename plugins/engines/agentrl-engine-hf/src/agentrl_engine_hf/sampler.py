"""Sampling, vectorised over the batch.

Shapes: B rows of the batch, V vocabulary, F rows with min-p, top-k or top-p, A rows with penalties or biases.
"""

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch

from agentrl_engine_hf.sequence import Sequence

_MASK64 = 0xFFFFFFFFFFFFFFFF
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _splitmix64(values: "np.ndarray[Any, np.dtype[np.uint64]]") -> "np.ndarray[Any, np.dtype[np.uint64]]":
    """The output function of SplitMix64 (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def uniforms(seeds: SequenceOf[int], indices: SequenceOf[int]) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """One number in (0, 1) for each (seed, token index): a hash, so that no state is shared between requests."""
    keys = np.array([seed & _MASK64 for seed in seeds], dtype=np.uint64)
    counters = np.array(indices, dtype=np.uint64) + np.uint64(1)
    bits = _splitmix64(_splitmix64(keys + _GAMMA) + counters * _GAMMA) >> np.uint64(11)
    return (bits.astype(np.float64) + 0.5) * 2.0**-53


class Penalties:
    """The penalties and biases of those rows that have some."""

    def __init__(self, sequences: SequenceOf[Sequence], device: torch.device) -> None:
        self._rows = [i for i, each in enumerate(sequences) if each.params.reshaping.keys() - {"min_p"}]
        self._sequences = [sequences[i] for i in self._rows]
        self._device = device

        def column(name: str) -> torch.Tensor:
            values = [[getattr(each.params, name)] for each in self._sequences]
            return torch.tensor(values, dtype=torch.float32, device=device)

        self._presence_A1 = column("presence_penalty")
        self._frequency_A1 = column("frequency_penalty")
        self._repetition_A1 = column("repetition_penalty")
        self._sampled_AV: torch.Tensor | None = None

    def apply(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """The logits with penalties and biases. Called for each token in turn: it counts what was sampled."""
        if not self._rows:
            return logits_BV
        sampled_AV = self._count(logits_BV)
        logits_AV = logits_BV[self._rows] + self._bias_AV
        scaled_AV = torch.where(logits_AV > 0, logits_AV / self._repetition_A1, logits_AV * self._repetition_A1)
        logits_AV = torch.where(self._prompt_AV | (sampled_AV > 0), scaled_AV, logits_AV)
        logits_AV = logits_AV - self._frequency_A1 * sampled_AV - self._presence_A1 * (sampled_AV > 0)
        return logits_BV.index_copy(0, torch.tensor(self._rows, device=self._device), logits_AV)

    def _count(self, logits_BV: torch.Tensor) -> torch.Tensor:
        if self._sampled_AV is not None:
            last_A1 = torch.tensor([[each.ids[-1]] for each in self._sequences], device=self._device)
            return self._sampled_AV.scatter_add_(1, last_A1, torch.ones_like(self._repetition_A1))
        shape = (len(self._rows), logits_BV.shape[1])
        self._sampled_AV = torch.zeros(shape, device=self._device)
        self._bias_AV = torch.zeros(shape, device=self._device)
        self._prompt_AV = torch.zeros(shape, dtype=torch.bool, device=self._device)
        for row, each in enumerate(self._sequences):
            output = torch.tensor(each.ids[each.prompt_length :], dtype=torch.long, device=self._device)
            self._sampled_AV[row] += torch.bincount(output, minlength=shape[1])
            self._prompt_AV[row, each.ids[: each.prompt_length]] = True
            for token, bias in each.params.logit_bias.items():
                self._bias_AV[row, token] = bias
        return self._sampled_AV


class Sampler:
    """The sampling parameters of one composition of the batch, as tensors."""

    def __init__(
        self, sequences: SequenceOf[Sequence], device: torch.device, reserved_ids: SequenceOf[int] = ()
    ) -> None:
        self.sequences = list(sequences)
        self._reserved = torch.tensor(reserved_ids, dtype=torch.long, device=device) if reserved_ids else None
        params = [sequence.params for sequence in sequences]
        greedy = [param.temperature == 0 for param in params]
        temperatures = [1.0 if param.temperature == 0 else param.temperature for param in params]
        filtered = [
            i
            for i, param in enumerate(params)
            if not greedy[i] and (param.top_p < 1.0 or param.top_k > 0 or param.min_p > 0)
        ]
        self._penalties = Penalties(sequences, device)
        self._device = device
        self._seeds = [sequence.seed for sequence in sequences]
        self._all_greedy = all(greedy)
        self._greedy_B = torch.tensor(greedy, device=device) if any(greedy) else None
        self._temperature_B1 = None
        if any(temperature != 1.0 for temperature in temperatures):
            self._temperature_B1 = torch.tensor(temperatures, dtype=torch.float32, device=device).unsqueeze(1)
        self._filtered_F = torch.tensor(filtered, device=device) if filtered else None
        self._top_p_F1 = torch.tensor([[params[i].top_p] for i in filtered], dtype=torch.float64, device=device)
        self._min_p_F1 = torch.tensor([[params[i].min_p] for i in filtered], dtype=torch.float64, device=device)
        self._top_k_F1 = torch.tensor([[params[i].top_k or 2**31] for i in filtered], device=device)

    @torch.inference_mode()
    def sample(self, logits_BV: torch.Tensor) -> tuple[list[int], list[float]]:
        """Ids and log-probabilities, each [B]: of softmax(logits / temperature), penalized, before truncation."""
        logits_BV = self._penalties.apply(logits_BV.float())
        scaled_BV = logits_BV if self._temperature_B1 is None else logits_BV / self._temperature_B1
        if self._reserved is not None:
            return self._sample_others(logits_BV, scaled_BV, self._reserved)
        probs_BV = torch.softmax(scaled_BV, dim=-1)
        ids_B = logits_BV.argmax(dim=-1) if self._all_greedy else self._draw(logits_BV, probs_BV)
        # What was drawn is not so unlikely that the logarithm of its probability lost digits.
        chosen_B = probs_BV.gather(1, ids_B.unsqueeze(1)).squeeze(1).log_()
        return ids_B.tolist(), chosen_B.tolist()

    def _sample_others(self, logits_BV: torch.Tensor, scaled_BV: torch.Tensor, reserved: torch.Tensor
                       ) -> tuple[list[int], list[float]]:  # fmt: skip
        """No reserved id is drawn, whose probability counts all the same."""
        log_probs_BV = torch.log_softmax(scaled_BV, dim=-1)
        logits_BV = logits_BV.index_fill(1, reserved, -torch.inf)
        probs_BV = torch.softmax(scaled_BV.index_fill(1, reserved, -torch.inf), dim=-1)
        ids_B = logits_BV.argmax(dim=-1) if self._all_greedy else self._draw(logits_BV, probs_BV)
        return ids_B.tolist(), log_probs_BV.gather(1, ids_B.unsqueeze(1)).squeeze(1).tolist()

    def _draw(self, logits_BV: torch.Tensor, probs_BV: torch.Tensor) -> torch.Tensor:
        indices = [len(sequence.log_probs) for sequence in self.sequences]
        uniform_B1 = torch.from_numpy(uniforms(self._seeds, indices)).to(self._device).unsqueeze(1)
        ids_B = _inverse_cdf(probs_BV, uniform_B1)
        if self._filtered_F is not None:
            ids_B[self._filtered_F] = self._draw_filtered(probs_BV[self._filtered_F], uniform_B1[self._filtered_F])
        if self._greedy_B is not None:
            ids_B = torch.where(self._greedy_B, logits_BV.argmax(dim=-1), ids_B)
        return ids_B

    def _draw_filtered(self, probs_FV: torch.Tensor, uniform_F1: torch.Tensor) -> torch.Tensor:
        """Min-p and top-k, then the smallest set of what is left whose share reaches top-p (Holtzman et al., 2020)."""
        sorted_FV, order_FV = probs_FV.double().sort(dim=-1, descending=True, stable=True)
        ranks_V = torch.arange(sorted_FV.shape[1], device=sorted_FV.device)
        unlikely_FV = sorted_FV < self._min_p_F1 * sorted_FV[:, :1]
        sorted_FV = sorted_FV.masked_fill(unlikely_FV | (ranks_V >= self._top_k_F1), 0.0)
        before_FV = sorted_FV.cumsum(dim=-1) - sorted_FV
        nucleus_F1 = self._top_p_F1 * sorted_FV.sum(dim=-1, keepdim=True)
        outside_FV = (before_FV >= nucleus_F1) & (self._top_p_F1 < 1.0)
        # The likeliest token is always in: rounding must not empty the set.
        outside_FV[:, 0] = False
        ranks_F = _inverse_cdf(sorted_FV.masked_fill(outside_FV, 0.0), uniform_F1)
        return order_FV.gather(1, ranks_F.unsqueeze(1)).squeeze(1)


def _inverse_cdf(weights_BV: torch.Tensor, uniform_B1: torch.Tensor) -> torch.Tensor:
    """The first index at which the cumulative weight exceeds ``uniform`` x the total; its own weight is positive."""
    cumulative_BV = weights_BV.cumsum(dim=-1, dtype=torch.float64)
    target_B1 = uniform_B1 * cumulative_BV[:, -1:]
    ids_B = torch.searchsorted(cumulative_BV, target_B1, right=True).squeeze(1)
    return ids_B.clamp_(max=weights_BV.shape[1] - 1)


def mix(*numbers: int) -> int:
    """One 64-bit seed from several numbers."""
    seed = 0
    for number in numbers:
        seed = int(_splitmix64(np.array([(seed + number) & _MASK64], dtype=np.uint64) + _GAMMA)[0])
    return seed
