"""The training backend ``fsdp2``: a model of transformers in torch, whole or sharded over the ranks.

Shapes: b rows, r response tokens and l = p + r tokens of a micro-batch, n of its response tokens, C channels.
"""

import functools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from agentrl_core.api.errors import ConfigError, ImageError, WorkerError
from agentrl_core.api.training_backend import (
    TRAINING_FOLDER,
    Columns,
    DataShare,
    Loss,
    MicroBatch,
    Outputs,
    TrainingBackend,
    TrainingContext,
    Wanted,
)
from agentrl_core.api.weights import ArrayBucket
from agentrl_core.engine_kit.media import MediaProcessor, has_processor
from agentrl_core.engine_kit.routers import Routers
from agentrl_core.fsdp2.adapters import (
    CONFIG_FILE,
    adapter_tensors,
    add_adapter,
    check_same,
    peft_config,
    reference_policy,
    use_adapter,
)
from agentrl_core.fsdp2.checkpoints import (
    FROZEN_FOLDER,
    copied,
    copied_state,
    copied_weights,
    files_of_rank,
    frozen_names,
    frozen_weights,
    load_training_state,
    save_training_state,
)
from agentrl_core.fsdp2.flops import utilisation
from agentrl_core.fsdp2.log_probs import chunks_logits, response_log_probs, response_logits
from agentrl_core.fsdp2.media import Media
from agentrl_core.fsdp2.mesh import KEY, Mesh, check_size
from agentrl_core.fsdp2.model_files import FILE_BYTES, copy_processor, frozen_files, save_adapter, save_model
from agentrl_core.fsdp2.models import (
    check_lengths,
    empty_backbone,
    empty_causal_lm,
    enable_gradient_checkpointing,
    freeze,
    load_backbone,
    load_causal_lm,
    sees_images,
    training_mode,
    vocabulary_of,
)
from agentrl_core.fsdp2.offload import HOST, Offload
from agentrl_core.fsdp2.optimizer import AdamW
from agentrl_core.fsdp2.packed_attention import Packing, check_images, check_padding
from agentrl_core.fsdp2.router_replay import replayed_routers
from agentrl_core.fsdp2.sharding import place, rest
from agentrl_core.fsdp2.split import WHOLE, Split
from agentrl_core.fsdp2.tensor_parallel import (
    check_model,
    partial_gradients,
    splits_model,
    sum_gradients,
    vocabulary_part,
)
from agentrl_core.fsdp2.values import VALUE_HEAD_FILE, ValueModel, empty_value_model
from agentrl_core.fsdp2.weights import ModelWeights
from agentrl_core.workers.devices import compute_dtype
from agentrl_core.workers.micro_batching import scattered
from agentrl_core.workers.ranks import TrainingRanks

_SHARED: dict[str, tuple[Any, dict[str, dict[str, Any]]]] = {}
"""Models of this process that several policies adapt, each with what describes the adapters."""


