"""A training backend that is made for its contract, on one rank or several, and plain PyTorch that does the same.

Shapes: b rows, p prompt and r response tokens of a micro-batch; B rows of the example, r_B tokens of each response.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.core_model_loading import revert_weight_conversion

from agentrl_core.api import MicroBatch, Outputs, TrainingBackend, TrainingContext, Wanted
from agentrl_core.config.schema import ActorConfig, CriticConfig, ModelConfig, OptimizerConfig
from agentrl_testing.contracts.case import PluginCase

VOCAB = 64
LR = 1e-3
ROWS = [([3 + (7 * row + column) % 50 for column in range(2 + row % 3)], [5 + (11 * row + 3 * column) % 55
         for column in range(3 + (5 * row) % 4)]) for row in range(8)]  # fmt: skip
"""Prompt and response of each row; the responses' second tokens were not sampled."""
WANTED = Wanted(entropies="gradient")


@dataclass(kw_only=True)
class TrainingBackendCase(PluginCase):
    """A training backend under test.

    Args:
        context: fields of :class:`TrainingContext` that differ.
        tie_word_embeddings: of the model.
        experts: of each of the model's layers, of which a token goes to two; 0: a dense model.
        tolerance: largest gap to plain PyTorch in float32.
        ranks: numbers of ranks on which it is tried, if it declares the capability.
    """

    context: Mapping[str, Any] = field(default_factory=dict)
    tie_word_embeddings: bool = True
    experts: int = 0
    tolerance: float = 1e-5
    ranks: Sequence[int] = (2,)

    @property
    def path(self) -> str:
        """Directory of the model."""
        return model_path(self.tie_word_embeddings, self.experts)

    def made(self, path: str, head: Any = "tokens", trains: bool = True, rank: int = 0, size: int = 1) -> Any:
        """A backend that has loaded the model of a directory."""
        settings_of: Any = ActorConfig if head == "tokens" else CriticConfig
        settings = settings_of(optimizer=OptimizerConfig(lr=LR, weight_decay=0.1), micro_batch_tokens=64)
        role = "actor" if head == "tokens" else "critic"
        context = TrainingContext(
            role, head, trains, path, "model.path", ModelConfig(path), settings,
            rank=rank, world_size=size, longest=12,
        )  # fmt: skip
        backend = self.build(replace(context, **self.context))
        backend.load()
        return backend


@cache
def model_path(tied: bool, experts: int = 0, layers: int = 2) -> str:
    """A Qwen3 or Qwen3-MoE whose distributions are far from uniform."""
    path = tempfile.mkdtemp(prefix="agentrl-backend-")
    sizes: dict[str, Any] = dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=tied,
        initializer_range=0.2, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if experts:
            config = Qwen3MoeConfig(
                **sizes, num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
            )
            Qwen3MoeForCausalLM(config).save_pretrained(path)
        else:
            Qwen3ForCausalLM(Qwen3Config(**sizes)).save_pretrained(path)
    return path


def micro_batch(rows: Sequence[int]) -> MicroBatch:
    """These rows of the example, prompts padded on the left and responses on the right, with one more place."""
    p, r = (max(len(ROWS[row][part]) for row in rows) + part for part in (0, 1))
    ids_bl, attention_bl = torch.zeros(len(rows), p + r, dtype=torch.long), torch.zeros(len(rows), p + r).long()
    mask_br = torch.zeros(len(rows), r, dtype=torch.bool)
    for place, row in enumerate(rows):
        prompt, response = ROWS[row]
        start = p - len(prompt)
        ids_bl[place, start : p + len(response)] = torch.tensor([*prompt, *response])
        attention_bl[place, start : p + len(response)] = 1
        mask_br[place, : len(response)] = True
        mask_br[place, 1] = False
    columns = {
        "input_ids": ids_bl, "attention_mask": attention_bl,
        "position_ids": (attention_bl.cumsum(-1) - 1).clamp(min=0), "responses": ids_bl[:, p:],
        "response_mask": mask_br,
    }  # fmt: skip
    return MicroBatch(torch.tensor(rows), columns)


def coefficients(row: int, width: int, step: int) -> Tensor:
    """[width] what each token's log-prob is multiplied by in the example's loss; some are negative."""
    places = torch.arange(width, dtype=torch.float32)
    return torch.sin(places * 1.7 + row * 0.9 + step * 2.3) / len(ROWS)


def loss_of(step: int, micros: Sequence[MicroBatch], has_entropies: bool) -> Callable[[int, Outputs], Tensor]:
    """The example's loss: a sum over sampled tokens, divided by the number of rows."""

    def loss(number: int, outputs: Outputs) -> Tensor:
        micro = micros[number]
        mask_br = micro["response_mask"]
        factors_br = torch.stack([coefficients(int(row), mask_br.shape[1], step) for row in micro.rows])
        terms = outputs.values if outputs.values is not None else outputs.log_probs
        assert terms is not None and terms.shape == mask_br.shape, "outputs are [b, r]"
        terms = torch.where(mask_br, terms, 0.0) * factors_br.to(terms.device)
        if outputs.entropies is not None and has_entropies:
            terms = terms - torch.where(mask_br, outputs.entropies, 0.0) * 0.05 / len(ROWS)
        return terms.sum()

    return loss


