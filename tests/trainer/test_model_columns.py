"""What models add to a batch, computed for groups that have ended while others run: the same as of the whole batch."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl_core.api import AgentLoopOutput, EngineContext, RewardResult, Termination
from agentrl_core.api.tree import Tree
from agentrl_core.config import load_config
from agentrl_core.controller.local import LocalRuntime
from agentrl_core.protocol import DataProto
from agentrl_core.rollout.loop_output import adopt
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.trainer.metrics import PhaseTimer
from agentrl_core.trainer.model_columns import ModelColumns
from agentrl_core.trainer.roles import start_workers
from agentrl_core.workers.micro_batching import narrowed

PPO = {"algorithm.advantage": {"name": "gae"}, "algorithm.kl_coef": 0.1}
FROM_A_TEACHER = {"algorithm.advantage": {"name": "on_policy_distillation"}}
ROLES = {"actor": "compute_log_prob", "reference": "compute_ref_log_prob", "critic": "compute_values",
         "teacher": "compute_ref_log_prob"}  # fmt: skip
COLUMNS = ("old_log_probs", "ref_log_prob", "values", "teacher_log_probs")


def assert_columns_of_the_whole_batch(models: ModelColumns, batch: DataProto) -> None:
    """What a batch has got, wherever it was computed, is what a pass over all of it gives."""
    passes = {"old_log_probs": models._actor, "ref_log_prob": models._reference, "values": models._critic}
    for name, each in passes.items():
        if each is not None:
            whole = each.compute(narrowed(batch, ()))[0]
            assert batch.batch[name].clone().sub(whole).abs().max() < 1e-5, name


class Counted:
    """A role that notes the tokens of each row that it computes."""

    def __init__(self, group: Any, method: str) -> None:
        self.rows: Counter[tuple[int, ...]] = Counter()

        def compute(batch: DataProto) -> DataProto:
            # A view would keep the columns padded.
            for ids, mask in zip(
                *(batch.batch[name].tolist() for name in ("input_ids", "attention_mask")), strict=True
            ):
                self.rows[tuple(token for token, is_token in zip(ids, mask, strict=True) if is_token)] += 1
            found: DataProto = getattr(group, method)(batch)
            return found

        setattr(self, method, compute)


def group(number: int, samples: int = 3, termination: Termination = Termination.COMPLETED) -> list[TrajectoryResult]:
    dice = random.Random(number)
    prompt = [dice.randrange(10, 80) for _ in range(dice.randint(2, 6))]
    results = []
    for sample in range(samples):
        ids = [dice.randrange(10, 80) for _ in range(dice.randint(1, 9))]
        mask = [int(dice.random() < 0.8) for _ in ids[1:]] + [1]
        output = AgentLoopOutput(prompt, ids, mask, [-1.0 * each for each in mask], termination)
        row, name = {"uid": f"train-1-{number}"}, f"{number}-{sample}"
        results.append(
            TrajectoryResult(row, name, termination, adopt("by hand", Tree(), output), RewardResult(float(sample)))
        )
    return results


@pytest.fixture
def make(tiny_run: Any, tiny_model: Any) -> Iterator[Callable[..., tuple[ModelColumns, dict[str, Counted]]]]:
    runtime = LocalRuntime()

    def build(**changes: Any) -> tuple[ModelColumns, dict[str, Counted]]:
        config = load_config(tiny_run({"algorithm.old_log_probs": "actor", **changes}))
        groups = start_workers(config, runtime, 4)
        if "critic" in groups:
            torch.nn.init.normal_(groups["critic"].workers[0]._backend._model.value_head.weight)
        counted = {role: Counted(each, ROLES[role]) for role, each in groups.items()}
        engines = SimpleNamespace(context=EngineContext(str(tiny_model), max_model_len=64, vocab_size=256))
        roles: Any = SimpleNamespace(**{name: counted.get(name) for name in ROLES}, engines=engines)
        preparation: Any = SimpleNamespace(chat=SimpleNamespace(pad_token_id=0))
        return ModelColumns(config, roles, preparation, PhaseTimer(), 0), counted

    with runtime:
        yield build


def added(columns: ModelColumns, groups: Sequence[list[TrajectoryResult]], edit: Any = lambda batch: None) -> DataProto:
    batch = columns.batch([result for each in groups for result in each], {"step": 1})
    edit(batch)
    columns.add(batch, {})
    return batch


def same(one: DataProto, other: DataProto) -> None:
    present = [name for name in COLUMNS if name in other.batch.keys()]
    assert [name for name in COLUMNS if name in one.batch.keys()] == present and len(present) > 1
    for name in present:
        torch.testing.assert_close(one.batch[name].clone(), other.batch[name].clone(), atol=1e-5, rtol=1e-5)
        assert other.batch[name].abs().max() > 1e-3


@pytest.mark.parametrize("case", ["ppo", "teacher"])
def test_rows_computed_ahead_are_those_of_the_whole_batch_and_computed_once(
    make: Any, tiny_model: Any, case: str
) -> None:
    changes = PPO if case == "ppo" else {**FROM_A_TEACHER, "teacher.path": str(tiny_model)}
    columns, counted = make(**changes)
    groups = [group(number) for number in range(6)]
    whole = added(columns, groups)
    for each in counted.values():
        each.rows.clear()
    # One alone, two together, and the last ones with the batch; in another order than that of the batch.
    columns.ahead(groups[4])
    columns.ahead([*groups[1], *groups[0]])
    columns.ahead([])
    same(added(columns, groups), whole)
    rows = {result.trajectory_id for each in groups for result in each}
    for each in counted.values():
        assert sum(each.rows.values()) == len(rows) and set(each.rows.values()) == {1}


def test_an_update_makes_trained_models_compute_again_and_frozen_ones_not(make: Any) -> None:
    columns, counted = make(**PPO, **{
        "rollout.max_staleness": 2, "rollout.engine.placement": "standalone", "cluster.runtime": "ray",
        "algorithm.uncorrected_staleness": True,
    })  # fmt: skip
    groups = [group(number) for number in range(3)]
    columns.ahead([result for each in groups for result in each])
    columns.updated(1)
    added(columns, groups)
    assert {role: set(each.rows.values()) for role, each in counted.items()} == {
        "actor": {2}, "critic": {2}, "reference": {1},
    }  # fmt: skip
    # After the bound no batch can have them.
    columns.updated(3)
    added(columns, groups)
    assert set(counted["reference"].rows.values()) == {2}


def test_what_a_step_did_not_use_is_dropped_with_it(make: Any) -> None:
    """Of a group that was replaced, in a run that trains what it has just sampled."""
    columns, counted = make(**PPO)
    columns.ahead(group(7))
    columns.updated(1)
    assert not any(each.known for each in columns._passes)
    added(columns, [group(7)])
    assert {value for each in counted.values() for value in each.rows.values()} == {2}


def test_failed_trajectories_are_not_computed(make: Any) -> None:
    columns, counted = make(**PPO)
    columns.ahead([*group(1, termination=Termination.ENGINE_ERROR), *group(2)])
    assert all(sum(each.rows.values()) == 3 for each in counted.values())
    columns.ahead(group(3, termination=Termination.REWARD_ERROR))
    assert all(sum(each.rows.values()) == 3 for each in counted.values())


def test_a_row_that_a_hook_changed_is_computed_again(make: Any) -> None:
    """The rollout's end is after the pass, and a hook may write into the batch."""

    def last_token_only(batch: DataProto) -> None:
        mask = batch.batch["response_mask"]
        mask[0] = False
        mask[0, 0] = True

    columns, counted = make(**PPO)
    groups = [group(number) for number in range(2)]
    whole = added(columns, groups, last_token_only)
    assert (whole.batch["old_log_probs"][0] != 0).sum() == 1
    columns.ahead([result for each in groups for result in each])
    same(added(columns, groups, last_token_only), whole)


