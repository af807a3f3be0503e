"""Sampling ahead of the trainer: the bound holds, and each prompt is trained exactly once, whatever the schedule."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter

from agentrl_core.api import (
    BatchPolicy,
    PipelineState,
    PromptOutcome,
    PromptSampler,
    RewardResult,
    RolloutError,
    Termination,
    WorkerError,
)
from agentrl_core.config.schema import SamplingConfig
from agentrl_core.data.rows import PromptBatch
from agentrl_core.rollout.deadline import Deadline
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.trainer.checkpoint import Position, TrainerState
from agentrl_core.trainer.metrics import PhaseTimer
from agentrl_core.trainer.pipeline import Pipeline
from agentrl_core.trainer.prompt_data import PromptData

ROWS = 1000


class InOrder(PromptSampler):
    """Row p for position p; once it has learned, rows from the other end, so that a row drawn twice would differ."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.learned: list[int] = []
        self.outcomes: dict[int, list[PromptOutcome]] = {}

    def batch(self, step: int) -> list[int]:
        first = (step - 1) * self.batch_size
        shift = sum(self.learned)
        return [(position + 7 * shift) % ROWS for position in range(first, first + self.batch_size)]

    def update(self, step: int, outcomes: Any) -> None:
        assert not self.learned or step == self.learned[-1] + 1, "steps are learned in their order"
        self.learned.append(step)
        self.outcomes[step] = list(outcomes)

    def state_dict(self) -> dict[str, Any]:
        return {"learned": self.learned}

    def load_state_dict(self, state: Any) -> None:
        self.learned = list(state["learned"])


@dataclass
class Sampled:
    """A manager whose groups take as many turns of the event loop as a seeded dice says."""

    dice: random.Random
    silent: float = 0.0
    failing: float = 0.0
    in_flight: int = 0
    without_signal: int = 0
    on_start: Any = staticmethod(lambda prompts: None)

    async def watched(self, work: Any) -> Any:
        return await work

    async def sample(self, prompts: PromptBatch) -> list[TrajectoryResult]:
        self.on_start(prompts)
        self.in_flight += 1
        try:
            for _ in range(int(self.dice.lognormvariate(2, 1)) * (10 if self.dice.random() < 0.05 else 1)):
                await asyncio.sleep(0)
            silent, failed = self.dice.random() < self.silent, self.dice.random() < self.failing
            self.without_signal += silent or failed
            results = []
            for sample, row in enumerate(prompts.rows):
                result = TrajectoryResult(row, f"{row['uid']}-{sample}", Termination.COMPLETED)
                if failed:
                    result.termination = Termination.ENGINE_ERROR
                else:
                    result.reward = RewardResult(score=float(row["number"] if silent else row["number"] + sample))
                results.append(result)
            return results
        finally:
            self.in_flight -= 1

    async def score(self, results: Any) -> None:
        pass

    def check_failed(self, results: Any) -> None:
        pass