class Fsdp2(TrainingBackend):
    """``AutoModelForCausalLM``, ``AutoModelForImageTextToText``, or the backbone of one with a value head."""

    def __init__(self, config: Any, context: TrainingContext) -> None:
        super().__init__(config, context)
        self._settings = context.settings
        self._device = torch.device(context.device)
        self._ranks = TrainingRanks(context.rank, context.world_size)
        self._mesh: Mesh | None = None
        self._shared = f"{context.shared}/{context.rank}" if context.shared else ""
        self._adapters: dict[str, dict[str, Any]] = {}
        self._model: Any = None
        self._media: Media | None = None
        self._checkpoint_group: ProcessGroup | None = None
        self._has_saved_frozen = False
        """The last checkpoint has the frozen weights in separate files."""
        self._optimizer: AdamW
        self._partial: list[nn.Parameter] = []
        self._offload: Offload
        self._packing: Packing
        self._routers: Routers | None = None
        self._split = WHOLE
        """Of passes; what is tried while the model is loaded is computed for all tokens by all ranks."""
        self._in_chunks = False

    # Loading ------------------------------------------------------------------------------------------------------

    @classmethod
    def check(cls, config: Any, model: Any, adapted: bool, ranks: int, key: str) -> None:
        check_size(config, ranks)
        for name in ("tensor_parallel", "expert_parallel"):
            if getattr(config, name) > 1 and adapted:
                raise ConfigError(
                    f"{KEY}.{name}: {getattr(config, name)} with model.adapter, whose matrices cannot be split; set it "
                    "to 1, or model.adapter=null"
                )
        if splits_model(config):
            check_model(model, config, key)

    def load(self) -> None:
        context, key = self.context, self.context.key
        self._mesh = self._make_mesh()
        if splits_model(self.config):
            empty = empty_causal_lm if context.head == "tokens" else empty_backbone
            self.check(
                self.config, empty(context.path, context.model), bool(context.adapters), self._ranks.size, key
            )  # fmt: skip
        self._model = self._placed()
        check_lengths(self._language_model.config, context.longest, key)
        self._media = None
        check_padding(self._language_model, self._predict, self._device, key)
        self._media = self._media_of(context.path)
        if self._media is not None:
            check_images(self._language_model, self._media, self._predict, self._predict_alone, self._device, key)
        if getattr(self._settings, "router_replay", False):
            self._routers = replayed_routers(self._language_model, self._media, self._predict, self._device)
        self._split = Split(vocabulary=vocabulary_part(self._language_model, self._mesh))
        self._packing = self._make_packing()
        self._in_chunks = context.head == "tokens" and not self._ranks.largest(
            int(not chunks_logits(self._model, self._most_logits, self._device, self._media))
        )
        rest(self._model)
        self.use()
        if context.trains:
            self._prepare_training()
        else:
            self._model.requires_grad_(False)
        self._offload = Offload(self._model, self._settings.offload_parameters, self._device)

    def _make_packing(self) -> Packing:
        """Finds out how rows are computed, the same way on all ranks.

        Raises:
            ConfigError: the tokens of rows are to be spread over ranks, and the model computes something else then.
        """
        model, wanted = self._language_model, self.context.model.packing
        peers = None if self._mesh is None else self._mesh.sequence
        packing = Packing(model, self._predict, wanted or peers is not None, self._device, self._media)
        if self._ranks.largest(int(not packing.is_possible)):
            packing.is_possible = False
        if peers is None:
            return packing
        problem = packing.reason or "some ranks cannot pack it"
        if self._media is not None:
            problem = "it is shown images"
        elif packing.is_possible:
            spread = packing.spread(peers, wanted)
            problem = packing.difference_of(self._predict, functools.partial(self._predict, split=spread), self._device)
            self._split = replace(spread, vocabulary=self._split.vocabulary)
        if problem:
            # FSDP2 renames its class.
            name = type(model).__name__.removeprefix("FSDP")
            raise ConfigError(
                f"{KEY}.sequence_parallel: the tokens of a row of {name} cannot be spread over ranks: "
                f"{problem}; set it to 1"
            )
        return packing

    def _prepare_training(self) -> None:
        if self.context.model.gradient_checkpointing:
            enable_gradient_checkpointing(self._language_model)
        self._optimizer = AdamW(
            self._model.named_parameters(), self._settings.optimizer,
            on_host=self._settings.offload_optimizer and self._device != HOST,
        )  # fmt: skip
        self._partial = partial_gradients(self._language_model, self._mesh)
        dtype = getattr(torch, self.context.engine_dtype)
        if self.context.sends_adapter:
            tensors = functools.partial(adapter_tensors, self._model, self.context.policy)
            self._weights = ModelWeights(nn.Module(), dtype, tensors)
        else:
            self._weights = ModelWeights(self._model, dtype)

    def _make_mesh(self) -> Mesh | None:
        return Mesh.of(self.config, self._device.type, self._ranks.rank, self._ranks.size)

    @property
    def share(self) -> DataShare:
        return DataShare() if self._mesh is None else self._mesh.share

    def _placed(self) -> Any:
        """The model on its device, which other policies of this process may have placed."""
        if self._shared not in _SHARED:
            placed = self._place()
            if not self._shared:
                return placed
            _SHARED[self._shared] = placed, self._adapters
        model, self._adapters = _SHARED[self._shared]
        return model

    def _place(self) -> Any:
        """The model on its device. A simulation overrides this and :meth:`_make_mesh`, and nothing else."""
        return place(
            self._read, self._empty, self._ranks, self._mesh, self.context.model.compute_dtype, self._device
        )  # fmt: skip

    def _read(self) -> Any:
        context = self.context
        # Of a model without gradients quantization is not asked for.
        device = self._device if context.trains else None
        if context.head == "tokens":
            return self._trained(load_causal_lm(context.path, context.model, context.key, device))
        model = ValueModel(self._trained(load_backbone(context.path, context.model, context.key, device)))
        model.load_head(context.path, context.key)
        return model

    def _empty(self) -> Any:
        context = self.context
        if context.head == "tokens":
            return self._trained(empty_causal_lm(context.path, context.model))
        return empty_value_model(self._trained(empty_backbone(context.path, context.model)))

    def _trained(self, language_model: Any) -> Any:
        """With gradients only where there shall be some, and with the adapters."""
        if not self.context.trains:
            return language_model
        freeze(language_model, self.context.model.freeze)
        # All of them first: they name layers of the model without adapters.
        self._adapters = {
            name: peft_config(language_model, plan.settings) for name, plan in self.context.adapters.items()
        }
        for name, plan in self.context.adapters.items():
            add_adapter(
                language_model, self._adapters[name], plan.path, plan.seed,
                policy=name, keep_initial=plan.keeps_initial,
            )  # fmt: skip
        return language_model

    @property
    def _language_model(self) -> Any:
        """The part of the model that is one of transformers."""
        return self._model if self.context.head == "tokens" else self._model.backbone

    @property
    def _most_logits(self) -> int:
        """The most logits of a micro-batch on this rank. The longest row may be a whole micro-batch."""
        tokens, part = max(int(self._settings.micro_batch_tokens), self.context.longest), self._split.vocabulary
        return tokens * (vocabulary_of(self._model) if part is None else part.size)

    def _media_of(self, path: str) -> Media | None:
        """What shows images to the model, if there are some and it can see."""
        model, config = self._language_model, self.context.model
        if self.context.media is None or not sees_images(model.config):
            return None
        own = path if has_processor(path) else config.path
        processor = MediaProcessor.load(own, config.trust_remote_code)
        return None if processor is None else Media(model, processor, self.context.media, in_step=self._ranks.size > 1)

    def _predict(self, micro: MicroBatch, split: Split = WHOLE) -> tuple[Tensor, Tensor]:
        """What :class:`Packing` compares: predictions [n, C], and their places [b, r]."""
        if self.context.head == "tokens":
            return response_logits(self._model, micro, self._media, split)
        result: tuple[Tensor, Tensor] = self._model(micro, self._media, with_head=False, split=split)
        return result

    def _predict_alone(self, inputs: dict[str, Any]) -> Tensor:
        """Predictions [l, C] of the model for inputs [1, l] that say everything."""
        outputs = self._language_model(**inputs, use_cache=False)
        predictions_lC: Tensor = (outputs.logits if self.context.head == "tokens" else outputs.last_hidden_state)[0]
        return predictions_lC

    # Passes -------------------------------------------------------------------------------------------------------

    @property
    def packs_prefixes(self) -> bool:
        return self._packing.is_possible and bool(self.context.model.packing)

    def forward(self, micros: Sequence[MicroBatch], wanted: Wanted) -> Iterator[Outputs]:
        for micro in micros:
            with self._memory_errors(micro):
                outputs = self._outputs(micro, wanted)
            yield outputs

    def forward_backward(self, micros: Sequence[MicroBatch], wanted: Wanted, loss: Loss) -> None:
        for number, micro in enumerate(micros):
            with self._memory_errors(micro):
                loss(number, self._outputs(micro, wanted)).backward()  # type: ignore[no-untyped-call]

    def _outputs(self, micro: MicroBatch, wanted: Wanted) -> Outputs:
        if self.context.head == "values":
            return Outputs(values=scattered(*self._model(micro, self._media, split=self._split)))
        found = response_log_probs(
            self._model, micro, wanted.temperature, wanted.entropies, self._in_chunks, self._media, self._split,
            self._routers,
        )  # fmt: skip
        return Outputs(*found)

    @contextmanager
    def _memory_errors(self, micro: MicroBatch) -> Iterator[None]:
        """Raises WorkerError that names the micro-batch where the device's memory runs out."""
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
                raise
            raise WorkerError(
                f"out of memory in a {micro}: lower {self.context.role}.micro_batch_tokens, or set "
                f"model.gradient_checkpointing=true ({error})"
            ) from error

    def updating(self, seed: int) -> AbstractContextManager[None]:
        return training_mode(self._model, seed + self._ranks.rank)

    def optimizer_step(self, lr: float, max_norm: float) -> float:
        if self._partial and self._mesh is not None and (peers := self._mesh.tensor_peers) is not None:
            sum_gradients(self._partial, peers.group)
        return self._optimizer.step(lr, max_norm)

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        try:
            with self._offload.on_device(), self._packing.on():
                yield
        finally:
            if self._routers is not None:
                self._routers.given = None

    def sending(self) -> AbstractContextManager[None]:
        # An adapter that is not sharded can be read on the host.
        stays = self.context.sends_adapter and not self._weights.is_sharded
        return nullcontext() if stays else self._offload.on_device()

    @property
    def bytes_to_come(self) -> int:
        return self._optimizer.bytes_to_come if self.context.trains else 0

    def image_columns(self, names: Sequence[Sequence[str]] | None, columns: Columns, method: str) -> Columns:
        if self._media is not None:
            return self._media.column(names, columns, method)
        if any(map(len, names or ())):
            raise ImageError(
                f"{method}: the batch has images, and the {self.context.role}'s {type(self._language_model).__name__} "
                "is shown none: it takes text alone, has no processor of images, or the worker got no source of images"
            )
        return {}

    def metrics(self) -> dict[str, float]:
        """``router_difference``: of the experts that the engine chose, those that the model would not have chosen."""
        share = None if self._routers is None else self._routers.share_that_differs()
        return {} if share is None else {"router_difference": share}

    def utilisation(self, trained_tokens: int, other_tokens: int, seconds: float) -> float | None:
        """On a GPU whose peak is known, in bfloat16."""
        if self._device.type != "cuda" or compute_dtype(self.context.model, self._device) != "bfloat16":
            return None
        name = torch.cuda.get_device_name(self._device)
        return utilisation(self._model, name, self._ranks.size, trained_tokens, other_tokens, seconds)

    # Weights ------------------------------------------------------------------------------------------------------

    def weights(self, bucket_bytes: int, on_host: bool = True, everywhere: bool = False) -> Iterator[Columns]:
        return self._weights.buckets(bucket_bytes, on_host, everywhere)

    def weight_layout(self, bucket_bytes: int) -> list[ArrayBucket]:
        return self._weights.layout(bucket_bytes)

    def weight_file(self) -> tuple[str, ...]:
        return self._weights.write_file()

    @property
    def adapter_config(self) -> Mapping[str, Any] | None:
        return self._adapters.get(self.context.policy)

    def reference(self) -> AbstractContextManager[None]:
        return reference_policy(self._model, self.context.policy)

    def use(self) -> None:
        if self._shared:
            use_adapter(self._model, self.context.policy)

    @property
    def module(self) -> Any:
        """In eval mode between updates."""
        return self._model

    # Checkpoints --------------------------------------------------------------------------------------------------

    def snapshot(self) -> Callable[[str], Sequence[str]]:
        if self._checkpoint_group is None:
            self._checkpoint_group = self._ranks.another_group()
        group = self._checkpoint_group
        self.use()
        state, frozen = copied_state(self._model, self._optimizer, self.steps, group), frozen_weights(self._model)
        self.kept_files = self._kept_files(frozen)
        once = {} if self.kept_files else copied(frozen, group)
        self._has_saved_frozen = True

        def write(path: str) -> Sequence[str]:
            self._save(path, copied_weights({**state, **once}), copied_weights(frozen))
            save_training_state(path, state, group)
            if once:
                save_training_state(path, once, group, FROZEN_FOLDER)
            return files_of_rank(path, self._ranks.rank)

        return write

    def _kept_files(self, frozen: Mapping[str, Tensor]) -> list[str]:
        """The files of the last checkpoint that hold the frozen weights, if all of them are there."""
        if not frozen or not self._has_saved_frozen:
            return []
        folder = f"{TRAINING_FOLDER}/{FROZEN_FOLDER}/"
        own = frozen_files(self._language_model, self._below_head(copied_weights(frozen)))
        state = [name for name in self.last_files if name.startswith(folder)]
        return [*own, *state] if {*own, folder + ".metadata"} <= set(self.last_files) else []

    def restore(self, path: str) -> None:
        if (adapter := self.adapter_config) is not None:
            kept = Path(path) / TRAINING_FOLDER
            # Older checkpoints have it next to the weights only.
            check_same(adapter, str(kept) if (kept / CONFIG_FILE).exists() else path)
        self.use()
        self.steps = load_training_state(path, self._model, self._optimizer, self._ranks)
        self._has_saved_frozen = frozen_names(path) == frozen_weights(self._model).keys()

    def _below_head(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Those of the part of the model that is one of transformers."""
        return weights if self.context.head == "tokens" else _below("backbone.", weights)

    def _save(self, path: str, weights: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> None:
        """Write these weights of the model as transformers, or of its adapter as PEFT, loads them."""
        own = self._below_head(weights)
        if (adapter := self.adapter_config) is None:
            save_model(self._language_model, path, own, frozen=self._below_head(frozen))
        else:
            save_adapter(self._language_model, path, adapter, own, self.context.model.path, self.context.policy)
        if self._ranks.is_first:
            copy_processor(self.context.model.path, path)
            if adapter is not None:
                (Path(path) / TRAINING_FOLDER).mkdir(exist_ok=True)
                shutil.copy(Path(path) / CONFIG_FILE, Path(path) / TRAINING_FOLDER)
        if self.context.head == "values":
            self._save_head(path, _below("value_head.", weights))

    def _save_head(self, path: str, weights: Mapping[str, Tensor]) -> None:
        head = dict[str, Tensor]()
        for tensors in ModelWeights(self._model.value_head, tensors=lambda: weights).buckets(FILE_BYTES):
            head |= tensors
        if self._ranks.is_first:
            save_file(head, Path(path) / VALUE_HEAD_FILE)

    def close(self) -> None:
        # Without them where loading has failed.
        if self._model is not None and hasattr(self, "_weights"):
            self._weights.close()
        _SHARED.pop(self._shared, None)
        self._model = None


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
