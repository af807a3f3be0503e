"""Whether weights are those of the model: checked before a byte of them reaches the engine."""

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl_core.api.errors import EngineError
from agentrl_core.api.weights import DTYPE_BYTES, ArrayBucket, WeightUpdate, map_safetensors

LM_HEAD = "lm_head.weight"
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class ModelTensors:
    """Names and shapes of a model's tensors.

    Args:
        shapes: by Hugging Face name.
        tied_to: the embedding that the output layer shares, or "".
    """

    shapes: Shapes
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
        shapes = shapes_of(map_safetensors(path) for path in files)
        return cls(shapes, _tied_to(shapes, config))

    def normalised(self, update: WeightUpdate) -> WeightUpdate:
        """The same weights, a tied one under the name of the embedding.

        Raises:
            EngineError: tensors that the model does not have, other shapes, missing ones, bytes that don't add up.
        """
        buckets = list(update)
        known, tied = dict(self.shapes), [(self.tied_to, LM_HEAD)] if self.tied_to else []
        if self.tied_to:
            known[LM_HEAD] = known[self.tied_to]
        check_weights(buckets, known, tied, has_data=update.broadcast is None)
        if not self.tied_to or any(self.tied_to in bucket.names for bucket in buckets):
            return update
        renamed = [
            replace(bucket, names=tuple(self.tied_to if name == LM_HEAD else name for name in bucket.names))
            for bucket in buckets
        ]
        if update.broadcast is not None:
            return replace(update, broadcast=replace(update.broadcast, buckets=tuple(renamed)))
        return replace(update, buckets=renamed, files=())


def check_weights(
    buckets: list[ArrayBucket], known: Shapes, tied: Iterable[Collection[str]] = (), has_data: bool = True
) -> None:
    """Whether buckets hold exactly the tensors of a model.

    Args:
        known: shape of each tensor.
        tied: names of one and the same tensor, of which one is enough.
        has_data: False where the buckets come without their bytes.

    Raises:
        EngineError: with all that is wrong, and nothing has been written.
    """
    if problems := problems_of(buckets, known, tied, has_data):
        raise EngineError("weights refused, nothing was sent:\n" + "\n".join(f"  - {problem}" for problem in problems))


def problems_of(
    buckets: list[ArrayBucket], known: Shapes, tied: Iterable[Collection[str]] = (), has_data: bool = True
) -> list[str]:
    """What :func:`check_weights` finds wrong."""
    return [*_broken(buckets, has_data), *_differences(shapes_of(buckets), known, tied)]


def shapes_of(buckets: Iterable[ArrayBucket]) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor."""
    # Counts that differ are another problem.
    return {name: tuple(shape) for each in buckets for name, shape in zip(each.names, each.shapes, strict=False)}


def _differences(given: Shapes, known: Shapes, tied: Iterable[Collection[str]]) -> Iterator[str]:
    for name, shape in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            yield f"{name}: the model has no such tensor" + (f" (nearest: {near[0]})" if near else "")
        elif shape != known[name]:
            yield f"{name}: shape {list(shape)} was given, the model has {list(known[name])}"
    groups = {name: tuple(names) for names in tied for name in names}
    for names in dict.fromkeys(groups.get(name, (name,)) for name in known):
        if not any(name in given for name in names):
            yield f"{' = '.join(names)}: missing"


def _tied_to(shapes: Shapes, config: dict[str, Any]) -> str:
    text = config.get("text_config") or {}
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", LM_HEAD not in shapes))
    if not tied and LM_HEAD in shapes:
        return ""
    return next((name for name in shapes if name.endswith("embed_tokens.weight")), "")


def _broken(buckets: list[ArrayBucket], has_data: bool) -> Iterator[str]:
    for number, bucket in enumerate(buckets):
        counts = len(bucket.names), len(bucket.shapes), len(bucket.dtypes)
        if len(set(counts)) != 1:
            yield f"bucket {number} has {counts[0]} names, {counts[1]} shapes and {counts[2]} dtypes"
        elif unknown := sorted(set(bucket.dtypes) - DTYPE_BYTES.keys()):
            yield f"bucket {number} has unknown dtypes: {', '.join(unknown)}"
        elif has_data and bucket.nbytes != bucket.data.nbytes:
            yield f"bucket {number} holds {bucket.data.nbytes} bytes; its shapes and dtypes need {bucket.nbytes}"
