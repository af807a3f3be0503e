"""A checkpoint moves to other meshes, to the built-in backend, and back."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import training
from reference import BETAS, DECAY, LR, NORM, TEMPERATURE, loss_of, make_rows
from test_parallel import CLOSE, Reference, assert_same

from agentrl_core.api import CheckpointError
from agentrl_core.api.training_backend import MicroBatch, TrainingContext, Wanted
from agentrl_testing.ranks import on_ranks

MOVES: list[tuple[str, int, dict[str, Any], int, dict[str, Any]]] = [
    ("qwen3-tied", 2, {"tensor_parallel": 2}, 1, {}),
    ("qwen2", 2, {}, 4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    ("qwen3_moe", 2, {"expert_parallel": 2}, 2, {"tensor_parallel": 2}),
    ("llama", 2, {"context_parallel": 2}, 1, {}),
]


@pytest.mark.parametrize(("kind", "size", "options", "other_size", "other"), MOVES, ids=[each[0] for each in MOVES])
def test_training_continues_on_another_mesh(
    kind: str, size: int, options: dict[str, Any], other_size: int, other: dict[str, Any],
    reference: Reference, tmp_path: Path,
) -> None:  # fmt: skip
    path = reference(kind)[0]
    whole = on_ranks(size, training.run, path, options, 3, str(tmp_path))[0]
    for each in on_ranks(other_size, training.resumed, path, other, str(tmp_path / "1"), 2):
        assert each["steps"] == 1
        assert each["norms"] == pytest.approx(whole["norms"][1:], rel=CLOSE)
        assert_same(each["trained"], whole["trained"], CLOSE)


def test_the_same_mesh_continues_bit_for_bit(reference: Reference, tmp_path: Path) -> None:
    path, options = reference("qwen3-tied")[0], {"tensor_parallel": 2}
    whole = on_ranks(2, training.run, path, options, 3, str(tmp_path))[0]
    found = on_ranks(2, training.resumed, path, options, str(tmp_path / "1"), 2)[0]
    assert_same(found["trained"], whole["trained"], 0.0)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen2", {"tensor_parallel": 2}),
        ("qwen3-tied", {"tensor_parallel": 2}),
        ("qwen3_moe", {"expert_parallel": 2}),
        ("qwen3_moe", {"pipeline_parallel": 2}),
    ],
)
def test_a_checkpoint_moves_to_fsdp2_and_back(
    kind: str, options: dict[str, Any], reference: Reference, tmp_path: Path
) -> None:
    path = reference(kind)[0]
    whole = on_ranks(2, training.run, path, options, 3, str(tmp_path))[0]
    other = fsdp2(path)
    other.restore(str(tmp_path / "1"))
    assert other.steps == 1
    assert one_step(other) == pytest.approx(whole["norms"][1], rel=CLOSE)
    other.steps += 1
    (tmp_path / "back").mkdir()
    other.snapshot()(str(tmp_path / "back"))
    other.close()
    for each in on_ranks(2, training.resumed, path, options, str(tmp_path / "back"), 1):
        assert each["steps"] == 2
        assert_same(each["trained"], whole["trained"], CLOSE)


def test_a_checkpoint_that_is_damaged_is_refused(reference: Reference, tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    with pytest.raises(CheckpointError, match=r"checkpoint .*: cannot be read"):
        on_ranks(1, training.resumed, reference("qwen2")[0], {}, str(tmp_path), 0)


def test_a_checkpoint_of_another_model_is_refused(reference: Reference, tmp_path: Path) -> None:
    on_ranks(1, training.run, reference("qwen2")[0], {}, 1, str(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"does not belong to this model \(it has 12 weights that the .*k_proj.bias"
    ):
        on_ranks(1, training.resumed, reference("qwen3-tied")[0], {}, str(tmp_path / "1"), 0)


def fsdp2(path: str) -> Any:
    from agentrl_core.config.schema import ModelConfig, OptimizerConfig, UpdateConfig
    from agentrl_core.fsdp2.backend import Fsdp2
    from agentrl_core.fsdp2.config import Fsdp2Config

    optimizer = OptimizerConfig(lr=LR, betas=list(BETAS), weight_decay=DECAY)
    settings = SimpleNamespace(**{**vars(UpdateConfig()), "optimizer": optimizer})
    backend = Fsdp2(
        Fsdp2Config(), TrainingContext("actor", "tokens", True, path, "model.path", ModelConfig(path), settings)
    )
    backend.load()
    return backend


def one_step(backend: Any) -> float:
    rows = make_rows()
    tokens = int(rows["response_mask"].sum())
    micro = MicroBatch(torch.arange(len(rows["input_ids"])), rows)
    backend.forward_backward(
        [micro], Wanted(TEMPERATURE, "gradient"),
        lambda _, outputs: loss_of(outputs.log_probs, outputs.entropies, rows, tokens),
    )  # fmt: skip
    return float(backend.optimizer_step(LR, NORM))
