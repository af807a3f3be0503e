"""What a run does, seen from its records, metrics and hooks."""

import asyncio
import functools
import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import ConfigError, PluginBrokenError
from agentrl_core.config import (
    AgentConfig,
    AgentLoopSlot,
    Config,
    DataConfig,
    EngineSlot,
    ModelConfig,
    RewardConfig,
    RewardFunctionSlot,
    RolloutConfig,
    TrackerSlot,
    TrainerConfig,
    bind,
    load_config,
)
from agentrl_core.runs.records import read_rollouts
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.serving.weight_transport import ActorWeights
from agentrl_core.trainer import Trainer, trackers
from agentrl_core.workers.actor import ActorWorker
from agentrl_engine_hf.engine import HFEngine

Fit = Callable[..., RunDir]
SCRIPTED = {"rollout.engine": {"name": "scripted"}}
VALIDATED = {"data.validation_files": ["validation.jsonl"]}
ONE_STEP = {"trainer.steps": 1}


def last(run: RunDir) -> dict[str, Any]:
    return run.read_metrics()[-1]


def events(run: RunDir) -> list[list[Any]]:
    return [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]


def reward(name: str) -> dict[str, Any]:
    return {"reward.functions": [{"name": f"./rewards.py:{name}", "isolation": "inline"}]}


