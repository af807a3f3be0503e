"""Whole runs that sample while they train, in one process with a scripted engine, and what needs whole groups, steps in
order, or all of the data."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import AgentRLError, ConfigError
from agentrl_core.config import ResolvedConfig, load_config
from agentrl_core.controller.local import LocalRuntime
from agentrl_core.protocol import DataProto
from agentrl_core.runs.records import RolloutRecord, read_rollouts
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.trainer import Trainer
from agentrl_core.trainer import checkpoint as checkpoint_module
from agentrl_core.trainer import trainer as trainer_module
from agentrl_core.trainer.checkpoint import Position
from agentrl_core.trainer.model_columns import ModelColumns
from agentrl_core.trainer.prompt_data import PromptData
from tests.trainer.test_model_columns import assert_columns_of_the_whole_batch

ENGINE = """
import asyncio
from agentrl_testing.scripted_config import ScriptedConfig
from agentrl_testing.scripted_engine import ScriptedEngine


def answer(request, turn, prompt):
    return [33 + (7 * sum(request.encode()) + 11 * place) % 80 for place in range(6)]


class Live(ScriptedEngine):
    \"\"\"Takes weights while it answers; some requests take longer than a step.\"\"\"

    config_class = ScriptedConfig
    capabilities = frozenset({"logprobs", "weight_update", "live_update"})

    def __init__(self, config, context):
        super().__init__(config, context, answer)

    async def generate(self, prompt_ids, sampling_params, request_id, multi_modal=None):
        await asyncio.sleep(0.001 if sum(request_id.encode()) % 5 else 0.05)
        return await super().generate(prompt_ids, sampling_params, request_id, multi_modal)
"""
CURRICULUM = {"data.sampler": {"name": "curriculum"}, "reward.functions": [
    {"name": "./rewards.py:lower", "isolation": "inline", "range": [0.0, 1.0]}
]}  # fmt: skip


@pytest.fixture
def ahead(tiny_run: Any, installed_plugins: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trains a tiny run with ``rollout.max_staleness`` and ``pipeline_depth``; 0 is a run that alternates.

    The check that such a run has processes of its own is passed by. Models compute as groups end, and what they add to
    each batch is compared with a pass over all of it.
    """
    add = ModelColumns.add

    def checked(self: ModelColumns, batch: DataProto, metrics: dict[str, float]) -> None:
        add(self, batch, metrics)
        assert_columns_of_the_whole_batch(self, batch)

    monkeypatch.setattr(ModelColumns, "add", checked)
    monkeypatch.setattr(ModelColumns, "may_compute_ahead", True)
    (tmp_path / "live.py").write_text(ENGINE)
    monkeypatch.setattr("agentrl_core.plugins.resolution.registrations", installed_plugins)

    def start(config: ResolvedConfig) -> LocalRuntime:
        runtime = LocalRuntime()
        if config.rollout.max_staleness:
            runtime.overlap()
        return runtime

    monkeypatch.setattr(trainer_module, "start_runtime", start)

    def run(changes: dict[str, Any], staleness: int = 2, depth: int = 1, rows: Any = None) -> RunDir:
        engine = {"name": "./live.py:Live", "replicas": 1}
        own = {"rollout.engine": engine, "trainer.steps": 6, "trainer.checkpoint": {"interval": 1, "keep": 20}}
        changes = {**own, **changes}
        if engine_config := changes.pop("rollout.engine.config", None):
            changes["rollout.engine"] = {**engine, "config": engine_config}
        config = load_config(tiny_run(changes, rows))
        config.rollout.max_staleness, config.rollout.pipeline_depth = staleness, depth
        return RunDir(Trainer(config).fit())

    return run


def records(run: RunDir, steps: int) -> list[tuple[int, RolloutRecord]]:
    return [(step, record) for step in range(1, steps + 1) for record in read_rollouts(run.rollout_file(step, "train"))]


def check(run: RunDir, steps: int, *, size: int = 2, samples: int = 2) -> None:
    """Each trajectory was trained once."""
    ids = Counter(record.trajectory_id for _, record in records(run, steps))
    assert ids == Counter(
        f"train-{step:06d}-{prompt:05d}-{sample:03d}"
        for step in range(1, steps + 1) for prompt in range(size) for sample in range(samples)
    )  # fmt: skip