class Plain(nn.Module):
    """The same in plain PyTorch, row by row."""

    def __init__(self, path: str, head: str, has_entropies: bool) -> None:
        super().__init__()
        self.head, self.has_entropies = head, has_entropies
        kind: Any = AutoModelForCausalLM if head == "tokens" else AutoModel
        self.model = kind.from_pretrained(path).eval()
        self.value_head = nn.Linear(self.model.config.hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        if head == "tokens":
            self.value_head.requires_grad_(False)
        trained = [each for each in self.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.1)
        self.tiny: dict[str, Tensor] = {}
        """Where a gradient was so small that its sign is rounding, which AdamW makes a step of."""

    def row(self, number: int, temperature: float = 1.0) -> Outputs:
        """[1, r] of one row of the example, without padding."""
        prompt, response = ROWS[number]
        outputs = self.model(torch.tensor([[*prompt, *response]]), use_cache=False)
        if self.head == "values":
            states = outputs.last_hidden_state[:, len(prompt) - 1 : -1]
            return Outputs(values=self.value_head(states).squeeze(-1))
        log_probs_rV = torch.log_softmax(outputs.logits[0, len(prompt) - 1 : -1] / temperature, -1)
        log_probs_r = log_probs_rV[torch.arange(len(response)), torch.tensor(response)]
        return Outputs(log_probs_r[None], -(log_probs_rV.exp() * log_probs_rV).sum(-1)[None])

    def step(self, number: int, max_norm: float = 1e9) -> float:
        """One step on all rows; the norm of its gradient."""
        self.optimizer.zero_grad()
        for row in range(len(ROWS)):
            micro = micro_batch([row])
            width = len(ROWS[row][1])
            columns = {**micro.columns, "response_mask": micro["response_mask"][:, :width]}
            loss_of(number, [replace(micro, columns=columns)], self.has_entropies)(0, self.row(row)).backward()  # type: ignore[no-untyped-call]
        named = {name: each for name, each in self.named_parameters() if each.grad is not None}
        norm = float(
            torch.stack([each.grad.square().sum() for each in named.values() if each.grad is not None]).sum().sqrt()
        )
        for name, each in named.items():
            assert each.grad is not None
            small = each.grad.abs() < 1e-3 * each.grad.abs().max()
            self.tiny[name] = self.tiny.get(name, torch.zeros_like(small)) | small
            each.grad *= min(1.0, max_norm / (norm + 1e-6))
        self.optimizer.step()
        return norm

    def in_files(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors like the model's parameters, under the names and in the shapes that its files have."""
        own = {name.removeprefix("model."): each for name, each in tensors.items() if name.startswith("model.")}
        return dict(revert_weight_conversion(self.model, own))


@dataclass
class Trained:
    """What a backend has done: norms of its steps, its weights by name, and log-probs or values [r_B] of each row."""

    norms: list[float]
    weights: dict[str, Tensor]
    outputs: list[Tensor]
    steps: int = 0


def outputs_of(backend: TrainingBackend, rows: Sequence[int], wanted: Wanted = WANTED) -> dict[int, Outputs]:
    """[1, r] of each of these rows, by its number."""
    micros = [micro_batch(rows[start : start + 2]) for start in range(0, len(rows), 2)]
    found: dict[int, Outputs] = {}
    with torch.no_grad(), backend.on_device():
        for micro, outputs in zip(micros, backend.forward(micros, wanted), strict=True):
            for place, row in enumerate(micro.rows.tolist()):
                width = len(ROWS[row][1])
                parts = {name: None if value is None else value[place : place + 1, :width].float().cpu()
                         for name, value in vars(outputs).items()}  # fmt: skip
                found[row] = Outputs(**parts)
    return found


def gathered(backend: TrainingBackend) -> dict[str, Tensor]:
    """All weights, by name."""
    found: dict[str, Tensor] = {}
    with backend.sending():
        for bucket in backend.weights(2000):
            found |= {name: tensor.clone() for name, tensor in bucket.items()}
    return found


def take_steps(
    backend: TrainingBackend, steps: Sequence[int], size: int = 2, max_norm: float = 1e9, has_entropies: bool = True
) -> list[float]:
    """Steps of the example's losses on this rank's rows, ``size`` of them in a micro-batch; the norms."""
    rows = list(range(len(ROWS)))[backend.share.index :: backend.share.count]
    micros = [micro_batch(rows[start : start + size]) for start in range(0, len(rows), size)]
    wanted = replace(WANTED, entropies="gradient" if has_entropies else "none")
    norms = []
    for step in steps:
        with backend.on_device(), backend.updating(step):
            backend.forward_backward(micros, wanted, loss_of(step, micros, has_entropies))
            norms.append(backend.optimizer_step(LR, max_norm))
            backend.steps += 1
    return norms


@contextmanager
def closing(backend: TrainingBackend) -> Iterator[TrainingBackend]:
    """Closes it at the end."""
    try:
        yield backend
    finally:
        backend.close()
