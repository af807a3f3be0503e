"""The transformers model: loading, checks, and the two forwards of a step.

Shapes: B rows, T new tokens of a row, L tokens attended to, N new tokens in all, V vocabulary, A axes of positions.
"""

import inspect
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from agentrl_core.api.engine import EngineContext, SamplingParams
from agentrl_core.api.errors import EngineError
from agentrl_core.engine_kit.media import has_processor
from agentrl_core.engine_kit.routers import Routers
from agentrl_engine_hf.decoder import Decoder
from agentrl_engine_hf.images import ImageReader
from agentrl_engine_hf.kv_cache import ForwardCache, KVCache, LayerShape, ProbeCache, round_up
from agentrl_engine_hf.lora import Lora
from agentrl_engine_hf.sequence import Sequence

_ATTENTIONS = ("sdpa", "eager")
"""The implementations that take the 4-D additive masks which rows of different lengths need."""


class Model:
    """A causal language model that is the engine's own, or the actor's.

    Raises:
        EngineError: the model cannot be loaded, or its architecture keeps more than keys and values per token.
    """

    def __init__(self, context: EngineContext, attn_implementation: str, record_decode: bool = True) -> None:
        # It takes about a second for each new shape, and decoding has one every few tokens.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.owned = context.shared_module is None
        self.device = torch.device(context.device)
        self.module: Any = _load(context, attn_implementation) if self.owned else context.shared_module
        if not self.owned:
            self.device = next(self.module.parameters()).device
        self._training: list[torch.nn.Module] | None = None
        _check(self.module, context)
        self.vocab_size = int(self.module.get_input_embeddings().weight.shape[0])
        slots = context.adapters
        # Adapters leave the layers alone that see, which may have the names of those that they change.
        text = _plain(self.module).get_decoder() if context.max_images else None
        self.lora = None if slots is None else Lora(self.module, slots, not self.owned, text)
        if self.lora is not None and context.max_images:
            _check_adapters(self.module, self.lora)
        self._decoder = Decoder(self.module, self.lora)
        self._record_decode = record_decode
        self._max_model_len = context.max_model_len
        self.images = ImageReader(context, self.module) if context.max_images else None
        # Some models let the tokens of an image see all of it.
        self._sees_whole_images = "token_type_ids" in inspect.signature(_plain(self.module).forward).parameters
        # What pads a row must not be taken for an image.
        self._padding = next(token for token in range(self.vocab_size) if token not in context.reserved_ids)
        self._layers: list[LayerShape] = []
        self._routers: Routers | None = None
        self._experts: dict[int, torch.Tensor] = {}
        """What the routers chose in the last forward."""
        if context.routed_experts:
            self._routers = Routers(_plain(self.module), "EngineContext.routed_experts")
            # A record holds no Python, which writes down what routers choose.
            self._record_decode = False

    def begin(self) -> None:
        """Put the module into eval mode, remembering which parts were in training mode."""
        if self._training is None:
            self._training = [part for part in self.module.modules() if part.training]
            for part in self._training:
                part.training = False
            if self.lora is not None:
                self.lora.begin()
            if self._record_decode and self._layers and self._decoder.outdated:
                self._decoder.record(self._layers, self.module.dtype, self.device)

    def end(self) -> None:
        """Give the module back as :meth:`begin` found it."""
        if self.lora is not None:
            self.lora.end()
        for part in self._training or ():
            part.training = True
        self._training = None

    def move(self, device: torch.device | str) -> None:
        self.module.to(device)

    def give_memory_back(self) -> None:
        """Let other processes have what nothing here refers to any more; torch would keep it."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def new_cache(self) -> KVCache:
        """An empty cache of the right shape, learned from the forward of one token."""
        self.begin()
        try:
            probe = ProbeCache()
            zero = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            mask = torch.zeros(1, 1, 1, 1, dtype=self._mask_dtype, device=self.device)
            self._forward(zero, zero, mask, probe)
            if probe.dtype is None:
                raise EngineError(f"{_describe(self.module)} keeps no keys and values: the hf engine cannot serve it")
            self._layers = list(probe.layers_in_order())
            if self._routers is not None:
                # Behind the layers, where attention does not see it, so that it goes wherever keys and values go.
                chosen = self._routers.stacked(self._experts)[0]
                self._layers.append(LayerShape(1, 0, chosen.numel(), torch.int16))
                self._chosen_shape = chosen.shape
            if self.images is not None:
                self._check_images(self.images, KVCache(self._layers, probe.dtype, self.device))
            if self._record_decode:
                self._decoder.record(self._layers, probe.dtype, self.device)
        finally:
            self.end()
        return KVCache(self._layers, probe.dtype, self.device)

    def _check_images(self, images: ImageReader, store: KVCache) -> None:
        """An image says here what it says in the model's own forward, whatever the family does with it.

        Raises:
            EngineError: it doesn't.
        """
        ids, pictures = images.example(self._padding)
        if len(ids) > self._max_model_len:
            return
        sequence = Sequence("start", ids, len(ids), len(ids) + 1, SamplingParams(1), 0, Future(), pictures=pictures)
        store.resize(1, round_up(len(ids)))
        try:
            expected = images.plain_logits(_plain(self.module), ids, pictures, self.device)
            self.prefill(store, 0, [sequence], [sequence.remaining])
            sequence.cached = len(ids) - 1
            gap = float((self.decode(store, [sequence])[0] - expected).abs().max() / expected.abs().max())
        except Exception as error:
            raise EngineError(f"{_describe(self.module)}: the hf engine cannot show it images: {error}") from error
        if not gap <= torch.finfo(self.module.dtype).eps ** 0.5:
            raise EngineError(
                f"{_describe(self.module)}: the hf engine cannot show it images; its logits differ by {gap:.1e} from "
                "the model's own forward. Use another engine, for example rollout.engine.name=vllm"
            )

    @torch.inference_mode()
    def decode(self, store: KVCache, sequences: SequenceOf[Sequence]) -> torch.Tensor:
        """Feed the last id of the sequences in rows 0..B-1; returns logits ``[B, V]``."""
        ids_B1 = torch.tensor([sequence.ids[-1] for sequence in sequences], device=self.device).unsqueeze(1)
        places = [sequence.cached for sequence in sequences]
        places_B1 = positions_B1 = torch.tensor(places, device=self.device).unsqueeze(1)
        if self.images is not None:
            shifts = [sequence.pictures.shift for sequence in sequences]
            positions_B1 = places_B1 + torch.tensor(shifts, device=self.device).unsqueeze(1)
        length = min(round_up_decode(max(places) + 1), store.capacity)
        rows_B = torch.arange(len(sequences), device=self.device)
        keys, values = store.windows(len(sequences), length)
        mask = self._mask(places_B1, length)
        mix = () if self.lora is None else self.lora.mix([sequence.adapter for sequence in sequences])
        with self._watched():
            logits_BV = self._decoder.replay(
                (ids_B1, positions_B1, mask, rows_B, places_B1.squeeze(1), keys, values, *mix)
            )
        self._keep_experts(store, rows_B, places_B1.squeeze(1), None)
        return logits_BV

    @torch.inference_mode()
    def prefill(self, store: KVCache, first_row: int, sequences: SequenceOf[Sequence], counts: SequenceOf[int]) -> None:
        """Compute keys and values of the next ``counts[i]`` ids of the sequences in rows ``first_row + i``."""
        width = max(counts)
        starts = [sequence.cached for sequence in sequences]
        padded = [
            sequence.ids[start : start + count] + [self._padding] * (width - count)
            for sequence, start, count in zip(sequences, starts, counts, strict=True)
        ]
        ids_BT = torch.tensor(padded, device=self.device)
        offsets_T = torch.arange(width, device=self.device)
        starts_B1 = torch.tensor(starts, device=self.device).unsqueeze(1)
        counts_B1 = torch.tensor(counts, device=self.device).unsqueeze(1)
        # Padding repeats the position of the last token, so that no model sees a position beyond its table.
        positions_BT = starts_B1 + torch.minimum(offsets_T, counts_B1 - 1)
        tokens_N = None if min(counts) == width else (offsets_T < counts_B1).flatten().nonzero().squeeze(1)
        rows_BT = torch.arange(first_row, first_row + len(counts), device=self.device).unsqueeze(1).expand(-1, width)
        rows_N, positions_N = rows_BT.flatten(), positions_BT.flatten()
        if tokens_N is not None:
            rows_N, positions_N = rows_N[tokens_N], positions_N[tokens_N]
        longest = max(start + count for start, count in zip(starts, counts, strict=True))
        length = min(round_up(longest), store.capacity)
        cache = ForwardCache(store, first_row, len(counts), length, rows_N, positions_N, tokens_N)
        mask = self._mask(positions_BT, length)
        pixels: dict[str, torch.Tensor] = {}
        if self.images is not None and any(sequence.pictures.each for sequence in sequences):
            pixels = self._show(self.images, sequences, starts, counts, mask)
            positions_BT = _along_axes(positions_BT, sequences, starts, counts)
        mix = () if self.lora is None else self.lora.mix([sequence.adapter for sequence in sequences])
        with nullcontext() if self.lora is None else self.lora.using(mix):
            self._forward(ids_BT, positions_BT, mask, cache, **pixels)
        self._keep_experts(store, rows_N, positions_N, tokens_N)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        if self._routers is None:
            yield
            return
        with self._routers.kept() as self._experts:
            yield

    def _keep_experts(self, store: KVCache, rows_N: torch.Tensor, positions_N: torch.Tensor,
                      tokens_N: torch.Tensor | None) -> None:  # fmt: skip
        """Store the experts of the last forward's tokens, see :class:`ForwardCache`."""
        if self._routers is None:
            return
        chosen_N1D = self._routers.stacked(self._experts).flatten(1).unsqueeze(1)
        own_N1D = chosen_N1D if tokens_N is None else chosen_N1D[tokens_N]
        store.write(len(self._layers) - 1, rows_N, positions_N, own_N1D[..., :0], own_N1D)

    def experts(self, store: KVCache, sequence: Sequence) -> "np.ndarray[Any, Any] | None":
        """Of all tokens of a sequence but the last, see ``TokenOutput.routed_experts``."""
        if self._routers is None or sequence.row < 0:
            return None
        _, values = store.row(sequence.row, len(self._layers) - 1, sequence.cached)
        found: np.ndarray[Any, Any] = values[0].view(-1, *self._chosen_shape).to("cpu", copy=True).numpy()
        return found

    def _show(self, images: ImageReader, sequences: SequenceOf[Sequence], starts: SequenceOf[int],
              counts: SequenceOf[int], mask: torch.Tensor) -> dict[str, torch.Tensor]:  # fmt: skip
        """Inputs of the images among these tokens; where the model does, the mask lets an image see all of itself."""
        shown = []
        for row, (sequence, start, count) in enumerate(zip(sequences, starts, counts, strict=True)):
            for picture in sequence.pictures.within(start, start + count):
                shown.append(picture)
                if self._sees_whole_images:
                    mask[row, :, picture.start - start : picture.end - start, picture.start : picture.end] = 0
        return {
            name: value.to(self.device, self.module.dtype if value.is_floating_point() else None)
            for name, value in images.inputs(shown).items()
        }

    def _mask(self, positions_BT: torch.Tensor, length: int) -> torch.Tensor:
        """Additive ``[B, 1, T, L]``: a token sees what is at its own position and before."""
        hidden = torch.arange(length, device=self.device) > positions_BT[:, None, :, None]
        mask = torch.zeros(hidden.shape, dtype=self._mask_dtype, device=self.device)
        return mask.masked_fill_(hidden, torch.finfo(self._mask_dtype).min)

    @property
    def _mask_dtype(self) -> torch.dtype:
        return self.module.dtype  # type: ignore[no-any-return]

    def _forward(self, ids_BT: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: Any,
                 **pixels: torch.Tensor) -> torch.Tensor:  # fmt: skip
        """``positions`` are ``[B, T]`` or ``[A, B, T]``."""
        with self._watched():
            output = self.module(
                input_ids=ids_BT,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
                **pixels,
            )
        logits_BV: torch.Tensor = output.logits[:, -1]
        return logits_BV


