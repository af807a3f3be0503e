"""The index against the records themselves: what it lists, and that it follows what training does to files."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from agentrl_viewer.index import ORDERS, Filter, Index, conversation
from agentrl_viewer.run import Run
from agentrl_viewer.tree import drawn
from benchmarks._sample_run import SampleRun


@pytest.fixture
def sample(tmp_path: Path) -> SampleRun:
    return SampleRun(tmp_path / "shop", prompts=3, samples=3).write(1, 6)


@pytest.fixture
def index(sample: SampleRun) -> Index:
    index = Index(sample.path)
    index.refresh()
    return index


def records(run: Path) -> list[dict[str, Any]]:
    files = sorted((run / "rollouts").glob("step-*.jsonl"))
    return [
        json.loads(line) | {"line": number}
        for file in files
        for number, line in enumerate(file.read_text().splitlines())
    ]


def places(rows: list[dict[str, Any]]) -> set[tuple[int, int]]:
    return {(row["step"], row["line"]) for row in rows}


@pytest.mark.parametrize(
    ("chosen", "wanted"),
    [
        (Filter(first_step=2, last_step=3), lambda r: 2 <= r["step"] <= 3),
        (Filter(min_reward=0.5), lambda r: r["reward"] is not None and r["reward"] >= 0.5),
        (Filter(max_reward=0.0), lambda r: r["reward"] is not None and r["reward"] <= 0),
        (Filter(termination="engine_error"), lambda r: r["termination"] == "engine_error"),
        (Filter(termination="failed"), lambda r: r["termination"] == "engine_error"),
        (Filter(tool="calculator"), lambda r: any(call["name"] == "calculator" for call in r["tool_calls"])),
        (Filter(tool="calc"), lambda r: False),
        (Filter(error="exited with code"), lambda r: "exited with code" in (r["error"] or "")),
        (Filter(error="*"), lambda r: r["error"] or any(call["failed"] for call in r["tool_calls"])),
        (Filter(text="i GUESS that"), lambda r: "I guess that" in conversation(r)),
        (Filter(text="10% off"), lambda r: "10% off" in conversation(r)),
        (Filter(text="10_ off"), lambda r: False),
        (Filter(split="validation"), lambda r: False),
        (Filter(uid="train-000004-00001"), lambda r: r["uid"] == "train-000004-00001"),
    ],
)
def test_filters_say_what_the_records_say(sample: SampleRun, index: Index, chosen: Filter, wanted: Any) -> None:
    everything = records(sample.path)
    expected = {(record["step"], record["line"]) for record in everything if wanted(record)}
    found = index.listed(chosen, 0, 500)
    assert places(found["rows"]) == expected and found["total"] == len(expected)


@pytest.mark.parametrize("order", ORDERS)
def test_pages_join_without_gap_or_repetition(sample: SampleRun, index: Index, order: str) -> None:
    pages = [index.listed(Filter(order=order), offset, 7)["rows"] for offset in range(0, 60, 7)]
    joined = [(row["step"], row["line"]) for rows in pages for row in rows]
    assert len(joined) == len(records(sample.path)) == len(set(joined))
    if order == "failed":
        problems = [row["problem"] for rows in pages for row in rows]
        assert problems == sorted(problems, reverse=True)


def test_what_training_does_to_files(sample: SampleRun) -> None:
    """Random growth, cuts, rewrites, compression and removal: after each the index equals one made from nothing."""
    chance = random.Random(3)
    index = Index(sample.path)
    folder = sample.path / "rollouts"
    for step in range(7, 27):
        file = chance.choice(sorted(folder.iterdir()))
        what = chance.choice(["new", "new", "pack", "remove", "cut", "rewrite", "superseded"])
        if what == "new":
            sample.write(step, step)
        elif what == "pack" and file.suffix == ".jsonl":
            (folder / (file.name + ".gz")).write_bytes(gzip.compress(file.read_bytes()))
            file.unlink()
        elif what == "remove":
            file.unlink()
        elif what == "cut" and file.suffix == ".jsonl":
            file.write_bytes(file.read_bytes()[:-200])
        elif what == "rewrite" and file.suffix == ".jsonl":
            lines = file.read_text().splitlines(keepends=True)
            file.write_text("".join(reversed([line for line in lines if line.endswith("\n")])))
        elif what == "superseded":
            (sample.path / "superseded/1/rollouts").mkdir(parents=True, exist_ok=True)
            file.rename(sample.path / "superseded/1/rollouts" / file.name)
        index.refresh()
        index.path.rename(sample.path / "kept.sqlite")
        fresh = Index(sample.path)
        fresh.refresh()
        expected = fresh.listed(Filter(), 0, 5000)
        fresh.path.unlink()
        (sample.path / "kept.sqlite").rename(index.path)
        assert index.listed(Filter(), 0, 5000) == expected, what
        assert not index.refresh()


def test_a_line_without_its_end_comes_when_it_is_whole(sample: SampleRun, index: Index) -> None:
    file = sample.path / "rollouts/step-000006.jsonl"
    whole = file.read_bytes()
    total = index.listed(Filter(), 0, 1)["total"]
    file.write_bytes(whole[:-50])
    assert index.refresh() and index.listed(Filter(), 0, 1)["total"] == total - 1
    file.write_bytes(whole)
    assert index.refresh() and index.listed(Filter(), 0, 1)["total"] == total


def test_a_compressed_file_is_not_read_again(sample: SampleRun, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    file = sample.path / "rollouts/step-000002.jsonl"
    packed = file.with_name(file.name + ".gz")
    packed.write_bytes(gzip.compress(file.read_bytes()))
    file.unlink()
    before = index.trajectory("train", 2, 3)
    with monkeypatch.context() as patched:
        patched.setattr("agentrl_viewer.index._content", lambda path: pytest.fail(f"{path} was read"))
        assert index.refresh()
    assert index.trajectory("train", 2, 3) == before != []


def test_damaged_index_is_made_anew(sample: SampleRun, index: Index) -> None:
    total = index.listed(Filter(), 0, 1)["total"]
    index.path.write_bytes(b"no database" * 100)
    again = Index(sample.path)
    again.refresh()
    assert again.listed(Filter(), 0, 1)["total"] == total


def test_a_run_that_cannot_be_written_has_its_index_in_the_cache(
    sample: SampleRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Tests run as root, whom no permission stops.
    (sample.path / ".viewer.sqlite").mkdir()
    index = Index(sample.path)
    index.refresh()
    assert index.path.is_relative_to(tmp_path / "cache") and index.listed(Filter(), 0, 1)["total"] > 0


def test_a_full_disk_is_shown_until_it_is_over(sample: SampleRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(sample.path, "shop")
    with monkeypatch.context() as patched:
        patched.setattr(run.index, "_files", lambda: (_ for _ in ()).throw(OSError("No space left on device")))
        run.refresh()
    assert "No space left on device" in run.summary()["problem"]
    run.refresh()
    assert run.summary()["problem"] == ""


def test_metrics_follow_a_live_and_a_resumed_run(sample: SampleRun) -> None:
    run = Run(sample.path, "shop")
    file = sample.path / "metrics.jsonl"
    assert run.series()["steps"] == [1, 2, 3, 4, 5, 6]
    with file.open("a") as metrics:
        metrics.write('{"step": 7, "reward/mean": 0.5, "ti')
    assert run.series()["steps"][-1] == 6
    with file.open("a") as metrics:
        metrics.write('me": "2026-01-01T00:00:00+00:00"}\n')
    assert run.series()["values"]["reward/mean"][-1] == 0.5
    kept = file.read_text().splitlines(keepends=True)[:3]
    (sample.path / "new").write_text("".join(kept) + '{"step": 4, "reward/mean": 0.25}\n')
    (sample.path / "new").rename(file)
    assert run.series()["steps"] == [1, 2, 3, 4] and run.series()["values"]["reward/mean"][-1] == 0.25
    file.unlink()
    assert run.series()["steps"] == []


def test_tokens_join_to_the_text_that_was_recorded(sample: SampleRun) -> None:
    run = Run(sample.path, "shop")
    run.index.refresh()
    found = run.trajectory("train", 3, 1)
    assert found is not None
    for row in found["rows"]:
        assert "".join(row["response_tokens"]) == "".join(text for _, text in row["segments"])
        assert "".join(row["prompt_tokens"]) == row["prompt_text"]


def test_a_number_that_is_too_large_costs_one_line(sample: SampleRun) -> None:
    turn = {"parent": None, "kind": "turn", "ids": [1], "text": "a"}
    turn["request"] = {"replica": 0, "wait": 0.0, "start": 10**400, "seconds": 0.5}
    line = {
        "schema_version": 2, "trajectory_id": "t", "timings": {}, "waits": [], "nodes": [turn],
        "agents": [{"agent": "", "trajectory_id": "t", "rows": []}],
    }  # fmt: skip
    file = sample.path / "rollouts" / "step-000006.jsonl"
    file.write_text(file.read_text() + json.dumps(line) + "\n")
    index = Index(sample.path)
    index.refresh()
    (damage,) = index.damaged()
    assert "step-000006.jsonl: 1 lines are no trajectories" in damage


def test_a_turn_of_no_row_does_not_move_the_numbers_of_an_agent() -> None:
    turns = [{"parent": None, "kind": "turn", "ids": [1], "text": "", "agent": name} for name in ("", "a", "a")]
    line = {"nodes": turns, "agents": [{"agent": "a", "turn_rewards": [1.0, 2.0]}]}
    assert [(node["turn"], node["turn_reward"]) for node in drawn(line, [])] == [(0, None), (0, 1.0), (1, 2.0)]