def test_log_probs_that_the_rollout_gives_are_not_computed_ahead(make: Any) -> None:
    columns, counted = make(**{**PPO, "algorithm.old_log_probs": "rollout"})
    columns.ahead(group(1))
    assert not counted["actor"].rows and sum(counted["reference"].rows.values()) == 3


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"cluster.runtime": "local"}, False),
        ({"rollout.engine.placement": "colocated"}, False),
        ({"rollout.deterministic": True}, False),
        ({"algorithm.old_log_probs": "rollout"}, False),
        ({"algorithm.old_log_probs": "rollout", "algorithm.kl_coef": 0.1}, True),
    ],
)
def test_only_engines_of_their_own_leave_time_for_it(make: Any, changes: dict[str, Any], expected: bool) -> None:
    standalone = {"cluster.runtime": "ray", "rollout.engine.placement": "standalone"}
    if changes.get("cluster.runtime") == "local":
        del standalone["rollout.engine.placement"]
    columns, _ = make(**{**standalone, **changes})
    assert columns.may_compute_ahead is expected


ANSWERS = """
def answer(request, turn, prompt):
    return [33 + (7 * sum(request.encode()) + 11 * place) % 80 for place in range(6)]
"""
GATE = """
import asyncio
from pathlib import Path

from agentrl_core.api import AgentLoopBase


class Gate(AgentLoopBase):
    \"\"\"Samples of the second prompt wait until something has been computed for the first.\"\"\"

    async def run(self, sampling_params, *, session, raw_prompt, prompt_index, **row):
        while prompt_index and not Path({file!r}).exists():
            await asyncio.sleep(0.001)
        trajectory = session.trajectory(raw_prompt)
        turn = await trajectory.generate(sampling_params)
        return trajectory.finish(turn.termination)
"""