MANAGER = """
from dataclasses import replace
from dataclasses import replace
from pathlib import Path
from agentrl_core.api import RewardManager, RewardResult

class Ranks(RewardManager):
    capabilities = frozenset({"group"})

    async def score(self, trajectory):
        return RewardResult(float(len(trajectory.model_text)))

    async def score_group(self, trajectories, results):
        with open({calls!r}, "a") as file:
            file.write(",".join(sorted(each.extra_info["index"].__str__() for each in trajectories)) + "\\n")
        return [replace(result, score=float(place)) for place, result in enumerate(results)]
"""

TWO = """
from agentrl_core.api import AgentLoopBase


class Two(AgentLoopBase):
    async def run(self, sampling_params, *, session, raw_prompt, **row):
        rows = []
        for name in ("planner", "worker"):
            trajectory = session.trajectory(raw_prompt)
            turn = await trajectory.generate(sampling_params)
            rows.append(trajectory.finish(turn.termination))
            rows[-1].agent = name
        return rows
"""


def test_a_group_manager_scores_each_group_once(ahead: Any, tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(MANAGER.replace("{calls!r}", repr(str(tmp_path / "calls"))))
    run = ahead({"reward.manager": {"name": "./ranks.py:Ranks"}})
    check(run, 6)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert all(len(set(call.split(","))) == 1 and len(call.split(",")) == 2 for call in calls)
    # Groups that are under way at the end are not trained.
    assert 12 <= len(calls) <= 16
    assert max(row["staleness/max"] for row in run.read_metrics()) in (1.0, 2.0)
    for _, record in records(run, 6):
        assert record.reward == float(record.trajectory_id[-1])


def test_a_group_that_cannot_be_ranked_is_left_out_and_the_run_goes_on(ahead: Any, tmp_path: Path) -> None:
    source = MANAGER.replace("{calls!r}", repr(str(tmp_path / "calls")))
    fails = (
        '        if trajectories[0].extra_info["index"] == 1:\n            raise ValueError("a tie")\n        with open'
    )
    (tmp_path / "ranks.py").write_text(source.replace("        with open", fails))
    run = ahead({
        "reward.manager": {"name": "./ranks.py:Ranks"}, "rollout.max_failed_fraction": 1.0,
    })  # fmt: skip
    check(run, 6)
    ended = {record.termination for _, record in records(run, 6)}
    assert ended == {"reward_error", "length"} or ended == {"reward_error", "completed"}


def test_agents_of_a_trajectory_are_trained_together(ahead: Any, tmp_path: Path) -> None:
    """Each agent's rows are a group of their own, and all of a prompt are in one batch."""
    (tmp_path / "two.py").write_text(TWO)
    run = ahead({"rollout.agent.loops": ["./two.py:Two"], "rollout.max_response_length": 40})
    seen: dict[str, set[int]] = {}
    for step, record in records(run, 6):
        seen.setdefault(record.uid.partition("@")[0], set()).add(step)
    assert len(seen) == 12 and all(len(steps) == 1 for steps in seen.values())
    names = {record.trajectory_id for _, record in records(run, 6)}
    assert len(names) == 48
    for row in run.read_metrics():
        assert row["reward/agent/planner"] >= 0 and row["reward/agent/worker"] >= 0


@pytest.mark.parametrize("sampler", ["curriculum", "levels"])
def test_a_sampler_learns_of_every_prompt_once_over_changes_of_the_bound(
    ahead: Any, sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that alternates is resumed as one that samples ahead, with other bounds and depths, and back."""
    update, learned = PromptData.update, list[tuple[int, list[int]]]()

    def note(self: PromptData, step: int, rewards: Any) -> None:
        learned.append((step, [len(each) for each in rewards]))
        update(self, step, rewards)

    monkeypatch.setattr(PromptData, "update", note)
    before = 0
    for steps, staleness, depth in ((2, 0, 1), (4, 2, 1), (6, 4, 3), (8, 1, 1), (9, 0, 1)):
        changes = {**CURRICULUM, "data.sampler": {"name": sampler}, "trainer.steps": steps}
        run = ahead({**changes, "trainer.resume": "auto" if before else "never"}, staleness, depth)
        check(run, steps)
        for step, record in records(run, steps):
            ages = [step - 1 - version for version in record.policy_versions if version >= 0]
            assert step <= before or (0 <= min(ages) and max(ages) <= staleness)
        before = steps
    assert learned == [(step, [2, 2]) for step in range(1, 10)]


def test_a_checkpoint_within_a_step_is_not_resumed_by_a_run_that_alternates(
    ahead: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead({"trainer.steps": 3})
    read = checkpoint_module.read_state

    def within(path: Path) -> Any:
        return replace(read(path), position=Position(5, [6], {}, {}))

    monkeypatch.setattr(checkpoint_module, "read_state", within)
    with pytest.raises(ConfigError, match="rollout.max_staleness: found 0, .* set rollout.max_staleness to 1 or more"):
        ahead({"trainer.steps": 5, "trainer.resume": "auto"}, staleness=0)


def test_streamed_rows(ahead: Any) -> None:
    run = ahead({"data.streaming": True})
    check(run, 6)
    resumed = ahead({"data.streaming": True, "trainer.steps": 9, "trainer.resume": "auto"})
    check(resumed, 9)


@pytest.mark.parametrize("warmup", [0, 3])
def test_ppo_with_a_critic(ahead: Any, warmup: int) -> None:
    run = ahead({
        "algorithm.advantage": {"name": "gae"}, "critic.warmup_steps": warmup, "algorithm.kl_coef": 0.01,
        "critic.optimizer": {"lr": 1e-3},
    })  # fmt: skip
    check(run, 6)
    rows = run.read_metrics()
    assert [("actor/grad_norm" in row) for row in rows] == [step > warmup for step in range(1, 7)]
    assert all(row["critic/grad_norm"] > 0 for row in rows)
    assert rows[-1]["critic/values/max"] != 0


RAISES = """
from agentrl_core.api import hookimpl


class Raises:
    def __init__(self, config, context): ...

    @hookimpl
    def {hook}(self{arguments}):
        if {condition}:
            raise OSError(28, "No space left on device")
"""
HOOKS = {
    "on_rollout_start": (", step", "step == 3"), "on_rollout_end": (", step, batch", "step == 3"),
    "on_batch_ready": (", step, batch", "step == 3"), "on_step_end": (", step, metrics", "step == 3"),
    "on_trajectory_end": (", step, trajectory", "step == 3"), "on_checkpoint_saved": (", step, path", "step == 3"),
}  # fmt: skip


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_raises_ends_the_run_and_a_resume_trains_the_rest(ahead: Any, tmp_path: Path, hook: str) -> None:
    arguments, condition = HOOKS[hook]
    (tmp_path / "raises.py").write_text(RAISES.format(hook=hook, arguments=arguments, condition=condition))
    with pytest.raises(AgentRLError, match="No space left on device"):
        ahead({"hooks": ["./raises.py:Raises"]})
    run = ahead({"trainer.resume": "auto"})
    check(run, 6)


def test_an_engine_that_always_fails_ends_the_run(ahead: Any) -> None:
    with pytest.raises(AgentRLError, match="trajectories failed after 0 retries"):
        ahead({"rollout.engine.config": {"fail_every": 1}})


def test_greedy_baselines_and_replaced_prompts(ahead: Any) -> None:
    """``only_first`` gives samples of one prompt different rewards, all others have none."""
    run = ahead({
        "algorithm.advantage": {"name": "remax"}, "rollout.resample_rounds": 8,
        "reward.functions": [{"name": "./rewards.py:only_first", "isolation": "inline"}],
    })  # fmt: skip
    trained = [record for _, record in records(run, 6) if record.advantage is not None]
    assert len({record.trajectory_id for record in trained}) == len(trained) == 24
    assert all(row["rollout/replaced_share"] > 0 for row in run.read_metrics())


def test_an_update_that_an_engine_refuses_ends_the_run_and_a_resume_trains_the_rest(ahead: Any, tmp_path: Path) -> None:
    refuses = """
    async def update_weights(self, update, version):
        if version == 3:
            raise EngineError("no room")
        await super().update_weights(update, version)
"""
    imported = "from agentrl_core.api import EngineError\n"
    (tmp_path / "refuses.py").write_text(imported + ENGINE + refuses)
    with pytest.raises(AgentRLError, match="no room"):
        ahead({"rollout.engine": {"name": "./refuses.py:Live", "replicas": 1}})
    check(ahead({"trainer.resume": "auto"}), 6)


def test_validation_has_one_version_of_the_weights_that_of_its_step(ahead: Any) -> None:
    run = ahead({"data.validation_files": ["validation.jsonl"], "trainer.validation": {"interval": 2}})
    for step in (2, 4, 6):
        found = list(read_rollouts(run.rollout_file(step, "validation")))
        assert found and {version for record in found for version in record.policy_versions if version >= 0} == {step}
