"""The same computation by transformers and torch alone, in one process."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

PROMPT, RESPONSE, VOCABULARY = 7, 6, 63
LR, NORM, BETAS, DECAY = 3e-4, 0.5, (0.9, 0.999), 0.1
TEMPERATURE, ENTROPY = 1.3, 0.05
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def make_model(kind: str, path: Path) -> str:
    """A tiny model with random weights, biases and norms included."""
    torch.manual_seed(7)
    tied = kind.endswith("-tied")
    config: Any
    match kind.removesuffix("-tied"):
        case "qwen2":
            config = Qwen2Config(**SIZES, tie_word_embeddings=tied)
        case "qwen3":
            config = Qwen3Config(**SIZES, tie_word_embeddings=tied)
        case "llama":
            config = LlamaConfig(**SIZES, tie_word_embeddings=tied, rope_parameters=LLAMA3)
        case "qwen3_moe":
            config = Qwen3MoeConfig(
                **SIZES, tie_word_embeddings=tied, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                norm_topk_prob=True, router_aux_loss_coef=0.0, mlp_only_layers=[1],
            )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return str(path)


def make_rows(count: int = 6) -> dict[str, Tensor]:
    """Rows of different lengths: prompts padded on the left, responses on the right, some tokens not sampled."""
    generator = torch.Generator().manual_seed(3)
    width = PROMPT + RESPONSE
    ids = torch.randint(0, VOCABULARY, (count, width), generator=generator)
    mask = torch.zeros(count, width, dtype=torch.long)
    response_mask = torch.zeros(count, RESPONSE, dtype=torch.bool)
    for row in range(count):
        before, behind = row % PROMPT, row % (RESPONSE - 1)
        mask[row, before : width - behind] = 1
        response_mask[row, : RESPONSE - behind] = True
        response_mask[row, 1] = row % 2 == 0
    return {
        "input_ids": ids * mask, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "responses": (ids * mask)[:, PROMPT:], "response_mask": response_mask,
        "advantages": torch.randn(count, RESPONSE, generator=generator),
    }  # fmt: skip


def loss_of(log_probs: Tensor, entropies: Tensor, rows: dict[str, Tensor], tokens: int) -> Tensor:
    """Divided by the sampled tokens of all rows, whatever part these are."""
    terms = log_probs * rows["advantages"] + ENTROPY * entropies
    return -torch.where(rows["response_mask"], terms, 0.0).sum() / tokens


def outputs_of(model: Any, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [b, r], of whole rows of logits."""
    names = ("input_ids", "attention_mask", "position_ids")
    logits = model(**{name: rows[name] for name in names}).logits[:, PROMPT - 1 : -1].float() / TEMPERATURE
    logs = logits.log_softmax(-1)
    chosen = logs.gather(-1, rows["responses"].unsqueeze(-1)).squeeze(-1)
    return chosen, -(logs.exp() * logs).sum(-1)


def trained(path: str, steps: int, decay: float = DECAY) -> dict[str, Any]:
    """Log-probs and entropies before, norms of each step; the first gradients and the weights in the end as files.

    Both have the names of the hub: ``PATH-gradients`` and ``PATH-N-steps``.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    rows = make_rows()
    tokens = int(rows["response_mask"].sum())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=decay)
    with torch.no_grad():
        log_probs, entropies = outputs_of(model, rows)
    found: dict[str, Any] = {"log_probs": log_probs, "entropies": entropies, "norms": []}
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(*outputs_of(model, rows), rows, tokens).backward()
        if step == 0:
            _save_gradients(model, f"{path}-gradients")
        found["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)))
        optimizer.step()
    model.save_pretrained(f"{path}-{steps}-steps")
    return found


def _save_gradients(model: Any, path: str) -> None:
    """As if they were the weights: saving renames what transformers keeps in another form."""
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
        model.save_pretrained(path)
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)
