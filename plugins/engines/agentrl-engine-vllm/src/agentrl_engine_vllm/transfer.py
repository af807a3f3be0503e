"""New weights from safetensors files or from a broadcast, in each of vLLM's worker processes."""

import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.models.gpt_oss import GptOssModel

from agentrl_core.api.weights import ArrayBucket, Broadcast
from agentrl_core.engine_kit.weight_group import WeightGroup, join_as_engine

STACKED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.((?:gate_up|down)_proj(?:_bias)?)")
"""gpt-oss: one tensor for all experts of a layer, which vLLM's model copies past its loaders."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Of the group that buckets are broadcast in.

    Args:
        address: of its store.
        backend: ``gloo``, ``nccl`` or ``ipc``.
        first_rank: of this engine's workers.
        size: of the group.
    """

    address: str
    backend: str
    first_rank: int
    size: int


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Files, or a bucket that is broadcast next.

    Args:
        files: safetensors files on this host. They may change once the update is finished.
        names, shapes, dtypes: of the bucket's tensors.
    """

    files: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)


class TransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads what this worker's shard of the model needs.

    Layers are put back into the form that checkpoints have before, and into the one that kernels need after: on a CPU
    linear layers are packed, and nothing can be loaded into them as they are.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    _group: WeightGroup | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.first_rank + parallel.data_parallel_index * parallel.world_size + parallel.rank
        broadcast = Broadcast(init_info.address, init_info.backend, init_info.size, init_info.first_rank, ())
        self._group = join_as_engine(broadcast, rank, self.device)

    def start_weight_update(self) -> None:
        # It warns of every layer that gets nothing. Whether all weights came was checked before; the others have none.
        logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)
        if self.device.type == "cpu":
            self._drop_expert_kernels()
        initialize_layerwise_reload(self.model)
        self._keep_sinks()

    def _drop_expert_kernels(self) -> None:
        # vLLM packs experts as it makes their kernel. Next to a kernel it would put them unpacked.
        for layer in self.model.modules():
            method = getattr(layer, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None

    def _keep_sinks(self) -> None:
        # Models copy attention sinks past their loaders: into the tensor of the kernel, or into none.
        for layer in self.model.modules():
            kernel = get_layerwise_info(layer).kernel_tensors
            if kernel is not None and "sinks" in kernel[0]:
                del layer.sinks
                layer.register_parameter("sinks", kernel[0]["sinks"])

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class waits for an accelerator, which need not exist.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        weights = self._mapped(update_info.files) if update_info.files else self._received(update_info)
        if any(isinstance(layer, GptOssModel) for layer in self.model.modules()):
            weights = _single_experts(weights)
        self.model.load_weights(weights)

    def _received(self, info: UpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        if self._group is None:
            raise RuntimeError("a bucket is to be broadcast, and init_weight_transfer_engine() was not called")
        yield from self._group.receive(
            ArrayBucket(tuple(info.names), tuple(map(tuple, info.shapes)), tuple(info.dtypes))
        )

    def _mapped(self, files: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for path in files:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    yield name, file.get_tensor(name)

    def finish_weight_update(self) -> None:
        self._check_all_came()
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            self._pack_tied_output_layers()

    def _check_all_came(self) -> None:
        # An output layer that shares the embedding's tensor gets none of its own.
        stale = [
            name
            for name, layer in self.model.named_modules()
            if any(parameter.is_meta for parameter in layer.parameters(recurse=False))
            and get_layerwise_info(layer).load_numel == 0
            and not isinstance(layer, ParallelLMHead)
        ]
        if stale:
            raise RuntimeError(
                f"vLLM's {type(self.model).__name__} has put no new weights into {', '.join(stale[:3])} ({len(stale)} "
                "layers): it cannot be updated while it runs; use another engine for this model"
            )

    def _pack_tied_output_layers(self) -> None:
        # One that shares the embedding's tensor got no weights of its own, and would keep its old packed copy.
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


def _single_experts(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """One tensor per expert, which vLLM's gpt-oss loads with its loaders."""
    for name, tensor in weights:
        if stacked := STACKED_EXPERTS.fullmatch(name):
            for number, expert in enumerate(tensor):
                yield f"{stacked[1]}.{number}.{stacked[2]}", expert
        else:
            yield name, tensor