def test_phases_say_when_each_part_of_a_step_was(fit: Fit) -> None:
    run = fit({**SCRIPTED, **VALIDATED, "trainer.steps": 2})
    lines = [json.loads(line) for line in run.phases_file.open()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line, metrics in zip(lines, run.read_metrics(), strict=True):
        seconds: dict[str, float] = {}
        for name, _, length in line["phases"]:
            seconds[f"timing/{name}"] = seconds.get(f"timing/{name}", 0.0) + length
        assert seconds == pytest.approx({name: metrics[name] for name in seconds}, abs=1e-3)
    step = {name: (begun, begun + length) for name, begun, length in lines[2]["phases"]}
    order = ("step", "rollout", "log_probs", "advantages", "update_actor", "sync_weights", "validation", "checkpoint")
    assert sorted(order, key=lambda name: step[name][0]) == list(order)
    (record, *_) = read_rollouts(run.rollout_file(2, "train"))
    generate = [span for span in record.spans if span[0] == "generate"]
    assert [replica for replica, _ in record.served] == [0] * len(generate) and generate
    assert all(step["rollout"][0] - 0.1 < begun < step["rollout"][1] for _, begun, _ in generate)


def test_metrics_have_the_names_of_the_field(fit: Fit) -> None:
    run = fit({**VALIDATED, **ONE_STEP, "algorithm.advantage": "gae", "trainer.validation.n": 2})
    metrics = last(run)
    expected = {
        "step", "time", "actor/pg_loss", "actor/entropy", "actor/grad_norm", "actor/lr", "actor/trained_rows_share",
        "critic/loss", "critic/explained_variance", "reward/mean", "reward/max", "reward/min", "reward/std",
        "reward/lower", "response_length/mean", "response_length/clip_ratio", "prompt_length/mean",
        "rollout/tool_call_share", "rollout/turns_mean", "rollout/failed_fraction", "rollout/logprob_gap_mean",
        "rollout/sampled_tokens", "timing/step", "timing/rollout", "timing/update_actor", "timing/update_critic",
        "timing/sync_weights", "timing/validation", "perf/tokens_per_second", "perf/rss_gib",
        "validation/tiny/accuracy_greedy", "validation/tiny/accuracy_sampled", "validation/tiny/pass_at_2",
    }  # fmt: skip
    assert expected <= metrics.keys()
    assert metrics["rollout/logprob_gap_max"] < 1e-4
    assert 0 <= metrics["validation/tiny/accuracy_sampled"] <= metrics["validation/tiny/pass_at_2"] <= 1
    assert not any(name.startswith("rollout/") and "second" in name for name in metrics)


@pytest.mark.parametrize("level", [1, 2])
def test_engines_that_sleep_while_the_trainer_computes_change_nothing(fit: Fit, level: int) -> None:
    # Otherwise what shares a forward depends on time, and with it the last digits.
    changes = {"trainer.steps": 2, "actor.optimizer.lr": 0.01, "rollout.deterministic": True}
    awake = last(fit(changes))
    asleep = last(fit({**changes, "rollout.engine.sleep": level}))
    assert "timing/sleep" in asleep and "timing/sleep" not in awake
    measured = [name for name in awake if name.startswith(("actor/", "reward/", "response_length/"))]
    assert {name: asleep[name] for name in measured} == {name: awake[name] for name in measured}


@pytest.mark.parametrize("level", [1, 2])
def test_the_trainer_computes_and_sends_only_while_engines_sleep(
    fit: Fit, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    """On one GPU there is no room for both: not at the start, not in the first comparison, not as a run resumes."""
    seen: list[tuple[str, bool]] = []
    state = {"awake": False}

    def watch(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.append((name, state["awake"]))
            return method(*args, **kwargs)

        # What the method is registered with.
        monkeypatch.setattr(owner, name, functools.wraps(method)(watched))

    def follow(name: str, awake: bool) -> None:
        method = getattr(HFEngine, name)

        async def followed(engine: HFEngine, *args: Any) -> None:
            await method(engine, *args)
            state["awake"] = awake if name != "wake_up" else state["awake"] or "kv_cache" in args[0]

        monkeypatch.setattr(HFEngine, name, followed)

    for name in ("compute_log_prob", "update", "load_checkpoint", "save_checkpoint"):
        watch(ActorWorker, name)
    watch(ActorWeights, "newest")
    for name, awake in (("start", True), ("sleep", False), ("wake_up", True), ("close", False)):
        follow(name, awake)
    changes = {"trainer.steps": 1, "rollout.engine.sleep": level, "trainer.checkpoint.interval": 1}
    fit(changes)
    fit({**changes, "trainer.steps": 2, "trainer.resume": "auto"})
    assert [name for name, awake in seen if awake and name != "save_checkpoint"] == []
    assert {"load_checkpoint", "update", "newest", "compute_log_prob"} <= {name for name, _ in seen}


def test_bfloat16_compute_in_one_process_trains_and_the_engine_that_shares_the_module_agrees(fit: Fit) -> None:
    changes = {"model.compute_dtype": "bfloat16", "trainer.steps": 3, "rollout.max_response_length": 6}
    steps = fit(changes).read_metrics()
    for step in steps:
        assert math.isfinite(step["actor/loss"]) and step["actor/skipped_steps"] == 0
        assert 0 < step["rollout/logprob_gap_mean"] < 0.05
    assert any(step["actor/grad_norm"] > 0 for step in steps)


def test_requests_of_the_validation_are_not_counted_in_the_steps_engine_metrics(fit: Fit) -> None:
    rows = fit({**VALIDATED, **ONE_STEP, "trainer.validation": {"before": True, "interval": 1}}).read_metrics()
    assert rows[-1]["rollout/engine/requests"] == 4
    assert not any(name.startswith("rollout/engine/") for name in rows[0])


def test_validation_before_during_and_after(fit: Fit) -> None:
    run = fit({**SCRIPTED, **VALIDATED, "trainer.validation": {"interval": 2}, "trainer.steps": 3})
    measured = [row["step"] for row in run.read_metrics() if "validation/tiny/accuracy_greedy" in row]
    assert measured == run.rollout_steps("validation") == [0, 2, 3]
    assert len(list(read_rollouts(run.rollout_file(0, "validation")))) == 2 * 3


def test_without_validation_data_there_is_no_step_0(fit: Fit) -> None:
    assert [row["step"] for row in fit(SCRIPTED).read_metrics()] == [1, 2]


def test_hooks_are_called_in_order_and_see_the_state(fit: Fit) -> None:
    changes = {**SCRIPTED, **VALIDATED, **ONE_STEP, "hooks": ["./hooks.py:Record"]}
    run = fit(changes)
    assert [event[:2] for event in events(run)] == [
        ["run_start", None], *[["validation_trajectory", 0]] * 6, ["validation_end", 0], ["step_end", 0],
        ["rollout_start", 1], *[["train_trajectory", 1]] * 4, ["rollout_end", 1], ["batch_ready", 1],
        *[["validation_trajectory", 1]] * 6, ["validation_end", 1], ["step_end", 1], ["checkpoint_saved", 1],
        ["run_end", None],
    ]  # fmt: skip
    states = [tuple(event[3:]) for event in events(run)]
    assert states[0] == ("running", 0)
    assert states[-3:] == [("running", 1), ("running", 1), ("completed", 1)]


def test_a_hook_replaces_the_batch(fit: Fit) -> None:
    run = fit({**ONE_STEP, "hooks": ["./hooks.py:Halve", "./hooks.py:Record"]})
    rows = {event: rows for event, _, rows, *_ in events(run)}
    assert rows["rollout_end"] == 4
    assert rows["batch_ready"] == 2


def test_rows_without_advantage_are_left_out_of_the_update(fit: Fit, tiny_run: Any) -> None:
    run = fit({**ONE_STEP, **reward("only_first")}, tiny_run.rows(2))
    advantages = {record.uid: record.advantage for record in read_rollouts(run.rollout_file(1, "train"))}
    assert sorted(advantage == 0 for advantage in advantages.values()) == [False, True]
    assert last(run)["actor/trained_rows_share"] == 0.5


@pytest.mark.parametrize(
    "changes", [{"algorithm.drop_zero_advantage": False}, {"algorithm.kl_coef": 0.1}, {"algorithm.entropy_coef": 0.1}]
)
def test_rows_without_advantage_stay_where_they_or_the_user_want_it(
    fit: Fit, tiny_run: Any, changes: dict[str, Any]
) -> None:
    run = fit({**ONE_STEP, **reward("only_first"), **changes}, tiny_run.rows(2))
    assert last(run)["actor/trained_rows_share"] == 1.0


def test_a_step_without_any_advantage_updates_nothing(fit: Fit) -> None:
    run = fit({**SCRIPTED, **ONE_STEP})
    assert last(run)["actor/trained_rows_share"] == 0.0
    assert "actor/pg_loss" not in last(run)
    assert last(run)["actor/entropy"] > 0


def test_a_run_that_trained_nothing_says_so(fit: Fit, caplog: pytest.LogCaptureFixture) -> None:
    fit({**SCRIPTED, **ONE_STEP})
    assert (
        caplog.text.count("no_signal: in step 1 no prompt had a sample with an advantage, so nothing was learned") == 1
    )
    caplog.clear()
    fit({**ONE_STEP, "trainer.name": "other"})
    assert "no_signal" not in caplog.text


def test_reference_only_with_a_kl_term(tiny_run: Any) -> None:
    plain = Trainer(load_config(tiny_run(ONE_STEP)))
    run = RunDir(plain.fit())
    assert plain.roles.reference is None and plain.roles.critic is None
    assert "actor/kl" not in last(run)
    with_kl = Trainer(load_config(tiny_run({"algorithm.kl_coef": 0.1})))
    first, second = RunDir(with_kl.fit()).read_metrics()
    assert with_kl.roles.reference is not None
    assert first["actor/kl"] == pytest.approx(0, abs=1e-6)
    assert second["actor/kl"] > first["actor/kl"]


def test_critic_warm_up(fit: Fit) -> None:
    run = fit({"algorithm.advantage": "gae", "critic.warmup_steps": 1})
    first, second = run.read_metrics()
    assert "critic/loss" in first and "critic/loss" in second
    assert "actor/pg_loss" not in first and "actor/pg_loss" in second
    assert first["actor/entropy"] > 0


def test_a_critic_that_warms_up_for_the_whole_run_is_warned_of(fit: Fit, caplog: pytest.LogCaptureFixture) -> None:
    fit({**ONE_STEP, "algorithm.advantage": "gae", "critic.warmup_steps": 1})
    assert caplog.text.count("critic.warmup_steps=1 covers all 1 steps of the run") == 1


def test_first_trajectory_is_shown(fit: Fit, capsys: pytest.CaptureFixture[str]) -> None:
    answer = {"rollout.engine": {"name": "scripted", "config": {"turns": ["a scripted answer"]}}}
    fit({**answer, "rollout.max_response_length": 32})
    output = capsys.readouterr().out
    assert output.count("The first trajectory of step 1, as the model was trained on it:") == 1
    assert "a scripted answer" in output and "reward  0.88" in output


def test_rollouts_are_not_written_where_nobody_wants_them(fit: Fit) -> None:
    run = fit({**SCRIPTED, "rollout.records": "none"})
    assert run.rollout_steps("train") == []
    assert "rollout.records=none" in run.unrecorded


def test_tool_silence_warns_once_after_ten_steps(fit: Fit, caplog: pytest.LogCaptureFixture) -> None:
    tools = {"rollout.agent.loops": ["tool_agent"], "tools": ["calculator"], "data.max_prompt_length": 512}
    fit({**SCRIPTED, **tools, "trainer.steps": 9})
    assert "called a tool" not in caplog.text
    fit({**SCRIPTED, **tools, "trainer.steps": 12})
    assert caplog.text.count("no_tool_calls: in steps 1 to 10 no trajectory called a tool") == 1


@pytest.mark.parametrize(("tracker", "when"), [("Full", "at step 1"), ("FullAtTheEnd", "at the end of the run")])
def test_a_failing_tracker_is_reported_once_and_the_run_completes(
    fit: Fit, tracker: str, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = fit({**SCRIPTED, "trainer.trackers": [f"./hooks.py:{tracker}", "jsonl"], "trainer.checkpoint.interval": 1})
    state = run.read_state()
    assert state is not None and (state.status, state.step) == ("completed", 2)
    assert [row["step"] for row in run.read_metrics()] == [1, 2]
    assert (run.checkpoints_dir / "step-000001").is_dir() and (run.checkpoints_dir / "step-000002").is_dir()
    assert caplog.text.count(f"{tracker}' failed {when} and is disabled; the run continues") == 1


@pytest.mark.parametrize(
    ("where", "when"),
    [
        ("__init__(self, config, context)", "when it was built"),
        ("log_trajectories(self, trajectories, step)", "with the trajectories of step 1"),
        ("log(self, metrics, step)", "at step 1"),
        ("finish(self, status)", "at the end of the run"),
    ],
)
def test_a_hanging_tracker_is_left_behind_and_the_run_completes(
    fit: Fit, where: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers, "DEADLINE_SECONDS", 0.5)
    (tmp_path / "hung.py").write_text(
        "import threading\n"
        "from agentrl_core.api import Tracker\n"
        "class Hung(Tracker):\n"
        "    def log(self, metrics, step): ...\n"
        f"    def {where}: threading.Event().wait()\n"
    )
    run = fit({**SCRIPTED, "trainer.trackers": ["./hung.py:Hung", "jsonl"]})
    state = run.read_state()
    assert state is not None and (state.status, state.step) == ("completed", 2)
    assert [row["step"] for row in run.read_metrics()] == [1, 2]
    assert caplog.text.count(f"Hung' failed {when} and is disabled; the run continues: TimeoutError: it has not") == 1
    assert "threading.Event().wait()" in caplog.text


def test_failing_hook_ends_the_run_and_names_itself(fit: Fit, tmp_path: Path) -> None:
    (tmp_path / "sick.py").write_text(
        "from agentrl_core.api import hookimpl\n"
        "class Sick:\n"
        "    def __init__(self, config, context): ...\n"
        "    @hookimpl\n"
        "    def on_step_end(self, step, metrics): raise ValueError('ouch')\n"
    )
    with pytest.raises(PluginBrokenError, match="hook 'Sick' raised in on_step_end: ValueError: ouch"):
        fit({**SCRIPTED, "hooks": ["./sick.py:Sick"]})


def test_a_hook_can_end_the_run_with_a_checkpoint(fit: Fit, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "enough.py").write_text(
        "from agentrl_core.api import hookimpl\n"
        "class Enough:\n"
        "    def __init__(self, config, context): self.stop = context.stop\n"
        "    @hookimpl\n"
        "    def on_step_end(self, step, metrics):\n"
        "        if step == 2: self.stop('two steps are enough')\n"
    )
    run = fit({**SCRIPTED, "trainer.steps": 5, "hooks": ["./enough.py:Enough"]})
    state = run.read_state()
    assert state is not None and (state.status, state.step) == ("stopped", 2)
    assert (run.checkpoints_dir / "latest").resolve().name == "step-000002"
    assert "the run stops after this step and saves a checkpoint: two steps are enough" in caplog.text


def test_failed_run_leaves_no_thread_behind(fit: Fit) -> None:
    before = set(threading.enumerate())
    with pytest.raises(PluginBrokenError, match="No space left"):
        fit({"hooks": ["./hooks.py:Broken"]})
    assert set(threading.enumerate()) <= before


def test_last_log_lines_are_in_the_run_directory(fit: Fit, tiny_run: Any) -> None:
    with pytest.raises(PluginBrokenError, match="No space left"):
        fit({**SCRIPTED, "hooks": ["./hooks.py:Broken"]})
    log = (tiny_run.folder / "runs" / "tiny" / "log.txt").read_text()
    assert "the run failed at step 1: hook" in log and "[Errno 28] No space left on device" in log


def in_python(tiny_run: Any) -> Config:
    tiny_run()
    return Config(
        model=ModelConfig(path=str(tiny_run.model)),
        data=DataConfig(train_files=[str(tiny_run.folder / "train.jsonl")], batch_size=2, max_prompt_length=64),
        rollout=RolloutConfig(
            agent=AgentConfig(loops=[AgentLoopSlot("single_turn")]), engine=EngineSlot("scripted"), n=2
        ),
        reward=RewardConfig(functions=[RewardFunctionSlot("exact_number")]),
        trainer=TrainerConfig(output_dir=str(tiny_run.folder / "runs"), steps=1, trackers=[TrackerSlot("jsonl")]),
    )


def test_configuration_in_python(tiny_run: Any) -> None:
    path = Trainer(bind(in_python(tiny_run))).fit()
    assert path == tiny_run.folder / "runs" / "run"
    again = load_config(path / "config.yaml")
    assert again.rollout.engine.name == "scripted"


def test_configuration_that_was_not_bound(tiny_run: Any) -> None:
    with pytest.raises(ConfigError, match=r"make it with load_config\(path\), or pass it through bind\(\)"):
        Trainer(in_python(tiny_run)).fit()


def test_in_a_notebook_whose_event_loop_runs(fit: Fit) -> None:
    async def cell() -> RunDir:
        return fit(VALIDATED)

    assert [row["step"] for row in asyncio.run(cell()).read_metrics()] == [0, 1, 2]


def test_memory_stays_flat(fit: Fit) -> None:
    run = fit({**SCRIPTED, "trainer.steps": 200})
    rss = {row["step"]: row["perf/rss_gib"] * 1024 for row in run.read_metrics()}
    assert rss[200] - rss[50] < 50


def test_hooks_see_trajectories_that_failed_too(fit: Fit, tiny_run: Any, tmp_path: Path) -> None:
    (tmp_path / "watch.py").write_text(WATCH)
    fit({**ONE_STEP, **reward("sometimes"), "rollout.max_failed_fraction": 1.0, "hooks": ["./watch.py:Watch"]})
    seen = [json.loads(line) for line in (tmp_path / "runs/tiny/seen.jsonl").read_text().splitlines()]
    assert len(seen) == 4 and len({each["trajectory_id"] for each in seen}) == 4
    for each in seen:
        failed = each["termination"] == "reward_error"
        assert (each["reward"] is None, bool(each["error"])) == (failed, failed)
        assert (each["split"], each["data_source"], each["num_turns"], each["attempts"]) == ("train", "tiny", 2, 1)
        assert each["sampled_tokens"] > 0 and each["messages"] and each["timings"]["total"] > 0


WATCH = """
import json
from dataclasses import asdict

from agentrl_core.api import hookimpl


class Watch:
    def __init__(self, config, context):
        self.file = context.run_dir / "seen.jsonl"

    @hookimpl
    def on_trajectory_end(self, trajectory):
        with self.file.open("a") as file:
            file.write(json.dumps(asdict(trajectory)) + "\\n")
"""


def test_a_run_answers_requests_to_change_its_replicas(fit: Fit, tiny_run: Any) -> None:
    """In the rollout that comes next: here a hook asks where ``agentrl engines`` would, which refuses such a run."""
    (tiny_run.folder / "asks.py").write_text("""
from agentrl_core.api import hookimpl

class Asks:
    def __init__(self, config, context):
        self.folder = context.run_dir / ".engine-changes"

    @hookimpl
    def on_rollout_start(self, step):
        (self.folder / f"{step}.request").write_text('{"action": "drain", "replica": 0}')
""")
    run = fit({**SCRIPTED, **ONE_STEP, "hooks": ["./asks.py:Asks"]})
    (answer,) = (run.path / ".engine-changes").iterdir()
    said = json.loads(answer.read_text())
    assert said == {"text": "replica 0 is the only one that serves; add another one first", "failed": True}


def test_a_run_that_was_asked_nothing_leaves_no_folder_of_requests(fit: Fit) -> None:
    run = fit({**SCRIPTED, **ONE_STEP})
    assert [file.name for file in run.path.glob(".*")] == [".lock"]
