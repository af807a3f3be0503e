import numpy as np
import pytest

from agentrl_core.api import Adapter, AdapterSlots, ArrayBucket, EngineError, SamplingParams, WeightUpdate
from agentrl_core.engine_kit.adapters import (
    AdapterVersions,
    adapter_shapes,
    check_adapter,
    linear_modules,
    scaling,
    targeted,
)

SLOTS = AdapterSlots(names=("one", "two"), versions=2, rank=8, targets=("q_proj", "up_proj"))
MODULES = {
    "model.layers.0.q_proj": (6, 4), "model.layers.0.up_proj": (8, 4), "model.layers.1.q_proj": (6, 4),
    "lm_head": (9, 4),
}  # fmt: skip
CONFIG = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj"]}


def update(config=CONFIG, name="one", dtype="float32", value=0, **changed) -> WeightUpdate:
    shapes = adapter_shapes(config | {"r": 2}, MODULES) | changed
    shapes = {key: shape for key, shape in shapes.items() if shape}
    size = {"float32": 4, "bfloat16": 2, "float16": 2}[dtype]
    nbytes = sum(size * int(np.prod(shape)) for shape in shapes.values())
    data = np.full(nbytes // size, value, {2: np.uint16, 4: np.uint32}[size]).view(np.uint8)
    bucket = ArrayBucket(tuple(shapes), tuple(shapes.values()), (dtype,) * len(shapes), data)
    return WeightUpdate([bucket], adapter=Adapter(name, config))


def request(adapter: str = "one", version: int | None = None) -> SamplingParams:
    return SamplingParams(1, adapter=adapter, version=version)


def test_names_and_shapes_are_pefts() -> None:
    assert adapter_shapes(CONFIG, MODULES) == {
        f"base_model.model.model.layers.{layer}.q_proj.lora_{part}.weight": shape
        for layer in (0, 1)
        for part, shape in (("A", (2, 4)), ("B", (6, 2)))
    }
    shapes = {"model.layers.0.q_proj.weight": (6, 4), "model.norm.weight": (4,), "model.layers.0.q_proj.bias": (6,)}
    assert linear_modules(shapes) == {"model.layers.0.q_proj": (6, 4)}
    assert scaling(CONFIG) == 4.0 and scaling(CONFIG | {"use_rslora": True}) == pytest.approx(8 / 2**0.5)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, ["model.layers.0.q_proj", "model.layers.1.q_proj", "lm_head"]),
        ({"target_modules": r".*\.0\.\w+"}, ["model.layers.0.q_proj", "model.layers.0.up_proj"]),
        ({"target_modules": ["q_proj"], "layers_to_transform": 1}, ["model.layers.1.q_proj"]),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0]}, ["model.layers.0.q_proj"]),
        ({"target_modules": ["q_proj"], "exclude_modules": ["0.q_proj"]}, ["model.layers.1.q_proj"]),
        ({"target_modules": ["proj"]}, []),
        ({}, []),
    ],
)
def test_targets_are_found_by_pefts_rules(config, found) -> None:
    assert targeted(config, MODULES) == found


def test_an_adapter_that_fits_is_named() -> None:
    assert check_adapter(update(), SLOTS, MODULES).name == "one"
    assert check_adapter(WeightUpdate(shared=True, adapter=Adapter("two", CONFIG)), SLOTS, MODULES).name == "two"


