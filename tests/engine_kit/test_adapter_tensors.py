import numpy as np
import pytest

from agentrl_core.api import ArrayBucket, EngineError, LoraAdapter, WeightUpdate
from agentrl_core.engine_kit.adapter_tensors import AdapterRules, adaptable_modules, tensor_names
from agentrl_core.engine_kit.model_tensors import ModelTensors

MODEL = ModelTensors(
    {
        "model.embed_tokens.weight": (10, 4),
        "model.layers.0.q_proj.weight": (6, 4),
        "model.layers.0.q_norm.weight": (4,),
        "model.layers.0.down_proj.weight": (4, 8),
        "model.layers.1.q_proj.weight": (6, 4),
        "model.layers.1.down_proj.weight": (4, 8),
    }
)
RULES = AdapterRules(4, {name for name in adaptable_modules(MODEL) if "embed" not in name}, "the limit of this test")
Q_0_A, Q_0_B = tensor_names("model.layers.0.q_proj")
Q_1_A, Q_1_B = tensor_names("model.layers.1.q_proj")
FITTING = {Q_0_A: (2, 4), Q_0_B: (6, 2), Q_1_A: (2, 4), Q_1_B: (6, 2)}


def update(tensors: dict[str, tuple[int, ...]], adapter: LoraAdapter, missing_bytes: int = 0) -> WeightUpdate:
    data = np.zeros(sum(4 * int(np.prod(shape)) for shape in tensors.values()) - missing_bytes, np.uint8)
    bucket = ArrayBucket(tuple(tensors), tuple(tensors.values()), ("float32",) * len(tensors), data)
    return WeightUpdate([bucket], adapter=adapter)


def refusal(tensors: dict[str, tuple[int, ...]], adapter: LoraAdapter) -> str:
    with pytest.raises(EngineError, match="LoRA adapter refused, nothing was sent") as caught:
        RULES.check(update(tensors, adapter), MODEL)
    return str(caught.value)


def test_names_are_those_of_peft() -> None:
    assert Q_0_A == "base_model.model.model.layers.0.q_proj.lora_A.weight"
    assert Q_0_B == "base_model.model.model.layers.0.q_proj.lora_B.weight"


def test_scaling() -> None:
    assert LoraAdapter(16, 32, ("q_proj",)).scaling == 2
    assert LoraAdapter(16, 32, ("q_proj",), use_rslora=True).scaling == 8


def test_adapters_of_the_model_pass() -> None:
    RULES.check(update(FITTING, LoraAdapter(2, 4, ("q_proj",))), MODEL)
    one = {name: shape for name, shape in FITTING.items() if "layers.0" in name}
    RULES.check(update(one, LoraAdapter(2, 4, ("model.layers.0.q_proj",))), MODEL)
    RULES.check(update(one, LoraAdapter(2, 4, ("0.q_proj",))), MODEL)


def test_everything_that_is_wrong_is_named() -> None:
    message = refusal(
        {Q_0_A: (8, 5), Q_1_B: (6, 8), "base_model.model.model.layers.2.q_proj.lora_A.weight": (8, 4)},
        LoraAdapter(8, 16, ("q_proj", "embed_tokens", "q_norm", "downproj")),
    )
    assert "rank 8: the highest allowed is 4 (the limit of this test)" in message
    assert "target module embed_tokens: the engine cannot adapt it; it can down_proj, q_proj" in message
    assert "target module q_norm: the model has none" in message
    assert "target module downproj: the model has none (nearest: down_proj)" in message
    assert f"{Q_0_A}: shape [8, 5] was given, target_modules and rank 8 have [8, 4]" in message
    assert f"{Q_0_B}: missing" in message
    assert f"{Q_1_A}: missing" in message
    assert f"{Q_1_B}: " not in message
    assert (
        "layers.2.q_proj.lora_A.weight: target_modules and rank 8 have no such tensor (nearest: base_model.model.model."
        in message
    )


def test_both_tensors_of_a_module_that_are_missing_are_named() -> None:
    message = refusal({Q_0_A: (2, 4), Q_0_B: (6, 2)}, LoraAdapter(2, 4, ("q_proj",)))
    assert message.splitlines()[1:] == [f"  - {Q_1_A}: missing", f"  - {Q_1_B}: missing"]


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (LoraAdapter(0, 1, ("q_proj",)), "rank 0: it must be at least 1"),
        (LoraAdapter(2, 4, ()), "target_modules is empty; it must name at least one module"),
    ],
)
def test_an_adapter_must_say_what_it_is(adapter: LoraAdapter, message: str) -> None:
    assert message in refusal(FITTING, adapter)


def test_bytes_that_do_not_add_up_are_named() -> None:
    short = update(FITTING, LoraAdapter(2, 4, ("q_proj",)), missing_bytes=4)
    with pytest.raises(EngineError, match="bucket 0 holds 156 bytes; its shapes and dtypes need 160"):
        RULES.check(short, MODEL)


def test_an_update_without_an_adapter_is_none() -> None:
    with pytest.raises(EngineError, match="has no adapter"):
        RULES.check(WeightUpdate(), MODEL)