class OneThread(Any):  # type: ignore[misc]
    """A runtime whose tasks go on only during its calls: a schedule is repeatable."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, work: Any) -> Any:
        return self._runner.run(work)

    def let_pass(self, turns: int) -> None:
        async def wait() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        self.run(wait())


def config_of(batch_size: int, staleness: int, depth: int, *, n: int = 2, deterministic: bool = False, rounds: int = 0,
              policy: type = Deadline) -> Any:  # fmt: skip
    slot = SimpleNamespace(build=lambda context: policy(None, context), registered_name=policy.__name__)
    rollout = SimpleNamespace(
        max_staleness=staleness, batch_policy=slot, n=n, sampling=SamplingConfig(), deterministic=deterministic,
        resample_rounds=rounds,
    )  # fmt: skip
    algorithm = SimpleNamespace(advantage=SimpleNamespace(has=lambda name: False))
    data = SimpleNamespace(batch_size=batch_size)
    return SimpleNamespace(
        rollout=rollout, pipeline_depth=depth, data=data, algorithm=algorithm, some_advantage_has=lambda name: False
    )  # fmt: skip


@dataclass
class Life:
    """What a run did, over all its processes."""

    trained: Counter[int] = field(default_factory=Counter)
    replaced: Counter[int] = field(default_factory=Counter)
    ages: list[int] = field(default_factory=list)
    outcomes: dict[int, list[PromptOutcome]] = field(default_factory=dict)
    batches: list[list[int]] = field(default_factory=list)
    rows: dict[int, int] = field(default_factory=dict)


def position_of(result: TrajectoryResult, size: int) -> int:
    step, index = int(result.row["uid"].split("-")[1]), int(result.row["prompt_index"])
    return (step - 1) * size + index


def run(config: Any, steps: int, dice: random.Random, life: Life, *, state: TrainerState | None, until: int,
        silent: float = 0.0, failing: float = 0.0) -> TrainerState:  # fmt: skip
    """Train from a checkpoint up to a step, and return what the last checkpoint holds."""
    size, staleness, depth = config.data.batch_size, config.rollout.max_staleness, config.pipeline_depth
    sampler = InOrder(size)
    if state is not None:
        sampler.load_state_dict(state.sampler)
    data = PromptData([{"raw_prompt": [], "number": row} for row in range(ROWS)], [], sampler, 1, size, [])
    step = state.step if state else 0
    manager, runtime = Sampled(dice, silent, failing), OneThread()
    now = {"version": step, "started": 0}
    in_life = sum(life.trained.values())

    def on_start(prompts: PromptBatch) -> None:
        # Groups begun in this process, those trained before it included, and those that were replaced left out.
        now["started"] += len(prompts) // config.rollout.n
        replaced = manager.without_signal if config.rollout.resample_rounds else 0
        assert in_life + now["started"] - replaced <= (depth + now["version"] + 1) * size

    manager.on_start = on_start
    pipeline = Pipeline(
        config,
        data,
        steps,
        manager,
        PhaseTimer(),
        runtime=runtime,
        step=step,
        position=state.position if state else None,
    )
    last = state
    for step in range(pipeline._version + 1, until + 1):
        results = pipeline.batch(step)
        seen = Counter(position_of(result, size) for result in results)
        assert all(count == config.rollout.n for count in seen.values()), "groups come whole"
        replaced = {position_of(result, size) for result in results if result.replaced}
        life.trained.update(seen.keys() - replaced)
        life.replaced.update(replaced)
        assert len(seen) - len(replaced) == size
        life.batches.append(sorted(seen))
        for result in results:
            row = life.rows.setdefault(position_of(result, size), result.row["number"])
            assert row == result.row["number"], "a prompt that is sampled again is the same prompt"
        life.ages += pipeline._ages
        runtime.let_pass(dice.randrange(30))
        pipeline.before_weights()
        now["version"] = step
        pipeline.weights_changed(step)
        pipeline.trained(step, results)
        metrics = pipeline.metrics(0.0)
        assert metrics["staleness/max"] <= staleness
        state = TrainerState(step, None, None, "", sampler=sampler.state_dict(), position=pipeline.position)
        if dice.random() < 0.7 or step == until:
            last = TypeAdapter(TrainerState).validate_json(json.dumps(asdict(state)), strict=True)
    life.outcomes |= sampler.outcomes
    pipeline.close()
    assert manager.in_flight == 0
    assert last is not None
    return last


@pytest.mark.parametrize("seed", range(60))
def test_every_prompt_once_and_none_too_old_in_random_schedules(seed: int) -> None:
    """Slow, failed and replaced groups, and resumes from the newest checkpoint at random steps."""
    dice = random.Random(seed)
    size, staleness = dice.choice([1, 2, 3, 8]), dice.choice([1, 2, 4, 8])
    rounds = dice.choice([0, 0, 5])
    config = config_of(size, staleness, dice.randint(1, staleness), rounds=rounds, deterministic=False)
    steps, life, state = dice.randint(4, 12), Life(), None
    silent, failing = (0.2 if rounds else 0.0), dice.choice([0.0, 0.1])
    while state is None or state.step < steps:
        before = state.step if state else 0
        state = run(
            config,
            steps,
            dice,
            life,
            state=state,
            until=dice.randint(before + 1, steps),
            silent=silent,
            failing=failing,
        )
    assert set(life.trained.values()) == {1}
    assert sum(life.trained.values()) == steps * size
    assert not set(life.trained) & set(life.replaced)
    assert max(life.ages) <= staleness
    done = sorted({*life.trained, *life.replaced})
    if not rounds:
        assert done == list(range(steps * size)), "none is skipped"
        assert sorted(life.outcomes) == list(range(1, steps + 1))
        for step, outcomes in life.outcomes.items():
            for index, outcome in enumerate(outcomes):
                row = life.rows[(step - 1) * size + index]
                assert outcome.row == row
                assert outcome.rewards in ([], [float(row), float(row) + 1])


class ByPrompt(Sampled):
    """Some prompts have no signal, whenever they are sampled."""

    async def sample(self, prompts: PromptBatch) -> list[TrajectoryResult]:
        await asyncio.sleep(0)
        results = [TrajectoryResult(row, row["uid"], Termination.COMPLETED) for row in prompts.rows]
        for number, result in enumerate(results):
            silent = random.Random(result.row["uid"]).random() < self.silent
            result.reward = RewardResult(score=float(not silent and number))
        return results


def test_deterministic_batches_are_filled_up_to_the_last_one() -> None:
    manager, runtime, steps = ByPrompt(random.Random(0), silent=0.3), OneThread(), 5
    data = PromptData([{"raw_prompt": [], "number": 0}] * ROWS, [], InOrder(4), 1, 4, [])
    config = config_of(4, 1, 1, deterministic=True, rounds=4)
    pipeline = Pipeline(config, data, steps, manager, PhaseTimer(), runtime=runtime, step=0, position=None)
    for step in range(1, steps + 1):
        results = pipeline.batch(step)
        assert len({result.row["uid"] for result in results if not result.replaced}) == 4
        pipeline.before_weights()
        pipeline.weights_changed(step)
        pipeline.trained(step, results)
    pipeline.close()


@pytest.mark.parametrize("seed", range(10))
def test_models_see_whole_groups_that_the_trainer_waits_for(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the weights that the next batch updates, each group once, and no more than a batch with one version."""
    dice = random.Random(seed)
    size, staleness = dice.choice([2, 3, 8]), dice.choice([1, 2, 4])
    config = config_of(size, staleness, dice.randint(1, staleness), rounds=dice.choice([0, 5]))
    manager, runtime, steps = Sampled(dice, silent=0.2), OneThread(), 8
    data = PromptData([{"raw_prompt": [], "number": row} for row in range(ROWS)], [], InOrder(size), 1, size, [])
    seen: dict[int, list[int]] = {}
    waiting = {"version": 0, "waits": False}

    def ahead(results: list[TrajectoryResult]) -> None:
        assert waiting["waits"]
        counts = Counter(position_of(result, size) for result in results)
        assert set(counts.values()) == {config.rollout.n} and not any(result.replaced for result in results)
        seen.setdefault(waiting["version"], []).extend(counts)

    async def in_turns(function: Any, *args: Any) -> None:
        function(*args)
        for _ in range(dice.randrange(8)):
            await asyncio.sleep(0)

    monkeypatch.setattr("agentrl_core.trainer.pipeline.in_daemon_thread", in_turns)
    pipeline = Pipeline(
        config, data, steps, manager, PhaseTimer(), ahead, runtime=runtime, step=0, position=None
    )  # fmt: skip
    trained: set[int] = set()
    for step in range(1, steps + 1):
        waiting["waits"] = True
        results = pipeline.batch(step)
        waiting["waits"] = False
        runtime.let_pass(dice.randrange(30))
        pipeline.weights_changed(step)
        pipeline.trained(step, results)
        found = seen.get(step - 1, [])
        assert len(found) == len(set(found)) and not trained & set(found)
        trained |= {position_of(result, size) for result in results}
        waiting["version"] = step
    assert any(seen.values())
    pipeline.close()


