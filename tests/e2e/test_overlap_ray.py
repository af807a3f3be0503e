"""Real runs that sample while they train: engines and trainer in processes of their own."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import EngineError
from agentrl_core.protocol import DataProto
from agentrl_core.runs.records import RolloutRecord, read_rollouts
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.trainer.model_columns import ModelColumns
from tests.trainer.test_model_columns import assert_columns_of_the_whole_batch

pytestmark = pytest.mark.ray
OVERLAPS = {
    "cluster.runtime": "ray",
    "rollout.engine.placement": "standalone",
    "rollout.max_staleness": 2,
    "algorithm.loss.name": "dppo",
    "trainer.steps": 5,
    "trainer.checkpoint": {"interval": 1},
    "trainer.validation": {"interval": 2},
    "data.validation_files": ["validation.jsonl"],
}


def trained(run: RunDir, steps: int) -> list[tuple[int, RolloutRecord]]:
    return [(step, record) for step in range(1, steps + 1) for record in read_rollouts(run.rollout_file(step, "train"))]


def check(run: RunDir, steps: int) -> None:
    """Each of 2 samples of 2 prompts a step is there once, and no token is too old."""
    records = trained(run, steps)
    ids = [record.trajectory_id for _, record in records]
    assert sorted(ids) == sorted(
        f"train-{step:06d}-{prompt:05d}-{sample:03d}" for step in range(1, steps + 1) for prompt in (0, 1)
        for sample in (0, 1)
    )  # fmt: skip
    for step, record in records:
        ages = [step - 1 - version for version in record.policy_versions if version >= 0]
        assert ages and 0 <= min(ages) and max(ages) <= 2


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How much of each step was computed as groups ended; it must be what a pass over the whole batch gives."""
    add, found = ModelColumns.add, list[float]()

    def checked(self: ModelColumns, batch: DataProto, metrics: dict[str, float]) -> None:
        add(self, batch, metrics)
        found.append(metrics["perf/early_log_probs_share"])
        assert_columns_of_the_whole_batch(self, batch)

    monkeypatch.setattr(ModelColumns, "add", checked)
    return found


def test_every_prompt_is_trained_once_and_no_token_is_too_old(fit: Callable[..., RunDir], shares: list[float]) -> None:
    run = fit({**OVERLAPS, "rollout.on_new_weights": "continue", "algorithm.kl_coef": 0.1})
    check(run, 5)
    assert len(shares) == 5
    rows = [row for row in run.read_metrics() if row["step"]]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        assert row["staleness/max"] <= 2
        # Only rows of the newest weights are compared, and the engine has them.
        assert row.get("rollout/logprob_gap_max", 0.0) < 1e-3
    # The first batch is sampled with the weights that it updates; the second begins at the same time.
    assert rows[0]["staleness/max"] == 0
    assert max(row["staleness/max"] for row in rows) >= 1


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_prompts_that_it_has_not_trained(
    tiny_run: Any, start_agentrl: Callable[..., Any], warm_ray: dict[str, str]
) -> None:
    changes = {"hooks": ["./hooks.py:Pause"], "trainer.trackers": ["jsonl", "console"]}
    tiny_run({**OVERLAPS, **changes, "rollout.on_new_weights": "restart"})
    killed = start_agentrl("train", "config.yaml", TINY_PAUSE_AT="4", **warm_ray)
    killed.read_until("paused at step 4")
    killed.process.kill()
    code, _ = killed.wait()
    assert code == -signal.SIGKILL
    code, output = start_agentrl("train", "config.yaml", "--resume", **warm_ray).wait()
    assert code == 0, output
    check(RunDir(tiny_run.folder / "runs" / "tiny"), 5)
    assert "what would help most" in output or "neither trainer nor rollout waited" in output


