"""Models on meshes of processes do what one process does in plain torch."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.fsdp2.ranks import Case, Row, Trained, reference, train_on

TOLERANCE = 1e-5
Expected = Callable[..., Trained]
MESHES: list[tuple[str, int, dict[str, int], dict[str, Any]]] = [
    ("dense", 2, {"tensor_parallel": 2}, {"moves": True}),
    ("tied", 2, {"tensor_parallel": 2}, {"model": {"gradient_checkpointing": True}}),
    ("experts", 2, {"tensor_parallel": 2}, {}),
    ("dense", 2, {"sequence_parallel": 2}, {"model": {"packing": True}, "most_logits": 80}),
    ("dense", 2, {"sequence_parallel": 2}, {"model": {"packing": False}, "most_logits": 80}),
    ("experts", 2, {"expert_parallel": 2}, {"model": {"gradient_checkpointing": True}}),
    ("tied", 4, {"replicas": 2}, {}),
    ("tied", 4, {"tensor_parallel": 2}, {"most_logits": 40}),
    ("dense", 4, {"sequence_parallel": 2}, {}),
    ("dense", 4, {"sequence_parallel": 4}, {}),
    ("dense", 4, {"tensor_parallel": 2, "sequence_parallel": 2}, {"model": {"gradient_checkpointing": True}}),
    ("dense", 4, {"tensor_parallel": 2, "sequence_parallel": 2}, {"head": "values"}),
    ("experts", 4, {"expert_parallel": 2}, {"moves": True, "on_host": True}),
    ("experts", 4, {"expert_parallel": 4, "tensor_parallel": 2}, {}),
    ("experts", 4, {"expert_parallel": 2, "sequence_parallel": 2}, {}),
    ("experts", 4, {"expert_parallel": 2, "replicas": 2}, {}),
    ("tied", 4, {"tensor_parallel": 2, "replicas": 2}, {}),
    ("dense", 4, {"sequence_parallel": 2, "replicas": 2}, {}),
]


def name_of(value: Any) -> str | None:
    return " ".join(f"{key}={each}" for key, each in value.items()) if isinstance(value, dict) else None


@pytest.mark.parametrize(("model", "ranks", "options", "more"), MESHES, ids=name_of)
def test_a_mesh_is_one_process(
    paths: dict[str, str], rows: list[Row], expected: Expected,
    model: str, ranks: int, options: dict[str, int], more: dict[str, Any],
) -> None:  # fmt: skip
    case = Case(paths[model], rows, options, **more)
    found = train_on(ranks, case)
    assert_same(found, expected(model, case.head))
    assert found.weights.keys() == found.file.keys()
    for name, tensor in found.weights.items():
        np.testing.assert_array_equal(found.file[name], tensor, err_msg=name)
    tensor, sequence = options.get("tensor_parallel", 1), options.get("sequence_parallel", 1)
    assert found.held == pytest.approx(options.get("replicas", 1) / ranks, abs=0.05)
    assert found.tokens == most_tokens(case, ranks // tensor // sequence, sequence)
    if case.head == "tokens":
        assert found.widths == {40 // tensor}, "no rank has a row of the whole vocabulary"
    if case.most_logits:
        assert found.logits * 40 // tensor <= case.most_logits


@pytest.mark.parametrize(
    ("ranks", "options", "model"),
    [
        (2, {}, {}),
        (2, {"expert_parallel": 2}, {"gradient_checkpointing": True}),
        (2, {"tensor_parallel": 2}, {}),
        (2, {"sequence_parallel": 2}, {"packing": False}),
        (4, {"expert_parallel": 2, "sequence_parallel": 2}, {}),
    ],
    ids=name_of,
)
def test_given_experts_are_taken_on_every_mesh(
    paths: dict[str, str],
    rows: list[Row],
    replayed: Trained,
    ranks: int,
    options: dict[str, int],
    model: dict[str, Any],
) -> None:
    assert_same(train_on(ranks, Case(paths["experts"], rows, options, model, replays=True)), replayed)


@pytest.fixture(scope="module")
def replayed(paths: dict[str, str], rows: list[Row]) -> Trained:
    """With the experts of ``experts_of``, in plain torch."""
    return reference(Case(paths["experts"], rows, replays=True))


def most_tokens(case: Case, parts: int, spread: int) -> int:
    """That a rank computes of a micro-batch."""
    found = []
    for part in range(parts):
        own = case.rows[part::parts]
        half = -(-len(own) // 2)
        for some in (own[:half], own[half:]):
            padded = max(len(row[0]) for row in some) + max(len(row[1]) for row in some)
            found.append(-(-(packed(some) if case.model.get("packing", True) else padded) // spread))
    return max(found)


def packed(rows: Sequence[Row]) -> int:
    """Different tokens of rows, by what stands before them."""
    return len({(*prompt, *response)[:end] for prompt, response, _ in rows for end in
                range(1, len(prompt) + len(response) + 1)})  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "ranks", "options", "other_ranks", "others"),
    [
        ("tied", 4, {"tensor_parallel": 2}, 2, {"tensor_parallel": 2}),
        ("experts", 4, {"expert_parallel": 2}, 2, {"tensor_parallel": 2}),
        ("experts", 2, {"expert_parallel": 2}, 4, {"replicas": 2, "expert_parallel": 2}),
        ("dense", 2, {}, 4, {"tensor_parallel": 2, "sequence_parallel": 2}),
    ],
    ids=name_of,
)
def test_a_checkpoint_goes_on_on_another_mesh(
    paths: dict[str, str], rows: list[Row], expected: Expected, tmp_path: Path,
    model: str, ranks: int, options: dict[str, int], other_ranks: int, others: dict[str, int],
) -> None:  # fmt: skip
    saved = train_on(ranks, Case(paths[model], rows, options, save=str(tmp_path / "one"), steps=2))
    stored = load_file(tmp_path / "one" / "model.safetensors")
    assert stored.keys() == saved.weights.keys()
    for name, tensor in saved.weights.items():
        np.testing.assert_array_equal(stored[name], tensor, err_msg=name)
    resumed = Case(paths[model], rows, others, resume=str(tmp_path / "one"), first_step=2, steps=1)
    found = train_on(other_ranks, resumed)
    assert found.steps == 3
    np.testing.assert_allclose([*saved.norms, *found.norms], expected(model).norms, rtol=TOLERANCE)
    assert_same_weights(found, expected(model))


def assert_same(found: Trained, expected: Trained) -> None:
    assert found.found.keys() == expected.found.keys()
    for row, columns in expected.found.items():
        for name, values in columns.items():
            np.testing.assert_allclose(found.found[row][name], values, atol=TOLERANCE, rtol=0, err_msg=f"{row} {name}")
    assert found.gradients.keys() == expected.gradients.keys()
    for name, values in expected.gradients.items():
        np.testing.assert_allclose(found.gradients[name], values, atol=TOLERANCE, rtol=TOLERANCE, err_msg=name)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=TOLERANCE)
    assert_same_weights(found, expected)


def assert_same_weights(found: Trained, expected: Trained) -> None:
    assert found.weights.keys() == expected.weights.keys()
    for name, values in expected.weights.items():
        np.testing.assert_allclose(found.weights[name], values, atol=TOLERANCE, rtol=0, err_msg=name)