def test_an_error_of_a_pass_that_is_computed_ahead_ends_the_run() -> None:
    def fails(results: Any) -> None:
        raise WorkerError("out of memory")

    data = PromptData([{"raw_prompt": [], "number": 0}] * ROWS, [], InOrder(4), 1, 4, [])
    manager, runtime = Sampled(random.Random(0)), OneThread()
    pipeline = Pipeline(
        config_of(4, 1, 1), data, 3, manager, PhaseTimer(), fails, runtime=runtime, step=0, position=None
    )  # fmt: skip
    with pytest.raises(WorkerError, match="out of memory"):
        pipeline.batch(1)
    pipeline.close()
    assert manager.in_flight == 0


@pytest.mark.parametrize("seed", range(5))
def test_deterministic_batches_are_in_order_and_each_of_one_version(seed: int) -> None:
    dice, life = random.Random(seed), Life()
    config = config_of(4, 2, 1, deterministic=True)
    state = run(config, 6, dice, life, state=None, until=3)
    run(config, 6, dice, life, state=state, until=6)
    assert life.batches == [list(range(4 * step, 4 * step + 4)) for step in range(6)]
    # Batch 1 is sampled while nothing is trained, as is the first one after a resume.
    assert life.ages == [0] * 4 + [1] * 8 + [0] * 4 + [1] * 8


