"""Every mesh computes and trains as transformers and torch do in one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import training
from reference import BETAS, NORM, make_rows
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from agentrl_testing.ranks import on_ranks
from conftest import STEPS

CLOSE = 1e-5
MESHES = [
    ("qwen2", 1, {}),
    ("qwen2", 1, {"recomputes": True}),
    ("qwen3-tied", 2, {"tensor_parallel": 2}),
    ("qwen3-tied", 2, {"tensor_parallel": 2, "sequence_parallel": False}),
    ("qwen3-tied", 2, {"pipeline_parallel": 2}),
    ("qwen3-tied", 2, {}),
    ("qwen2", 4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    ("llama", 4, {"tensor_parallel": 2}),
    ("llama", 4, {"pipeline_parallel": 2}),
    ("qwen3-tied", 2, {"context_parallel": 2}),
    ("qwen2", 2, {"context_parallel": 2, "recomputes": True}),
    ("llama", 4, {"context_parallel": 4}),
    ("qwen3-tied", 4, {"context_parallel": 2}),
    ("qwen2", 4, {"context_parallel": 2, "tensor_parallel": 2}),
    ("qwen3-tied", 4, {"context_parallel": 2, "tensor_parallel": 2, "sequence_parallel": False}),
    ("qwen3-tied", 4, {"context_parallel": 2, "pipeline_parallel": 2}),
    ("qwen3_moe", 2, {"context_parallel": 2, "expert_parallel": 2}),
    ("qwen3_moe", 4, {"context_parallel": 2, "tensor_parallel": 2, "expert_parallel": 2}),
    ("qwen3_moe", 2, {"expert_parallel": 2}),
    ("qwen3_moe", 2, {"tensor_parallel": 2}),
    ("qwen3_moe", 2, {"tensor_parallel": 2, "expert_parallel": 2}),
    ("qwen3_moe", 4, {"tensor_parallel": 2, "expert_parallel": 2}),
    ("qwen3_moe", 4, {"pipeline_parallel": 2, "expert_parallel": 2}),
    ("qwen3_moe", 4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
]
Reference = Callable[[str], tuple[str, dict[str, Any]]]


def label(mesh: tuple[str, int, dict[str, Any]]) -> str:
    kind, size, options = mesh
    return " ".join([kind, str(size), *(f"{name}={value}" for name, value in options.items())])


@pytest.mark.parametrize(("kind", "size", "options"), MESHES, ids=map(label, MESHES))
def test_a_mesh_computes_and_trains_like_one_process(
    kind: str, size: int, options: dict[str, Any], reference: Reference, tmp_path: Path
) -> None:
    path, wanted = reference(kind)
    found = on_ranks(size, training.run, path, options, STEPS, str(tmp_path))
    shown, mask = make_rows(), make_rows()["response_mask"]
    for name in ("log_probs", "entropies"):
        values = torch.full_like(shown["advantages"], torch.nan)
        for each in found:
            if each["share"].counts:
                values[each["rows"]] = each[name]
        assert (values - wanted[name])[mask].abs().max() < CLOSE, name
    for each in found:
        assert each["norms"] == pytest.approx(wanted["norms"], rel=CLOSE)
        assert_same(each["loaded"], load_file(f"{path}/model.safetensors"), 0.0)
        assert_same(each["trained"], load_file(f"{path}-{STEPS}-steps/model.safetensors"), CLOSE)
    gradients = first_gradients(tmp_path / "1", found[0]["norms"][0], path)
    for name, gradient in load_file(f"{path}-gradients/model.safetensors").items():
        assert (gradients[name] - gradient).abs().max() <= CLOSE * gradient.abs().max(), name


@pytest.mark.parametrize(("kind", "size", "options"), MESHES, ids=map(label, MESHES))
def test_the_first_rank_has_the_first_part_and_one_rank_of_each_counts(
    kind: str, size: int, options: dict[str, Any], reference: Reference
) -> None:
    found = on_ranks(size, training.run, reference(kind)[0], options, 0)
    shares = [each["share"] for each in found]
    count = size
    for name in ("tensor_parallel", "pipeline_parallel", "context_parallel"):
        count //= options.get(name, 1)
    assert shares[0].index == 0 and all(share.count == count for share in shares)
    assert sorted(share.index for share in shares if share.counts) == list(range(count))


def test_the_layout_is_that_of_the_weights(reference: Reference) -> None:
    found = on_ranks(2, training.layout, reference("qwen3-tied")[0], {"tensor_parallel": 2, "engine_dtype": "bfloat16"})
    layouts = [
        [(bucket.names, bucket.shapes, bucket.dtypes) for bucket in layout]
        for layout in (found[0]["layout"], found[1]["layout"], found[0]["described"])
    ]
    assert layouts[0] == layouts[1] == layouts[2] and len(layouts[0]) > 1
    assert {dtype for *_, dtypes in layouts[0] for dtype in dtypes} == {"bfloat16"}
    # Only the first rank gets them where others need not.
    assert found[1]["elsewhere"] == 0 < found[0]["elsewhere"]


def test_a_gradient_that_is_not_finite_changes_nothing(reference: Reference) -> None:
    for each in on_ranks(2, training.not_finite, reference("qwen3-tied")[0], {"tensor_parallel": 2}):
        assert each["norm"] != each["norm"] or each["norm"] == float("inf")
        assert_same(each["after"], each["before"], 0.0)
        assert each["next"] < float("inf")


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], limit: float) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name] - tensor).abs().max() <= limit, name


def first_gradients(checkpoint: Path, norm: float, path: str) -> dict[str, Tensor]:
    """As Adam's first moments after one step tell, before they were clipped; under the names of the hub."""
    dcp_to_torch_save(checkpoint / "training", checkpoint / "state.pt")
    scale = (1 - BETAS[0]) * min(1.0, NORM / (norm + 1e-6))
    found = {
        name.removeprefix("optimizer.").removesuffix(".exp_avg"): moment / scale
        for name, moment in torch.load(checkpoint / "state.pt").items()
        if name.endswith(".exp_avg")
    }
    return dict(revert_weight_conversion(AutoModelForCausalLM.from_pretrained(path), found))


