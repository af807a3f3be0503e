"""A model as Hugging Face files: what `agentrl export` copies and transformers loads."""

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from agentrl_core.workers.models import quiet_progress
from agentrl_core.workers.weights import ModelWeights

FILE_BYTES = 4 << 30
"""Of one safetensors file; a model that is larger gets several and an index."""


def save_model(model: Any, path: str, file_bytes: int = FILE_BYTES) -> None:
    """Config and safetensors in Hugging Face layout, in the weights' own dtype.

    Where the model is sharded all ranks must call this; rank 0 writes one file after the other.
    """
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        with quiet_progress():
            model.save_pretrained(path)
        return
    folder, is_first = Path(path), dist.get_rank() == 0
    if is_first:
        folder.mkdir(parents=True, exist_ok=True)
        model.config.save_pretrained(path)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(path)
    weights = ModelWeights(model)
    count, total = len(weights.layout(file_bytes)), 0
    files: dict[str, str] = {}
    for number, tensors in enumerate(weights.buckets(file_bytes), 1):
        if is_first:
            file = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(whole, folder / file, metadata={"format": "pt"})
            files.update(dict.fromkeys(whole, file))
            total += sum(tensor.nbytes for tensor in whole.values())
    if is_first and count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
