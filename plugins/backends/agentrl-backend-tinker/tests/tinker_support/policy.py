"""Micro-batches, a loss, and the same model trained by PEFT and torch in this process."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentrl_core.api.training_backend import MicroBatch, Outputs

LR, MAX_NORM = 0.01, 0.5


def micro_batch(rows: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]], first: int = 0) -> MicroBatch:
    """Rows of prompt ids, response ids and response mask; prompts padded on the left, responses on the right."""
    p, r = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    b = len(rows)
    ids, attention = torch.zeros(b, p + r, dtype=torch.long), torch.zeros(b, p + r, dtype=torch.long)
    positions, mask = torch.zeros(b, p + r, dtype=torch.long), torch.zeros(b, r, dtype=torch.bool)
    for index, (prompt, response, sampled) in enumerate(rows):
        start, end = p - len(prompt), p + len(response)
        ids[index, start:end] = torch.tensor([*prompt, *response])
        attention[index, start:end] = 1
        positions[index, start:end] = torch.arange(end - start)
        mask[index, : len(response)] = torch.tensor(sampled, dtype=torch.bool)
    columns = {
        "input_ids": ids, "attention_mask": attention, "position_ids": positions, "responses": ids[:, p:],
        "response_mask": mask,
    }  # fmt: skip
    return MicroBatch(torch.arange(first, first + b), columns)


def batch(seed: int) -> list[MicroBatch]:
    """Two micro-batches of ragged rows with tokens of tools among them, and a row without a sampled token."""
    generator = torch.Generator().manual_seed(seed)

    def row(prompt: int, response: int, mask: Sequence[int] | None = None) -> Any:
        ids = torch.randint(5, 250, (prompt + response,), generator=generator).tolist()
        return ids[:prompt], ids[prompt:], mask or [1] * response

    first = [row(5, 4), row(3, 7, [1, 1, 0, 0, 1, 1, 1]), row(8, 2)]
    return [micro_batch(first), micro_batch([row(6, 5), row(2, 3, [0, 0, 0])], len(first))]


def loss_of(micro: MicroBatch, outputs: Outputs, seed: int) -> Tensor:
    """A clipped ratio and a squared term: no loss that a server knows."""
    log_probs_br = outputs.log_probs
    assert log_probs_br is not None
    generator = torch.Generator().manual_seed(seed + int(micro.rows[0]))
    advantages_br = torch.randn(log_probs_br.shape, generator=generator)
    ratio_br = torch.exp(log_probs_br - log_probs_br.detach() + 0.1 * advantages_br)
    losses_br = -torch.minimum(ratio_br * advantages_br, ratio_br.clamp(0.8, 1.2) * advantages_br)
    losses_br = losses_br + 0.01 * log_probs_br**2
    return torch.where(micro["response_mask"], losses_br, 0.0).sum() / 7.0


class Reference:
    """PEFT's LoRA on all linear layers but the output's, and torch's AdamW."""

    def __init__(self, path: str, rank: int, weights: Mapping[str, Tensor] | None = None) -> None:
        base = AutoModelForCausalLM.from_pretrained(path).eval()
        names = sorted(
            {name.rpartition(".")[2] for name, part in base.named_modules() if isinstance(part, torch.nn.Linear)}
            - {"lm_head"}
        )
        self.model: Any = get_peft_model(base, LoraConfig(r=rank, lora_alpha=32, target_modules=names, bias="none"))
        if weights is not None:
            found = set_peft_model_state_dict(self.model, dict(weights))
            assert not found.unexpected_keys
        self.parameters = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, betas=(0.9, 0.95), weight_decay=0.01)

    def log_probs(self, micro: MicroBatch) -> Tensor:
        """[b, r], row by row, without padding."""
        r = micro["response_mask"].shape[1]
        found = []
        for row in range(len(micro.rows)):
            attended = micro["attention_mask"][row].bool()
            ids = micro["input_ids"][row][attended]
            logits = self.model(input_ids=ids[None]).logits[0]
            own = torch.log_softmax(logits[:-1].float(), -1).gather(1, ids[1:, None]).squeeze(1)
            count = int(attended[-r:].sum())
            found.append(torch.nn.functional.pad(own[-count:], (0, r - count)))
        return torch.stack(found)

    def step(self, micros: Sequence[MicroBatch], seed: int, max_norm: float = MAX_NORM) -> float:
        for micro in micros:
            loss_of(micro, Outputs(log_probs=self.log_probs(micro)), seed).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, max_norm)
        self.optimizer.param_groups[0]["lr"] = LR
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in get_peft_model_state_dict(self.model).items()}


def train(backend: Any, steps: int, first: int = 0) -> list[float]:
    """Steps of a backend; returns the norms of their gradients."""
    from agentrl_core.api.training_backend import Wanted

    norms = []
    for seed in range(first, first + steps):
        micros = batch(seed)

        def loss(number: int, outputs: Outputs, micros: Any = micros, seed: int = seed) -> Tensor:
            return loss_of(micros[number], outputs, seed)

        backend.zero_grad()
        backend.forward_backward(micros, Wanted(), loss)
        norms.append(backend.optimizer_step(LR, MAX_NORM))
        backend.steps += 1
    return norms


def saved_at(server: Any, path: str) -> dict[str, Tensor]:
    """The adapter that a server has saved under a path, from its folder of states."""
    import json

    from safetensors.torch import load_file

    run, kind, name = path.removeprefix("tinker://").split("/")
    (entry,) = server.state.glob(f"*/{run}/{kind}/{name}.json")
    return load_file(entry.parent / json.loads(entry.read_text())["folder"] / "adapter_model.safetensors")