def test_deterministic_batches_across_steps_of_the_sampler_keep_the_seeds_of_their_prompts() -> None:
    """After a resume with a prompt that was replaced, for example."""
    manager, runtime = Sampled(random.Random(0)), OneThread()
    sampled: list[tuple[int, int]] = []

    def note(prompts: PromptBatch) -> None:
        sampled.extend((prompts.step, int(row["uid"].split("-")[1])) for row in prompts.rows)

    manager.on_start = note
    data = PromptData([{"raw_prompt": [], "number": row} for row in range(ROWS)], [], InOrder(4), 1, 4, [])
    config, position = config_of(4, 1, 1, deterministic=True), Position(6, [], {"2": [4, 5, 6, 7]}, {})
    pipeline = Pipeline(config, data, 3, manager, PhaseTimer(), runtime=runtime, step=1, position=position)
    positions = []
    for step in (2, 3):
        results = pipeline.batch(step)
        positions.append(sorted({position_of(result, 4) for result in results}))
        pipeline.before_weights()
        pipeline.weights_changed(step)
        pipeline.trained(step, results)
    pipeline.close()
    assert positions == [[6, 7, 8, 9], [10, 11, 12, 13]]
    assert {step for step, _ in sampled} == {2, 3, 4} and all(step == drawn for step, drawn in sampled)


def test_a_checkpoint_within_a_step_of_the_sampler_keeps_its_rows_and_rewards() -> None:
    """The sampler, which has learned step 1, would choose other rows for step 2 than those that were drawn before."""
    position = Position(3, [5], {"2": [30, 31]}, {"2": [1.0], "5": [0.5, 0.25]})
    sampler = InOrder(2)
    sampler.load_state_dict({"learned": [1]})
    data = PromptData([{"raw_prompt": [], "number": row} for row in range(ROWS)], [], sampler, 1, 2, [])
    step_3 = sampler.batch(3)
    assert 30 not in sampler.batch(2)
    manager, runtime = Sampled(random.Random(0)), OneThread()
    pipeline = Pipeline(config_of(2, 1, 1), data, 4, manager, PhaseTimer(), runtime=runtime, step=2, position=position)
    rows: dict[int, int] = {}
    for step in (3, 4):
        results = pipeline.batch(step)
        rows |= {position_of(result, 2): result.row["number"] for result in results}
        pipeline.weights_changed(step)
        pipeline.trained(step, results)
    assert sorted(rows) == [3, 4, 6, 7]
    assert (rows[3], rows[4]) == (31, step_3[0])
    assert sampler.outcomes[2] == [PromptOutcome(30, [1.0]), PromptOutcome(31, [31.0, 32.0])]
    assert sampler.outcomes[3][1] == PromptOutcome(step_3[1], [0.5, 0.25])
    pipeline.close()


def test_a_checkpoint_without_rows_and_rewards_of_steps_that_were_begun() -> None:
    """After a change of the data: what is left is trained, and the sampler learns what is known."""
    sampler = InOrder(2)
    data = PromptData([{"raw_prompt": [], "number": row} for row in range(ROWS)], [], sampler, 1, 2, [])
    manager, runtime, position = Sampled(random.Random(0)), OneThread(), Position(1, [4, 5, 6])
    pipeline = Pipeline(config_of(2, 3, 3), data, 4, manager, PhaseTimer(), runtime=runtime, step=2, position=position)
    found = []
    for step in (3, 4):
        results = pipeline.batch(step)
        found += [position_of(result, 2) for result in results]
        pipeline.weights_changed(step)
        pipeline.trained(step, results)
    pipeline.close()
    assert sorted({*found}) == [1, 2, 3, 7]
    assert sampler.outcomes[1] == [PromptOutcome(0, []), PromptOutcome(1, [1.0, 2.0])]
    assert sampler.learned == [1, 2, 3, 4]


