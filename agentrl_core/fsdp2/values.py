"""A language model's backbone with a value head.

Shapes: b rows, r response tokens of a micro-batch, n of its response tokens, H hidden size.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from agentrl_core.api.errors import ConfigError
from agentrl_core.api.training_backend import MicroBatch
from agentrl_core.fsdp2.media import Media
from agentrl_core.fsdp2.packed_attention import forward_pass
from agentrl_core.fsdp2.split import WHOLE, Split

VALUE_HEAD_FILE = "value_head.safetensors"


class ValueModel(nn.Module):
    """A language model's backbone with a linear value head, which starts at 0: a new critic has no opinion."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = nn.Linear(backbone.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(
        self, micro: MicroBatch, media: Media | None = None, with_head: bool = True, split: Split = WHOLE
    ) -> tuple[Tensor, Tensor]:
        """Values [n] float32, or hidden states [n, H], and the places [b, r] of these n response tokens.

        The value at token t is read where t is predicted, before it is sampled. Where rows are packed the n tokens are
        the sampled ones, else all.
        """
        rows = forward_pass(self.backbone, micro, media, split)
        hidden_nH = rows.predicting_states(self.backbone(**rows.inputs, use_cache=False).last_hidden_state)
        return rows.own(self.value_head(hidden_nH.float()).squeeze(-1) if with_head else hidden_nH), rows.places

    def load_head(self, path: str, key: str) -> None:
        """Take over the value head of a critic's checkpoint, if the directory is one.

        Raises:
            ConfigError: it is that of another model.
        """
        file = Path(path) / VALUE_HEAD_FILE
        if file.exists():
            try:
                self.value_head.load_state_dict(load_file(file))
            except (OSError, RuntimeError, SafetensorError) as error:
                raise ConfigError(f"{key}: {file} is not the value head of this model: {error}") from error


def empty_value_model(backbone: Any) -> ValueModel:
    """Without weights, on torch's meta device."""
    with torch.device("meta"):
        return ValueModel(backbone)
