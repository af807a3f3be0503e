"""The console tracker: a panel in a terminal, single lines elsewhere."""

import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.logging import RichHandler

from agentrl_core.api import TrackerContext
from agentrl_trackers_basic.config import ConsoleConfig
from agentrl_trackers_basic.console import ConsoleTracker, plain_line
from agentrl_trackers_basic.metrics import idle_shares

STEP = {
    "reward/mean": 0.41, "reward/std": 0.49, "response_length/mean": 34.2, "rollout/tool_call_share": 0.61,
    "perf/tokens_per_second": 12100.0, "timing/rollout": 0.61, "timing/update_actor": 0.3, "timing/checkpoint": 0.001,
    "timing/step": 1.0,
}  # fmt: skip
VALIDATION = {"validation/calculator/accuracy_greedy": 0.22, "validation/calculator/accuracy_sampled": 0.19}


class Clock:
    """Seconds as the test sets them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def tracker(
    run_dir: Path, terminal: bool, first_step: int = 1, live: bool | None = None, staleness: int = 0
) -> tuple[ConsoleTracker, io.StringIO, Clock]:
    class File(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    file, clock = File(), Clock()
    console = Console(file=file, force_terminal=terminal, width=100, color_system=None, _environ={"TERM": "xterm"})
    context = TrackerContext("calculator", run_dir, 20, {"rollout": {"max_staleness": staleness}}, first_step)
    return ConsoleTracker(ConsoleConfig(live=live), context, console, clock), file, clock


@pytest.fixture
def handler() -> Iterator[logging.Logger]:
    logger = logging.getLogger("agentrl.test_console")
    yield logger
    logger.handlers.clear()


def test_plain_line_holds_what_was_measured() -> None:
    assert plain_line({**STEP, **VALIDATION}, 3, 20, 72.0) == (
        "step 3/20  reward 0.41  acc 0.22 (greedy)  acc 0.19 (sampled)  len 34  tools 61%  12.1k tok/s  "
        "rollout 61% update 30% other 9%  eta 1m12s"
    )


def test_plain_line_leaves_out_what_was_not() -> None:
    assert plain_line({}, 20, 20, None) == "step 20/20"
    assert plain_line({"rollout/failed_fraction": 0.03}, 2, 20, 0.0) == "step 2/20  failed 3%"


def test_outside_of_a_terminal_each_step_is_one_ascii_line(tmp_path: Path) -> None:
    console, file, clock = tracker(tmp_path, terminal=False)
    console.log(VALIDATION, 0)
    for step in (1, 2):
        clock.now += 2
        console.log({**STEP, "validation/a very long data source/accuracy_greedy": 0.5}, step)
    console.finish("completed")
    lines = file.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines[:4]] == [
        "step 0/20", "step 1/20", "step 2/20", "run calculator completed at step 2 after 4s",
    ]  # fmt: skip
    assert lines[4] == "  reward 0.41 -> 0.41, best 0.41 at step 1"
    assert file.getvalue().isascii()


def test_eta_counts_the_pace_of_steps_but_not_the_start(tmp_path: Path) -> None:
    console, file, clock = tracker(tmp_path, terminal=False)
    clock.now = 100  # start-up and validation
    console.log(VALIDATION, 0)
    clock.now += 50  # the first step, which itself says that it took one second
    console.log(STEP, 1)
    assert file.getvalue().splitlines()[-1].endswith("eta 19s")
    clock.now += 3
    console.log(STEP, 2)
    assert file.getvalue().splitlines()[-1].endswith("eta 36s")


def test_in_a_terminal_the_panel_shows_curves_and_time(tmp_path: Path) -> None:
    console, file, clock = tracker(tmp_path, terminal=True)
    console.log(VALIDATION, 0)
    for step in range(1, 6):
        clock.now += 2
        share = (step - 1) / 4
        console.log({**STEP, "reward/mean": share, "validation/calculator/accuracy_greedy": share}, step)
    console.finish("completed")
    panel = file.getvalue()[file.getvalue().rindex("╭") :]
    assert "agentrl · calculator" in file.getvalue()
    assert re.search(r"step 5/20 .* 10s elapsed · eta 27s \(\d\d:\d\d\)", panel)
    assert re.search(r"reward +1\.00 ± 0\.49 +best 1\.00 +▁▃▅▆█", panel)
    assert re.search(r"0\.22 → 1\.00 greedy +at step 5 +▃▁▃▅▆█", panel)
    assert re.search(r"0\.19 sampled +at step 0", panel)
    assert re.search(r"34\.2 tokens", panel) and "61% of trajectories call a tool" in panel
    assert "12.1k tokens/s" in panel and "■ rollout 61%" in panel and "■ update 30%" in panel
    assert panel[panel.rindex("╰") :].split()[1] == "completed"


@pytest.mark.parametrize("width", [30, 60, 200])
def test_the_panel_fits_terminals_of_any_width(tmp_path: Path, width: int) -> None:
    console, file, _ = tracker(tmp_path, terminal=True)
    console._console.width = width
    console.log({**STEP, **VALIDATION, "rollout/failed_fraction": 0.2}, 1)
    console.finish("stopped")
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in file.getvalue().splitlines()]
    assert max(len(line) for line in lines if line[:1] in "╭│╰") <= width
    assert any("failed" in line for line in lines)


def test_log_lines_stand_above_the_panel_unbroken(tmp_path: Path, handler: logging.Logger) -> None:
    console, file, _ = tracker(tmp_path, terminal=True)
    handler.addHandler(RichHandler(console=console._console, show_path=False, show_time=False))
    console.log(STEP, 1)
    handler.warning("tool calculator took 3 s")
    print("a stray print")  # noqa: T201 - what user code does
    console.log(STEP, 2)
    console.finish("completed")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    lines = text.replace("\r", "\n").splitlines()
    for line in ("WARNING  tool calculator took 3 s", "a stray print"):
        assert [found.strip() for found in lines].count(line) == 1
    assert lines.index("a stray print") < max(index for index, line in enumerate(lines) if line.startswith("╭"))


def test_configuration_overrules_the_terminal(tmp_path: Path) -> None:
    plain, plain_file, _ = tracker(tmp_path, terminal=True, live=False)
    live, live_file, _ = tracker(tmp_path, terminal=False, live=True)
    plain.log(STEP, 1)
    live.log(STEP, 1)
    live.finish("failed")
    assert plain_file.getvalue().startswith("step 1/20")
    assert "╭" in live_file.getvalue() and "failed" in live_file.getvalue()


def test_finish_before_any_step_leaves_the_terminal_alone(tmp_path: Path) -> None:
    console, file, _ = tracker(tmp_path, terminal=True)
    console.finish("failed")
    assert file.getvalue() == ""


def test_a_resumed_run_shows_the_curve_from_its_start(tmp_path: Path) -> None:
    rows = [
        {"step": step, "reward/mean": None, "validation/calculator/accuracy_greedy": step / 10} for step in range(3)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    console, file, _ = tracker(tmp_path, terminal=False, first_step=3)
    console.log({"validation/calculator/accuracy_greedy": 0.9}, 3)
    console.finish("completed")
    assert "  calculator acc (greedy) 0.00 -> 0.90, best 0.90 at step 3\n" in file.getvalue()


def test_one_validation_is_shown_once(tmp_path: Path) -> None:
    console, file, _ = tracker(tmp_path, terminal=False)
    console.log({"validation/calculator/accuracy_greedy": 0.9}, 3)
    console.finish("completed")
    assert "calculator acc (greedy) 0.90, best 0.90 at step 3" in file.getvalue()


def test_the_summary_counts_tokens_and_failures(tmp_path: Path) -> None:
    console, file, _ = tracker(tmp_path, terminal=False)
    for step, reward in enumerate((0.2, 0.7, 0.5), start=1):
        failures = {"rollout/failed_fraction": 0.03 * (step == 2), "rollout/tool_failures": 0.1}
        console.log({"reward/mean": reward, "rollout/sampled_tokens": 4000.0, **failures}, step)
    console.finish("stopped")
    assert file.getvalue().splitlines()[3:] == [
        "run calculator stopped at step 3 after 0s, 12.0k tokens sampled",
        "  reward 0.20 -> 0.50, best 0.70 at step 2",
        "  1.0% of trajectories left out, 0.1 failed tool calls per trajectory: see log.txt",
    ]


def test_a_long_step_says_how_far_it_is(tmp_path: Path) -> None:
    console, file, clock = tracker(tmp_path, terminal=False)
    console.log(STEP, 1)
    console.progress("rollout")
    for seconds, done in ((5, 1), (31, 12), (36, 14), (62, 64)):
        clock.now = seconds
        console.progress("", done, 64)
    clock.now = 100
    console.progress("update_actor")
    assert file.getvalue().splitlines()[1:] == [
        "step 2/20  rollout, 12 of 64 trajectories", "step 2/20  rollout, 64 of 64 trajectories",
    ]  # fmt: skip


def test_the_panel_moves_within_a_step(tmp_path: Path) -> None:
    console, file, clock = tracker(tmp_path, terminal=True)
    console.progress("validation")
    clock.now = 5
    console.progress("", 3, 200)
    assert "validation, 3 of 200 trajectories" in file.getvalue()
    console.log(STEP, 1)
    clock.now = 6
    console.progress("update_actor")
    console.finish("completed")
    below = [line for line in file.getvalue().splitlines() if line.startswith("╰")]
    assert [next((word for word in line.split() if "─" not in word), "") for line in below[:4]] == [
        "validation,", "", "update", "completed",
    ]  # fmt: skip


def test_a_notebook_gets_plain_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """As under ipykernel: standard output is no terminal, and what rich prints there is displayed as HTML."""
    shown: list[str] = []
    monkeypatch.setattr("rich.jupyter.display", lambda segments, text: shown.append(text))
    console = Console(force_jupyter=True, width=115)
    console.print("rich displays this")
    watching = ConsoleTracker(ConsoleConfig(), TrackerContext("calculator", tmp_path, 2, {}, 1), console, Clock())
    watching.progress("rollout", 1, 8)
    watching.log({**STEP, **VALIDATION}, 1)
    watching.finish("completed")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("  ")[0] for line in lines[:2]] == [
        "step 1/2",
        "run calculator completed at step 1 after 0s",
    ]
    assert not any("\x1b" in line or "\r" in line or "<" in line for line in lines)
    assert len(shown) == 1


OVERLAPPING = {"staleness/mean": 0.97, "staleness/max": 2.0, "idle/trainer/engines": 0.05, "idle/trainer/other": 0.07}


def test_the_line_of_a_step_says_how_old_its_batch_was_and_who_waited() -> None:
    metrics = {**STEP, **OVERLAPPING, "idle/rollout/trainer": 0.03}
    assert plain_line(metrics, 3, 20, 72.0).endswith(
        "other 9%  age 1.0 (max 2)  waited: training 12% rollout 3%  eta 1m12s"
    )


def test_who_waits_while_a_step_validates_and_saves_waits_for_a_part_of_it() -> None:
    saved = {**STEP, "timing/step": 0.1, "timing/checkpoint": 0.9, "idle/rollout/trainer": 0.5}
    assert idle_shares(saved) == {"rollout": 0.5}
    assert idle_shares({**saved, "idle/rollout/trainer": 1.1}) == {"rollout": 1.0}


def test_rollout_and_training_have_a_lane_each_where_they_overlap(tmp_path: Path) -> None:
    console, file, clock = tracker(tmp_path, terminal=False, staleness=4)
    console.progress("rollout")
    for phase, done, shown in (
        ("", 12, "rollout: 52 trajectories under way, training: waits for a batch"),
        ("update_actor", 12, "rollout: 52 trajectories under way, training: update"),
        ("", 64, "rollout: waits for the trainer, training: update"),
    ):
        clock.now += 31
        console.progress(phase, *(() if phase else (done, 64)))
        assert file.getvalue().splitlines()[-1] == f"step 1/20  {shown}"


def test_the_panel_has_both_lanes_and_what_each_waited(tmp_path: Path) -> None:
    console, file, clock = tracker(tmp_path, terminal=True, staleness=4)
    console.log({**STEP, **OVERLAPPING}, 1)
    console.progress("update_actor")
    clock.now += 1
    console.progress("", 3, 64)
    panel = file.getvalue()
    assert re.search(r"rollout +61 trajectories under way ", panel)
    assert re.search(r"training +update   waited 12%", panel)
    assert re.search(r"age +0.97 versions   oldest 2", panel)