def test_the_weights_of_a_checkpoint_are_those_of_the_hub(reference: Reference, tmp_path: Path) -> None:
    found = on_ranks(
        4, training.run, reference("qwen2")[0], {"tensor_parallel": 2, "pipeline_parallel": 2}, 1, str(tmp_path)
    )
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "1", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_same(model.state_dict(), found[0]["trained"], 0.0)


def test_a_mesh_that_does_not_divide_is_refused_when_the_model_is_loaded(reference: Reference) -> None:
    for message in on_ranks(1, training.refused, reference("qwen2")[0], {"tensor_parallel": 3}):
        assert "tensor_parallel: 3 does not divide the 2 key-value heads" in message


def test_layers_of_transformer_engine_must_be_installed(reference: Reference) -> None:
    options = {"implementation": "transformer_engine"}
    for message in on_ranks(1, training.refused, reference("qwen2")[0], options):
        assert "transformer_engine is not installed" in message


def test_rows_are_split_by_layers_of_transformer_engine_alone(reference: Reference) -> None:
    for message in on_ranks(2, training.refused_by_megatron, reference("qwen2")[0], {"context_parallel": 2}):
        assert "context_parallel: found 2, which needs the layers of Transformer Engine" in message


def test_arguments_that_megatron_does_not_know_are_refused(reference: Reference) -> None:
    options = {"transformer_config": {"no_such_argument": 1}}
    for message in on_ranks(1, training.refused, reference("qwen2")[0], options):
        assert "trainer.backend.config.transformer_config: Megatron-Core refuses it" in message