class Greedy(BatchPolicy):
    """Whatever has ended first, and no deadline."""

    def __init__(self, config: Any, context: Any) -> None:
        pass

    def admit(self, state: PipelineState) -> int:
        return state.allowed

    def select(self, state: PipelineState) -> list[int] | None:
        ended = [group.position for group in state.groups if group.ended]
        return ended[-state.batch_size :] if len(ended) >= state.batch_size else None


class Nothing(Greedy):
    def select(self, state: PipelineState) -> None:
        return None


class Wrong(Greedy):
    def select(self, state: PipelineState) -> list[int]:
        return [0] * state.batch_size


class Late(Greedy):
    """Fails when a group has ended, which is while the trainer waits."""

    def admit(self, state: PipelineState) -> int:
        if any(group.ended for group in state.groups):
            raise ValueError("no idea")
        return state.allowed


class Half(Greedy):
    def admit(self, state: PipelineState) -> Any:
        return state.allowed / 2


class Text(Greedy):
    def select(self, state: PipelineState) -> Any:
        return "ab"


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Late, r"admit\(\): ValueError: no idea"),
        (Half, r"admit\(\): TypeError: 'float' object cannot be interpreted as an integer"),
        (Text, r"select\(\): TypeError: 'str' object cannot be interpreted as an integer"),
        (Greedy, "more than rollout.max_staleness=1 versions"),
        (Nothing, "starts nothing and chooses nothing"),
        (Wrong, "expected 2 different ones of groups that have ended"),
    ],
)
def test_a_policy_that_breaks_its_contract_ends_the_run(policy: type, message: str) -> None:
    with pytest.raises(RolloutError, match=message) as error:
        run(config_of(2, 1, 1, policy=policy), 40, random.Random(3), Life(), state=None, until=40)
    assert policy.__name__ in str(error.value)


def test_what_ends_a_group_ends_the_run() -> None:
    """An error of the sampling itself, such as a configuration that no trajectory can run with."""
    manager, runtime = Sampled(random.Random(0)), OneThread()

    def refuse(prompts: PromptBatch) -> None:
        raise RolloutError("nothing can run")

    manager.on_start = refuse
    data = PromptData([{"raw_prompt": [], "number": 0}] * ROWS, [], InOrder(2), 1, 2, [])
    pipeline = Pipeline(config_of(2, 1, 1), data, 9, manager, PhaseTimer(), runtime=runtime, step=0, position=None)
    with pytest.raises(RolloutError, match="nothing can run"):
        pipeline.batch(1)
    pipeline.close()


def test_failures_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    run(config_of(4, 2, 1), 3, random.Random(0), Life(), state=None, until=3, failing=0.5)
    assert "is excluded after 1 attempts (and" in caplog.text


def test_failures_that_leave_no_signal_end_the_run_as_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Sampled, results: Any) -> None:
        if any(result.termination is Termination.ENGINE_ERROR for result in results):
            raise RolloutError("the engine is down")

    monkeypatch.setattr(Sampled, "check_failed", refuse)
    with pytest.raises(RolloutError, match="the engine is down"):
        run(config_of(4, 2, 1, rounds=1), 9, random.Random(0), Life(), state=None, until=9, failing=1.0)


@pytest.mark.parametrize("depth", [1, 8])
def test_prompts_without_a_signal_may_be_as_frequent_at_any_depth(depth: int) -> None:
    run(config_of(8, depth, depth, rounds=3), 12, random.Random(0), Life(), state=None, until=12, silent=0.5)


def test_no_prompts_are_drawn_that_the_run_does_not_need(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, drawn = InOrder.batch, list[int]()
    monkeypatch.setattr(InOrder, "batch", lambda self, step: drawn.append(step) or draw(self, step))
    run(config_of(2, 50, 50), 4, random.Random(0), Life(), state=None, until=4)
    assert drawn == [1, 2, 3, 4]


def test_prompts_without_a_signal_end_the_run_after_so_many_rounds() -> None:
    with pytest.raises(RolloutError, match="more than rollout.resample_rounds=2 batches"):
        run(config_of(4, 2, 1, rounds=2), 9, random.Random(0), Life(), state=None, until=9, silent=1.0)
