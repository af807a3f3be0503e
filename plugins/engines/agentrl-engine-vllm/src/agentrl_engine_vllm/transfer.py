"""New weights from safetensors files, in each of vLLM's worker processes."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing: there is no rendezvous."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Args:
    files: safetensors files on this host. They may change once the update is finished.
    """

    files: list[str]


class FileTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Maps the files and loads what this worker's shard of the model needs of them.

    Layers are put back into the form that checkpoints have before, and into the one that kernels need after: on a CPU
    linear layers are packed, and nothing can be loaded into them as they are.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        return None

    def start_weight_update(self) -> None:
        # It warns of every layer that gets nothing. Whether all weights came was checked before; the others have none.
        logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class waits for an accelerator, which need not exist.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.model.load_weights(self._tensors(update_info.files))

    def _tensors(self, files: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for path in files:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    yield name, file.get_tensor(name)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            self._pack_tied_output_layers()

    def _pack_tied_output_layers(self) -> None:
        # One that shares the embedding's tensor got no weights of its own, and would keep its old packed copy.
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        return None
