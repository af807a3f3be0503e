import numpy as np
import pytest

from agentrl_core.api import ArrayBucket, EngineError, WeightUpdate
from agentrl_core.engine_kit.model_tensors import ModelTensors

SHAPES = {"model.embed_tokens.weight": (4, 2), "model.norm.weight": (2,)}


def update(tensors: dict[str, tuple[int, ...]], missing_bytes: int = 0) -> WeightUpdate:
    nbytes = sum(4 * int(np.prod(shape)) for shape in tensors.values()) - missing_bytes
    data = np.zeros(nbytes, np.uint8)
    return WeightUpdate([ArrayBucket(tuple(tensors), tuple(tensors.values()), ("float32",) * len(tensors), data)])


def test_weights_of_the_model_pass_as_they_are() -> None:
    given = update(SHAPES)
    assert ModelTensors(SHAPES).normalised(given) is given


def test_everything_that_differs_is_named() -> None:
    wrong = update({"model.embed_tokens.weight": (2, 4), "model.norms.weight": (2,)})
    with pytest.raises(EngineError) as caught:
        ModelTensors(SHAPES).normalised(wrong)
    message = str(caught.value)
    assert "model.embed_tokens.weight: shape [2, 4] was given, the model has [4, 2]" in message
    assert "model.norms.weight: the model has no such tensor (nearest: model.norm.weight)" in message
    assert "model.norm.weight: missing" in message


def test_bytes_that_do_not_add_up_are_named() -> None:
    with pytest.raises(EngineError, match="bucket 0 holds 36 bytes; its shapes and dtypes need 40"):
        ModelTensors(SHAPES).normalised(update(SHAPES, missing_bytes=4))


def test_a_tied_weight_gets_the_embeddings_name() -> None:
    model = ModelTensors(SHAPES, tied_to="model.embed_tokens.weight")
    (bucket,) = model.normalised(update({"lm_head.weight": (4, 2), "model.norm.weight": (2,)})).buckets
    assert bucket.names == ("model.embed_tokens.weight", "model.norm.weight")
    with pytest.raises(EngineError, match=r"model.embed_tokens.weight = lm_head.weight: missing"):
        model.normalised(update({"model.norm.weight": (2,)}))
