"""What the parts of `make gpu` share: shapes of models, their configuration, a worker and a batch, memory."""

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from agentrl_core.config import load_config
from agentrl_core.protocol import DataProto
from agentrl_core.workers.actor import ActorWorker
from agentrl_testing.tiny_model import save_tiny_model

PROMPT_TOKENS = 64
VOCABULARY = 151_936
"""Of Qwen's models."""
GIB = 2**30
BUCKET_BYTES = 64 << 20
"""Of weights on their way; a tensor that is larger has its own."""
REWARD = """
import random


def score(trajectory):
    return random.random()
"""


@dataclass(frozen=True)
class Shape:
    """Model and batch of a run.

    Args:
        model: fields of ``Qwen3Config``.
        tokens: of a row, prompt and response together.
        prompts: of a step, with ``samples`` rows each.
    """

    model: dict[str, int]
    tokens: int
    prompts: int
    samples: int
    micro_batch_tokens: int


QWEN3_06B = {
    "vocab_size": VOCABULARY, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
"""Of Qwen3-0.6B: 596 million parameters, a quarter of them in the embedding."""
FULL = Shape(QWEN3_06B, tokens=2048, prompts=4, samples=4, micro_batch_tokens=8192)
SHALLOW = Shape(QWEN3_06B | {"num_hidden_layers": 4}, tokens=512, prompts=4, samples=4, micro_batch_tokens=4096)
"""Four of its layers: 219 million parameters, for parts that compare results and load the model several times."""
TINY = Shape({"vocab_size": 1000}, tokens=96, prompts=2, samples=2, micro_batch_tokens=512)


def write_run(folder: Path, shape: Shape, device: str, changes: dict[str, Any] | None = None) -> Path:
    """The configuration of a run, with its model, data and reward, in ``folder``.

    Args:
        changes: sections of the configuration, merged key by key into those that are here.
    """
    if not (folder / "model").exists():
        save_tiny_model(folder / "model", max_position_embeddings=4096, **shape.model)
    (folder / "rewards.py").write_text(REWARD, encoding="utf-8")
    row = {"prompt": [{"role": "user", "content": "?" * (PROMPT_TOKENS // 2)}], "reward_model": {"ground_truth": ""}}
    (folder / "train.jsonl").write_text((json.dumps(row) + "\n") * shape.prompts, encoding="utf-8")
    config: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"train_files": ["train.jsonl"], "batch_size": shape.prompts, "max_prompt_length": PROMPT_TOKENS},
        "rollout": {
            "engine": "hf",
            "agent": {"loops": ["single_turn"]},
            "n": shape.samples,
            "max_response_length": shape.tokens - PROMPT_TOKENS,
        },
        "reward": {"functions": [{"name": "./rewards.py:score", "isolation": "inline"}]},
        "actor": {"micro_batch_tokens": shape.micro_batch_tokens},
        "trainer": {"trackers": ["jsonl"], "checkpoint": {"interval": 0}},
        "cluster": {"device": device},
    }
    for section, values in (changes or {}).items():
        config[section] |= values
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


@dataclass
class Memory:
    """What this process holds of a device. Without CUDA every figure is None."""

    device: torch.device
    _floor: int = field(default=0, init=False)

    def settle(self) -> None:
        """Wait for the device and forget what nobody refers to; peaks are counted from here."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            self._floor = torch.cuda.memory_allocated(self.device)

    @property
    def held(self) -> float | None:
        """[GiB] in tensors."""
        return torch.cuda.memory_allocated(self.device) / GIB if self.device.type == "cuda" else None

    @property
    def reserved(self) -> float | None:
        """[GiB] that other processes cannot have: tensors, and what the allocator keeps of those before."""
        return torch.cuda.memory_reserved(self.device) / GIB if self.device.type == "cuda" else None

    @property
    def growth(self) -> float | None:
        """[GiB] in tensors at the peak since :meth:`settle`, above what there was then."""
        if self.device.type != "cuda":
            return None
        return (torch.cuda.max_memory_allocated(self.device) - self._floor) / GIB


@dataclass(frozen=True)
class Bench:
    """Where a check computes, on what.

    Args:
        device: ``cuda`` or ``cpu``.
        folder: for models and whatever else it writes.
    """

    device: torch.device
    shape: Shape
    folder: Path

    @property
    def memory(self) -> Memory:
        return Memory(self.device)

    @property
    def model_path(self) -> Path:
        return self.folder / "model"

    def config(self, *overrides: str) -> Any:
        """The configuration of a run with these keys changed."""
        path = write_run(self.folder, self.shape, self.device.type)
        # Of the runtime in which workers may offload; no cluster is started.
        return load_config(path, ["cluster.runtime=ray", *overrides])

    @contextmanager
    def actor(self, *overrides: str) -> Iterator[ActorWorker]:
        """The policy's worker in this process, as one process of its own; its memory is free again afterwards."""
        worker = ActorWorker(self.config(*overrides), total_optimizer_steps=10)
        try:
            worker.init_model()
            yield worker
        finally:
            worker.close()
            # Frames of the caller's generator may still refer to the worker: what is large goes now.
            vars(worker).clear()
            self.memory.settle()

    def batch(self, seed: int = 0) -> DataProto:
        """Rows of random tokens with log-probs and advantages, several responses of all lengths to each prompt."""
        generator = torch.Generator().manual_seed(seed)
        shape, vocabulary = self.shape, self.shape.model.get("vocab_size", 256)
        rows, prompt, response = shape.prompts * shape.samples, PROMPT_TOKENS // 2, shape.tokens - PROMPT_TOKENS // 2

        def ids(*size: int) -> torch.Tensor:
            return torch.randint(1, vocabulary, size, generator=generator)

        lengths_B = torch.randint(response // 4, response + 1, (rows,), generator=generator)
        lengths_B[0] = response
        mask_BR = torch.arange(response) < lengths_B.unsqueeze(-1)
        # Prompts are padded on their left, the first one is not.
        starts_B = (torch.arange(shape.prompts) * 3 % prompt).repeat_interleave(shape.samples)
        asked_BP = torch.arange(prompt) >= starts_B.unsqueeze(-1)
        prompts_BP = ids(shape.prompts, prompt).repeat_interleave(shape.samples, 0) * asked_BP
        responses_BR = ids(rows, response) * mask_BR
        attention_BL = torch.cat([asked_BP, mask_BR], 1).long()
        tensors = {
            "prompts": prompts_BP,
            "responses": responses_BR,
            "response_mask": mask_BR,
            "input_ids": torch.cat([prompts_BP, responses_BR], 1),
            "attention_mask": attention_BL,
            "position_ids": (attention_BL.cumsum(-1) - 1).clamp(min=0),
            "advantages": torch.randn(rows, 1, generator=generator) * mask_BR,
        }
        return DataProto.from_dict(tensors=tensors, meta_info={"temperature": 1.0, "seed": seed})


def largest(values: Sequence[torch.Tensor] | torch.Tensor) -> float:
    """The largest magnitude."""
    return max(float(each.detach().abs().max()) for each in values if each.numel())
