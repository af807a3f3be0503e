"""``rollouts show``: finds the step, prints it, and says what there is where it cannot."""

import json
from pathlib import Path

import pytest

from agentrl_core.api.errors import DataError
from agentrl_core.cli.rollouts import show
from agentrl_core.runs.records import RolloutRecord, RolloutWriter, read_rollouts
from agentrl_core.runs.run_dir import RunDir


def record(step: int, sample: int) -> RolloutRecord:
    return RolloutRecord(
        step=step, split="train", uid=f"p{step}", trajectory_id=f"p{step}-{sample}", sample=sample, prompt_ids=[1],
        response_ids=[2, 3], response_mask=[1, 0], prompt_text="What is 1 + 1?", segments=[(1, "#### 2"), (0, "\n")],
        reward=1.0,
    )  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "calculator"
    writer = RolloutWriter(path / "rollouts")
    for step in (1, 2, 3, 10):
        writer.write(step, "train", [record(step, sample).content for sample in range(5)])
    return path


def test_shows_the_first_trajectories_of_a_step(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(run_dir, 2, 3, False, None)
    out = capsys.readouterr().out
    assert [f"sample {sample} of p2" in out for sample in range(5)] == [True, True, True, False, False]
    assert "What is 1 + 1?⟦#### 2⟧" in out and "mask 1" in out


def test_trajectories_as_json(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(run_dir, 2, 2, False, None, as_json=True)
    shown = json.loads(capsys.readouterr().out)["trajectories"]
    assert [(each["step"], each["sample"], each["segments"][0]) for each in shown] == [
        (2, 0, [1, "#### 2"]), (2, 1, [1, "#### 2"]),
    ]  # fmt: skip


def test_the_newest_step_is_the_default(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(run_dir, None, 1, False, None)
    assert "step 10 " in capsys.readouterr().out


@pytest.mark.parametrize("color", [True, False])
def test_colour_can_be_forced(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, color: bool
) -> None:
    monkeypatch.setenv("NO_COLOR" if color else "FORCE_COLOR", "1")
    show(run_dir, None, 1, False, color)
    out = capsys.readouterr().out
    assert ("\x1b[1;32m#### 2" in out, "\x1b" in out, "⟦#### 2⟧" in out) == (color, color, not color)


def test_validation_has_its_own_files(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match="no validation rollouts.*leave out --validation"):
        show(run_dir, None, 1, True, None)
    RolloutWriter(run_dir / "rollouts").write(0, "validation", [record(0, 0).content])
    show(run_dir, None, 1, True, None)
    assert "step 0 " in capsys.readouterr().out


def test_a_missing_run_names_those_beside_it(run_dir: Path) -> None:
    with pytest.raises(DataError, match=r"calculatr: no such run directory.*there are .*calculator"):
        show(run_dir.with_name("calculatr"), None, 1, False, None)
    with pytest.raises(DataError, match="no other run is there"):
        show(run_dir / "absent" / "deeper", None, 1, False, None)


def test_a_missing_step_names_those_that_exist(run_dir: Path) -> None:
    with pytest.raises(DataError, match="no train rollouts of step 7; there are steps 1-3, 10"):
        show(run_dir, 7, 1, False, None)


@pytest.mark.parametrize(("records", "said"), [("none", r"\(rollout.records=none\)"), ("all", "no train rollouts$")])
def test_a_run_without_rollouts_says_whether_it_recorded_any(tmp_path: Path, records: str, said: str) -> None:
    (tmp_path / "config.yaml").write_text(f"rollout: {{records: {records}}}\n")
    with pytest.raises(DataError, match=said):
        show(tmp_path, None, 1, False, None)


def test_a_run_that_recorded_a_sample_says_so(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "config.yaml").write_text("rollout: {records: sample}\n")
    show(run_dir, None, 1, False, None)
    assert "warning: This run recorded the trajectories of some prompts" in capsys.readouterr().err


def test_an_empty_file_is_named(run_dir: Path) -> None:
    (run_dir / "rollouts" / "step-000011.jsonl").write_text("")
    with pytest.raises(DataError, match="step-000011.jsonl: holds no trajectory"):
        show(run_dir, 11, 1, False, None)


def test_branches_of_a_trajectory_have_titles_of_their_own(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RolloutWriter(run_dir / "rollouts").write(4, "train", [record(*each).content for each in ((4, 0), (4, 0), (4, 1))])
    show(run_dir, 4, 3, False, None)
    titles = [line for line in capsys.readouterr().out.splitlines() if " of p4" in line]
    assert ["branch 2" in title for title in titles] == [False, True, False]


def test_old_steps_are_compressed_and_still_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = RolloutWriter(tmp_path / "rollouts")
    for step in range(1, 13):
        writer.write(step, "train", [record(step, 0).content])
    writer.write(12, "validation", [record(12, 0).content])
    names = sorted(file.name for file in writer.rollouts_dir.iterdir())
    assert names[:3] == ["step-000001.jsonl.gz", "step-000002.jsonl.gz", "step-000003.jsonl"]
    run = RunDir(tmp_path)
    assert run.rollout_steps("train") == list(range(1, 13))
    assert list(read_rollouts(run.rollout_file(1, "train"))) == [record(1, 0)]
    show(tmp_path, 2, 1, False, None)
    assert "sample 0 of p2" in capsys.readouterr().out
    moved = run.supersede_after(0)
    assert moved is not None and RunDir(moved).rollout_steps("train") == list(range(1, 13))
