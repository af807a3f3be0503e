"""Learning curves: what is drawn, by its pixels' file and by its refusals."""

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from agentrl_core.api import DataError
from agentrl_trackers_basic.curve import _draw_accuracies, draw_curve, draw_curves
from agentrl_trackers_basic.metrics import Accuracy


def metrics_file(path: Path, scale: float = 1.0, sources: tuple[str, ...] = ("calculator",)) -> Path:
    rows = []
    for step in range(11):
        row: dict[str, float | None] = {"step": step, "reward/mean": scale * step / 10 if step else None}
        if step % 5 == 0:
            for source in sources:
                row[f"validation/{source}/accuracy_greedy"] = step / 10
                row[f"validation/{source}/accuracy_sampled"] = step / 12
        rows.append(json.dumps(row))
    path.write_text("\n".join(rows) + '\n{"step": 11, "rew')
    return path


def size(png: Path) -> tuple[int, int]:
    content = png.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


def test_one_run(tmp_path: Path) -> None:
    png = draw_curve(metrics_file(tmp_path / "metrics.jsonl"), tmp_path / "docs" / "curve.png", "calculator")
    assert size(png) == (1200, 675)
    assert [file.name for file in png.parent.iterdir()] == ["curve.png"]


def test_the_label_of_the_upper_curve_stands_above_it() -> None:
    axes = Figure().subplots()
    curves = {"greedy": [(0, 0.0), (5, 0.9)], "sampled": [(0, 0.1), (5, 0.9)]}
    _draw_accuracies(axes, {Accuracy("shop", mode): points for mode, points in curves.items()})
    above = [text.get_text() + ("^" if text.xyann[1] > 0 else "") for text in axes.texts]
    assert above == ["0.00", "0.90^", "0.10^", "0.90"]


def test_rewards_outside_of_0_and_1_get_their_own_panel(tmp_path: Path) -> None:
    png = draw_curve(metrics_file(tmp_path / "metrics.jsonl", scale=-7), tmp_path / "curve.png", "calculator")
    assert size(png) == (1200, 975)


def test_many_data_sources(tmp_path: Path) -> None:
    sources = tuple(f"source_{number}" for number in range(10))
    assert draw_curve(metrics_file(tmp_path / "metrics.jsonl", sources=sources), tmp_path / "c.png", "x").exists()


@pytest.mark.parametrize(
    "row", [{"step": 1, "reward/mean": 0.5}, {"step": 0, "validation/calculator/accuracy_greedy": 0.5}]
)
def test_a_single_point_is_drawn(tmp_path: Path, row: dict[str, float]) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert draw_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png", "one").exists()
    assert draw_curves({"one": tmp_path / "metrics.jsonl"}, tmp_path / "curves.png").exists()


def test_several_seeds_stand_side_by_side(tmp_path: Path) -> None:
    files = {f"seed {seed}": metrics_file(tmp_path / f"{seed}.jsonl") for seed in range(3)}
    assert size(draw_curves(files, tmp_path / "curves.png", "three seeds")) == (1980, 630)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "no such file"), ("", "0 steps"), ('{"step": 1}\n', "1 steps")]
)
def test_nothing_to_draw_is_an_error_that_names_the_file(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "metrics.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=f"metrics.jsonl.*{message}"):
        draw_curve(path, tmp_path / "curve.png", "nothing")
    with pytest.raises(DataError, match=f"metrics.jsonl.*{message}"):
        draw_curves({"a": path}, tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()


def test_no_files_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no metrics files"):
        draw_curves({}, tmp_path / "curves.png")
