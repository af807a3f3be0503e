"""Several agents in one trajectory: each has its own rows, reward and group, from the environment to the records."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from agentrl_core.api import ConfigError, RewardResult, Termination
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.runs.records import RolloutRecord, read_rollouts, reward_trajectory_of
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.trainer.dynamic_sampling import fill

DUEL = '''
import json
from agentrl_core.api import Environment, Episode, InteractionTurn, RewardResult, hookimpl


class Duel(Environment):
    """White and black speak twice each; black gets 10 more in every other game."""

    games = 0

    def tasks(self, split):
        return [{}] * 4

    async def open(self, task, seed):
        Duel.games += 1
        return Game(Duel.games % 2)


class Game(Episode):
    agent = "white"

    def __init__(self, bonus):
        self.bonus, self.moves = bonus, []
        self.messages = [{"role": "system", "content": "Duel."}, {"role": "user", "content": "secret of white"}]

    async def reply(self, messages):
        mover = "black" if len(self.moves) % 2 else "white"
        self.moves.append((mover, [message["content"] for message in messages]))
        text = "secret of black" if len(self.moves) == 1 else f"move {len(self.moves)} was made"
        other = "white" if mover == "black" else "black"
        return InteractionTurn(len(self.moves) == 4, text, 0.25 if len(self.moves) == 3 else None, agent=other)

    async def score(self, trajectory):
        assert all(mover == trajectory.agent or trajectory.last_text not in told for mover, told in self.moves[:1])
        return RewardResult(1.0 if trajectory.agent == "white" else -1.0 + 10 * self.bonus)


class Sees:
    def __init__(self, config, context):
        self.file = context.run_dir / "batch.json"

    @hookimpl
    def on_batch_ready(self, batch):
        names = ("rm_scores", "turn_ids", "response_mask", "advantages", "scores", "outcomes")
        columns = {name: batch.batch[name].tolist() for name in names}
        columns |= {name: batch.non_tensor_batch[name].tolist() for name in ("uid", "trajectory_id")}
        self.file.write_text(json.dumps(columns))
'''


@pytest.fixture
def duel(fit: Callable[..., RunDir], tiny_run: Any) -> Callable[..., RunDir]:
    """One step of two prompts with two samples each."""
    # Equal files are one module, which would count on.
    (tiny_run.folder / "duel.py").write_text(f"{DUEL}\n# {tiny_run.folder}\n")

    def run(loop: Any = "multi_agent", **changes: Any) -> RunDir:
        return fit({
            "data.train_files": None,
            "data.batch_size": 2,
            "data.max_prompt_length": 200,
            "environments": ["./duel.py:Duel"],
            "rollout.engine": {"name": "scripted", "config": {"turns": ["one", "two", "three", "four"]}},
            "rollout.agent": {"loops": [loop], "num_workers": 1},
            "rollout.n": 2,
            "rollout.max_response_length": 500,
            "algorithm.advantage": {"name": "grpo"},
            "reward.functions": [],
            "hooks": ["./duel.py:Sees"],
            "trainer.steps": 1,
            **changes,
        })  # fmt: skip

    return run


def batch_of(run: RunDir) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = json.loads((run.path / "batch.json").read_text())
    return columns


def agents_of(run: RunDir) -> dict[str, list[RolloutRecord]]:
    agents: dict[str, list[RolloutRecord]] = {}
    for record in read_rollouts(run.rollout_file(1, "train")):
        agents.setdefault(record.agent, []).append(record)
    return agents


def test_each_agent_sees_its_own_conversation_and_is_compared_with_itself(duel: Callable[..., RunDir]) -> None:
    run = duel()
    agents = agents_of(run)
    assert {name: len(rows) for name, rows in agents.items()} == {"white": 4, "black": 4}
    for name, other in (("white", "black"), ("black", "white")):
        for record in agents[name]:
            text = json.dumps(record.messages)
            assert f"secret of {name}" in text and f"secret of {other}" not in text
            assert [message["role"] for message in record.messages[:3]] == ["system", "user", "assistant"]
            assert record.trajectory_id.endswith(f"@{name}") and record.uid.endswith(f"@{name}")
            seen = reward_trajectory_of(record)
            assert seen is not None and seen.agent == name
    batch = batch_of(run)
    assert batch["trajectory_id"] == [f"train-000001-0000{p}-00{s}@{a}" for p in (0, 1) for s in (0, 1)
                                      for a in ("white", "black")]  # fmt: skip
    assert len(set(batch["uid"])) == 4
    for uid, score, advantages in zip(batch["uid"], batch["scores"], batch["advantages"], strict=True):
        assert score == (1.25 if uid.endswith("@white") else -1.0) or (uid.endswith("@black") and score == 9.0)
        # All games of white end alike, so only black has something to learn from.
        assert any(advantages) == uid.endswith("@black")


def test_a_turns_reward_goes_to_the_agent_that_moved(duel: Callable[..., RunDir]) -> None:
    batch = batch_of(duel())
    for uid, turns, rewards in zip(batch["uid"], batch["turn_ids"], batch["rm_scores"], strict=True):
        last = {turn: place for place, turn in enumerate(turns) if turn >= 0}
        assert set(last) == {0, 1}, "an agent's turns are numbered from 0"
        if uid.endswith("@white"):
            assert {place: reward for place, reward in enumerate(rewards) if reward} == {last[1]: 1.25}
        else:
            assert rewards[last[0]] == 0.0


def test_metrics_count_trajectories_once_and_name_the_agents(duel: Callable[..., RunDir]) -> None:
    metrics = duel().read_metrics()[-1]
    assert metrics["reward/agent/white"] == 1.25 and metrics["reward/agent/black"] == 4.0
    assert metrics["reward/mean"] == pytest.approx((1.25 + 4.0) / 2)
    assert metrics["rollout/termination/completed"] == 1.0 and metrics["rollout/failed_fraction"] == 0.0
    assert metrics["timing/trajectory/generate/min"] > 0


def test_an_agent_that_is_not_trained_is_recorded_and_nothing_else(duel: Callable[..., RunDir]) -> None:
    run = duel({"name": "multi_agent", "config": {"trained": ["black"]}})
    agents = agents_of(run)
    assert {name: len(rows) for name, rows in agents.items()} == {"white": 4, "black": 4}
    assert [record.advantage for record in agents["white"]] == [None] * 4 and agents["white"][0].reward == 1.25
    assert all(record.advantage is not None for record in agents["black"])
    assert {uid.partition("@")[2] for uid in batch_of(run)["uid"]} == {"black"}
    metrics = run.read_metrics()[-1]
    assert metrics["reward/mean"] == metrics["reward/agent/black"] == 4.0
    assert metrics["reward/agent/white"] == 1.25


def test_a_loop_of_one_agent_is_refused(duel: Callable[..., RunDir]) -> None:
    with pytest.raises(ConfigError, match=r"'tool_agent' plays one agent, .* black, white act; use .* multi_agent"):
        duel("tool_agent")


LOOP = '''
from agentrl_core.api import AgentLoopBase, RewardResult, hookimpl

class Twice(AgentLoopBase):
    """Two rows, the first one not trained."""

    async def run(self, sampling_params, *, session, raw_prompt, **row):
        rows = []
        for trained in (False, True):
            trajectory = session.trajectory(raw_prompt)
            turn = await trajectory.generate(sampling_params)
            rows.append(trajectory.finish(turn.termination))
            rows[-1].trained = trained
        return rows

def by_token(trajectory):
    rewards = [float(place) for place in range(trajectory.sampled_tokens)]
    return RewardResult(sum(rewards), token_rewards=rewards)
'''


def test_a_row_that_is_not_trained_is_left_out_of_the_batch_and_its_tokens_keep_their_rewards(
    fit: Callable[..., RunDir], tiny_run: Any
) -> None:
    # Equal files are one module, which would count on.
    (tiny_run.folder / "duel.py").write_text(f"{DUEL}\n# {tiny_run.folder}\n")
    (tiny_run.folder / "loop.py").write_text(LOOP)
    run = fit({
        "rollout.engine": {"name": "scripted", "config": {"turns": ["one two", "three four five"]}},
        "rollout.agent": {"loops": ["./loop.py:Twice"]},
        "reward.functions": [{"name": "./loop.py:by_token", "isolation": "inline"}],
        "hooks": ["./duel.py:Sees"],
        "trainer.steps": 1,
    })  # fmt: skip
    records = list(read_rollouts(run.rollout_file(1, "train")))
    assert [record.trained for record in records] == [False, True] * (len(records) // 2)
    assert all((record.advantage is None) != record.trained for record in records)
    first, second = (sum(record.response_mask) for record in records[:2])
    batch = batch_of(run)
    assert len(batch["uid"]) == len(records) // 2
    sampled = [reward for reward, bit in zip(batch["rm_scores"][0], batch["response_mask"][0], strict=True) if bit]
    assert sampled[:-1] == [float(first + place) for place in range(second - 1)]


def test_a_prompt_has_a_signal_if_one_of_its_agents_has() -> None:
    def samples(prompt: str, white: tuple[float, float], black: tuple[float, float]) -> list[TrajectoryResult]:
        agents = (("white", white), ("black", black))
        return [
            TrajectoryResult({"uid": f"{prompt}@{name}"}, "", Termination.COMPLETED, reward=RewardResult(score))
            for name, scores in agents
            for score in scores
        ]

    good, silent, further = samples("a", (1, 1), (0, 1)), samples("b", (1, 1), (0, 0)), samples("c", (0, 1), (1, 0))
    asked: list[int] = []

    def more(number: int, prompts: int) -> list[TrajectoryResult]:
        asked.append(prompts)
        return further

    filled = fill(1, [*good, *silent], 2, more)
    assert asked == [1] and len(filled) == 12
    assert [result.replaced for result in filled] == [False] * 4 + [True] * 4 + [False] * 4