def test_a_deterministic_run_repeats_itself(fit: Callable[..., RunDir]) -> None:
    changes = {**OVERLAPS, "rollout.deterministic": True, "rollout.max_staleness": 1, "trainer.steps": 3}
    first, second = (fit({**changes, "trainer.name": name}) for name in ("first", "second"))
    for (_, one), (_, other) in zip(trained(first, 3), trained(second, 3), strict=True):
        assert (one.uid, one.response_ids, one.response_logprobs, one.policy_versions) == (
            other.uid, other.response_ids, other.response_logprobs, other.policy_versions,
        )  # fmt: skip
    weights = [[row.get("actor/grad_norm") for row in run.read_metrics()] for run in (first, second)]
    assert weights[0] == weights[1]


GATE = """
import asyncio
from pathlib import Path

from agentrl_core.api import AgentLoopBase


class Gate(AgentLoopBase):
    \"\"\"All prompts but the first one wait until something has been computed for that.\"\"\"

    async def run(self, sampling_params, *, session, raw_prompt, uid, **row):
        while uid.startswith("train") and uid != "train-000001-00000" and not Path({file!r}).exists():
            await asyncio.sleep(0.01)
        trajectory = session.trajectory(raw_prompt)
        turn = await trajectory.generate(sampling_params)
        return trajectory.finish(turn.termination)
"""


@pytest.mark.slow
def test_log_probs_and_values_computed_as_groups_end_are_those_of_the_whole_batch(
    fit: Callable[..., RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: list[float]
) -> None:
    """With two ranks, in a run that alternates."""
    opened = tmp_path / "opened"
    (tmp_path / "gate.py").write_text(GATE.format(file=str(opened)))
    compute = ModelColumns.ahead

    def ahead(self: ModelColumns, results: Any) -> None:
        compute(self, results)
        opened.touch()

    monkeypatch.setattr(ModelColumns, "ahead", ahead)
    run = fit({
        **OVERLAPS, "rollout.max_staleness": 0, "rollout.agent.loops": ["./gate.py:Gate"],
        "algorithm.advantage": {"name": "gae"}, "algorithm.kl_coef": 0.1, "critic.optimizer": {"lr": 1e-2},
        "trainer.steps": 3, "data.validation_files": [], "cluster.processes_per_node": 2,
    })  # fmt: skip
    check(run, 3)
    assert len(shares) == 3 and shares[0] >= 0.5
    assert run.read_metrics()[-1]["critic/values/std"] > 0


MORTAL = """
import os
from pathlib import Path
from agentrl_testing.scripted_config import ScriptedConfig
from agentrl_testing.scripted_engine import ScriptedEngine


def answer(request, turn, prompt):
    return [33 + (7 * sum(request.encode()) + 11 * place) % 80 for place in range(6)]


class Mortal(ScriptedEngine):
    \"\"\"Its process dies in the middle of an update.\"\"\"

    config_class = ScriptedConfig
    capabilities = frozenset(("logprobs", "weight_update", "live_update"))

    def __init__(self, config, context):
        super().__init__(config, context, answer)

    async def update_weights(self, update, version):
        died = Path({file!r})
        if version == 2 and (not died.exists() or {always}):
            died.touch()
            os._exit(1)
        await super().update_weights(update, version)
"""


@pytest.mark.slow
@pytest.mark.parametrize("always", [False, True])
def test_a_replica_that_dies_in_an_update_is_replaced_and_a_run_without_any_ends(
    fit: Callable[..., RunDir], tmp_path: Path, always: bool
) -> None:
    (tmp_path / "mortal.py").write_text(MORTAL.format(file=str(tmp_path / "died"), always=always))
    changes = {
        **OVERLAPS, "rollout.engine": {"name": "./mortal.py:Mortal", "placement": "standalone", "restarts": 1},
        "trainer.validation.interval": 0,
    }  # fmt: skip
    del changes["rollout.engine.placement"]
    if always:
        with pytest.raises(EngineError, match="no engine replica is alive"):
            fit(changes)
        return
    check(fit(changes), 5)
    assert (tmp_path / "died").exists()