def test_a_step_computes_the_groups_that_have_ended_while_it_waits_for_others(
    fit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it trains as one that computes them at its end does."""
    (tmp_path / "early_answers.py").write_text(ANSWERS)
    monkeypatch.syspath_prepend(tmp_path)
    engine = {"name": "scripted", "config": {"script": "early_answers:answer"}}
    changes = {**PPO, "rollout.engine": engine, "trainer.steps": 2, "critic.optimizer": {"lr": 1e-3}}
    late = fit(changes)
    opened = tmp_path / "opened"
    (tmp_path / "gate.py").write_text(GATE.format(file=str(opened)))
    compute, threads = ModelColumns.ahead, set[int]()

    def ahead(self: ModelColumns, results: Sequence[TrajectoryResult]) -> None:
        compute(self, results)
        threads.add(threading.get_ident())
        opened.touch()

    monkeypatch.setattr(ModelColumns, "ahead", ahead)
    monkeypatch.setattr(ModelColumns, "may_compute_ahead", True)
    early = fit({**changes, "rollout.agent.loops": ["./gate.py:Gate"], "trainer.name": "early"})
    assert threads and threading.get_ident() not in threads
    first, other = early.read_metrics()[0], late.read_metrics()[0]
    assert first["perf/early_log_probs_share"] == 0.5
    assert 0 < first["timing/early_log_probs"] <= first["timing/rollout"]
    assert "perf/early_log_probs_share" not in other and "timing/early_log_probs" not in other
    assert early.read_metrics()[1]["actor/grad_norm"] > 0 and early.read_metrics()[1]["critic/values/mean"] != 0
    for one, before in zip(early.read_metrics(), late.read_metrics(), strict=True):
        for name in ("actor/grad_norm", "actor/kl", "critic/loss", "critic/values/mean", "actor/ppo_kl"):
            assert one[name] == pytest.approx(before[name], rel=1e-4, abs=1e-6), name