A = "base_model.model.model.layers.0.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (update(name="three"), "its name is not one of those that the engine serves: one, two"),
        (update(CONFIG | {"r": 9}), "r is 9; allowed: 1 to 8, the rank that the engine was started with"),
        (update(CONFIG | {"r": None}), "r is None"),
        (update(CONFIG | {"use_dora": True}), "use_dora is True; engines serve plain LoRA"),
        (update(CONFIG | {"rank_pattern": {"q_proj": 4}}), "rank_pattern is {'q_proj': 4}"),
        (update(CONFIG | {"bias": "all"}), "bias is 'all'; allowed: 'none'"),
        (update(CONFIG | {"peft_type": "LOHA"}), "peft_type is 'LOHA'; allowed: 'LORA'"),
        (update(CONFIG | {"init_lora_weights": "pissa_niter_4"}), "'pissa_niter_4', which changes the weights below"),
        (update(CONFIG | {"target_modules": ["q_proj", "lm_head"]}), "name lm_head; allowed: q_proj, up_proj"),
        (update(CONFIG | {"target_modules": ["odd"]}), r"are \['odd'\], and the model has no such linear layer"),
        (update(**{A: (2, 5)}), r"layers.0.q_proj.lora_A.weight: shape \[2, 5\] was given, the model has \[2, 4\]"),
        (update(**{A: ()}), "layers.0.q_proj.lora_A.weight: missing"),
        (update(odd=(1,)), "odd: the model has no such tensor"),
        (update(value=0x7F800001), "lora_A.weight: holds values that are not finite"),
        (update(dtype="bfloat16", value=0x7F80), "lora_A.weight: holds values that are not finite"),
        (update(dtype="float16", value=0x7C00), "lora_A.weight: holds values that are not finite"),
    ],
)
def test_what_does_not_fit_is_said(given, words) -> None:
    with pytest.raises(EngineError, match=f"(?s)adapter '\\w+' refused, nothing was changed:.*{words}"):
        check_adapter(given, SLOTS, MODULES)


def test_finite_values_of_all_dtypes_pass() -> None:
    for dtype, value in (("bfloat16", 0x7F7F), ("float16", 0x7BFF), ("float32", 0x7F7FFFFF)):
        check_adapter(update(dtype=dtype, value=value), SLOTS, MODULES)


def test_an_engine_without_adapters_refuses_all() -> None:
    with pytest.raises(EngineError, match="none, it was started without"):
        check_adapter(update(), None, MODULES)
    with pytest.raises(ValueError, match="none, the engine has no adapters"):
        AdapterVersions(None).enter(request())
    assert AdapterVersions(None).enter(request("")) is None


def test_requests_get_the_newest_version_or_the_one_they_name() -> None:
    versions: AdapterVersions[str] = AdapterVersions(SLOTS)
    with pytest.raises(ValueError, match="'one' has no version yet"):
        versions.enter(request())
    assert versions.newest("one") is None
    for number in (3, 5):
        assert versions.add("one", number, f"held {number}") == []
    assert [versions.enter(request(version=number)).held for number in (None, 5, 3)] == ["held 5", "held 5", "held 3"]
    assert versions.newest("one").version == 5
    for asked, words in (
        (request("three"), "adapter is 'three'; allowed: one, two"),
        (request(version=4), r"'one' has no version 4 \(any more\); there are: 3, 5"),
        (request("", version=4), "version is 4 without an adapter"),
    ):
        with pytest.raises(ValueError, match=words):
            versions.enter(asked)


def test_a_version_is_freed_when_it_is_neither_kept_nor_used() -> None:
    versions: AdapterVersions[str] = AdapterVersions(SLOTS)
    versions.add("one", 1, "a")
    used = [versions.enter(request()) for _ in range(2)]
    assert versions.add("two", 2, "other") == []
    assert versions.add("one", 2, "b") == []
    assert versions.add("one", 3, "c") == [], "requests use the first"
    assert [entry.held for entry in versions.add("one", 4, "d")] == ["b"], "nobody uses the second"
    assert sorted(entry.held for entry in versions) == ["a", "c", "d", "other"]
    assert [versions.leave(entry) for entry in used] == [False, True]
    assert sorted(entry.held for entry in versions) == ["c", "d", "other"]
    assert not versions.leave(None)


def test_a_version_that_comes_again_replaces_itself() -> None:
    versions: AdapterVersions[str] = AdapterVersions(SLOTS)
    versions.add("one", 1, "a")
    versions.add("one", 2, "b")
    assert [entry.held for entry in versions.add("one", 2, "again")] == ["b"]
    assert [versions.enter(request(version=number)).held for number in (1, 2)] == ["a", "again"]
