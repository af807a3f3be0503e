"""Whether weights are those of the model: checked before a byte of them reaches the server."""

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl_core.api.errors import EngineError
from agentrl_core.api.weights import DTYPE_BYTES, ArrayBucket, WeightUpdate, map_safetensors

LM_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class ModelTensors:
    """Names and shapes of a model's tensors.

    Args:
        shapes: by Hugging Face name.
        tied_to: the embedding that the output layer shares, or "".
    """

    shapes: dict[str, tuple[int, ...]]
    tied_to: str = ""

    @classmethod
    def read(cls, model_path: str, config: dict[str, Any]) -> "ModelTensors":
        """From the headers of the model's safetensors files.

        Raises:
            EngineError: there are none, or they cannot be read.
        """
        files = sorted(str(path) for path in Path(model_path).glob("*.safetensors"))
        if not files:
            raise EngineError(
                f"model.path: {model_path} holds no *.safetensors file, which weight updates are checked against; "
                "save the model with save_pretrained"
            )
        buckets = [map_safetensors(path) for path in files]
        shapes = {name: shape for bucket in buckets for name, shape in zip(bucket.names, bucket.shapes, strict=True)}
        return cls(shapes, _tied_to(shapes, config))

    def normalised(self, update: WeightUpdate) -> WeightUpdate:
        """The same weights, a tied one under the name of the embedding.

        Raises:
            EngineError: tensors that the model does not have, other shapes, missing ones, bytes that don't add up.
        """
        buckets = list(update)
        problems = [*broken_buckets(buckets, has_data=update.broadcast is None), *self._differing(buckets)]
        if problems:
            raise EngineError(
                "weights refused, nothing was sent:\n" + "\n".join(f"  - {problem}" for problem in problems)
            )
        given = {name for bucket in buckets for name in bucket.names}
        if not self.tied_to or self.tied_to in given:
            return update
        renamed = [self._renamed(bucket) for bucket in buckets]
        if update.broadcast is not None:
            return WeightUpdate(broadcast=replace(update.broadcast, buckets=tuple(renamed)))
        return WeightUpdate(renamed)

    def _renamed(self, bucket: ArrayBucket) -> ArrayBucket:
        names = tuple(self.tied_to if name == LM_HEAD else name for name in bucket.names)
        return ArrayBucket(names, bucket.shapes, bucket.dtypes, bucket.data)

    def _differing(self, buckets: list[ArrayBucket]) -> Iterator[str]:
        known = dict(self.shapes)
        if self.tied_to:
            known[LM_HEAD] = known[self.tied_to]
        given = {name: tuple(shape) for bucket in buckets for name, shape in zip(bucket.names, bucket.shapes)}  # noqa: B905 - counts that differ are a problem of their own
        for name, shape in given.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                yield f"{name}: the model has no such tensor" + (f" (nearest: {near[0]})" if near else "")
            elif shape != known[name]:
                yield f"{name}: shape {list(shape)} was given, the model has {list(known[name])}"
        tied = {LM_HEAD, self.tied_to} if self.tied_to else set()
        for name in known:
            if name not in given and name not in tied:
                yield f"{name}: missing"
        if tied and not tied & given.keys():
            yield f"{self.tied_to} = {LM_HEAD}: missing"


def _tied_to(shapes: dict[str, tuple[int, ...]], config: dict[str, Any]) -> str:
    text = config.get("text_config") or {}
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", LM_HEAD not in shapes))
    if not tied and LM_HEAD in shapes:
        return ""
    return next((name for name in shapes if name.endswith("embed_tokens.weight")), "")


def broken_buckets(buckets: list[ArrayBucket], has_data: bool = True) -> Iterator[str]:
    """What does not fit together in buckets: counts, dtypes, bytes where they have any."""
    for number, bucket in enumerate(buckets):
        counts = len(bucket.names), len(bucket.shapes), len(bucket.dtypes)
        if len(set(counts)) != 1:
            yield f"bucket {number} has {counts[0]} names, {counts[1]} shapes and {counts[2]} dtypes"
            continue
        unknown = sorted(set(bucket.dtypes) - DTYPE_BYTES.keys())
        if unknown:
            yield f"bucket {number} has unknown dtypes: {', '.join(unknown)}"
            continue
        sizes = zip(bucket.shapes, bucket.dtypes, strict=True)
        expected = sum(math.prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in sizes)
        if has_data and expected != bucket.nbytes:
            yield f"bucket {number} holds {bucket.nbytes} bytes; its shapes and dtypes need {expected}"