def _along_axes(positions_BT: torch.Tensor, sequences: SequenceOf[Sequence], starts: SequenceOf[int],
                counts: SequenceOf[int]) -> torch.Tensor:  # fmt: skip
    """Positions ``[A, B, T]`` of a model that has several axes; for others they are what they were."""
    tables = [sequence.pictures.positions_AT for sequence in sequences]
    known = next((table for table in tables if table is not None), None)
    if known is None:
        return positions_BT
    positions_ABT = positions_BT.repeat(known.shape[0], 1, 1)
    for row, (sequence, table, start, count) in enumerate(zip(sequences, tables, starts, counts, strict=True)):
        if table is not None:
            positions_ABT[:, row] += sequence.pictures.shift
            part_AT = table[:, start : start + count].to(positions_ABT.device)
            positions_ABT[:, row, : part_AT.shape[1]] = part_AT
    return positions_ABT


def _plain(module: Any) -> Any:
    """The model without what PEFT has put around it."""
    return module.get_base_model() if hasattr(module, "get_base_model") else module


def round_up_decode(length: int) -> int:
    """Decoding reads all it attends to at every step, so its window follows the longest row closely."""
    return -(-length // 8) * 8


def _load(context: EngineContext, attn_implementation: str) -> Any:
    path = Path(context.model_path)
    if not (path / "config.json").is_file():
        raise EngineError(f"model.path: {context.model_path} is not a directory with a config.json")
    dtype = getattr(torch, context.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise EngineError(f"model.dtype: torch has no dtype {context.dtype!r}; try float32 or bfloat16")
    shows = has_processor(path) and type(AutoConfig.from_pretrained(path)) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    auto = AutoModelForImageTextToText if shows else AutoModelForCausalLM
    module: Any = auto.from_pretrained(path, dtype=dtype, attn_implementation=attn_implementation)
    return module.to(context.device).eval().requires_grad_(False)


def _describe(module: Any) -> str:
    return f"the model type {module.config.model_type!r} ({type(module).__name__})"


def _check(module: Any, context: EngineContext) -> None:
    config = module.config.get_text_config(decoder=True)
    window = _window(config)
    layers = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    # A window that no sequence can leave is no window.
    allowed = {"full_attention", "sliding_attention"} if window >= context.max_model_len else {"full_attention"}
    if layers - allowed:
        kinds = ", ".join(sorted(layers - allowed))
        raise EngineError(
            f"{_describe(module)} has layers of kind {kinds} (window: {window or 'none'}, max_model_len: "
            f"{context.max_model_len}); the hf engine serves models with full attention only. Use another engine, "
            f"for example rollout.engine.name=vllm"
        )
    attention = config._attn_implementation
    if attention not in _ATTENTIONS:
        raise EngineError(
            f"{_describe(module)} was loaded with attn_implementation={attention!r}; the hf engine needs one of "
            f"{', '.join(_ATTENTIONS)}"
        )


def _check_adapters(module: Any, lora: Lora) -> None:
    """A forward of the vision tower has no rows, each with an adapter of its own."""
    text = set(_plain(module).get_decoder().modules())
    outside = [name for name in lora.modules if module.get_submodule(name) not in text]
    if outside:
        raise EngineError(
            f"{_describe(module)}: adapters would change {outside[0]}, which is no part of its language model; the hf "
            "engine serves adapters with images where they leave the vision tower alone: choose other "
            "model.adapter.targets"
        )


def _window(config: Any) -> int:
    """Tokens of the model's sliding window, 0 without one."""
    if not getattr(config, "use_sliding_window", True):
        return 0
    return int(getattr(config, "sliding_window", None) or 0)
