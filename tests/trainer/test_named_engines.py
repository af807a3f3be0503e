"""Engines next to the policy's: a judge scores the trajectories of a run."""

from collections.abc import Callable
from typing import Any

import pytest

from agentrl_core.api import ConfigError
from agentrl_core.config import load_config, to_yaml
from agentrl_core.config.schema import NamedEngineSlot
from agentrl_core.config.slots import slots_by_path
from agentrl_core.runs.records import read_rollouts
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.trainer import Trainer

SCRIPTED = {"rollout.engine": {"name": "scripted"}, "trainer.steps": 1}
USES = """
class Asks:
    def __init__(self, config, context):
        self.engine = context.engines["judge"]

    async def __call__(self, trajectory):
        text = await self.engine.chat([{"role": "user", "content": trajectory.last_text}], max_tokens=5)
        again = await self.engine.chat([{"role": "user", "content": trajectory.last_text}], max_tokens=5)
        assert text == again, "a greedy judge repeats itself"
        return len(text)
"""


def engines(model: Any, name: str = "hf", **fields: Any) -> dict[str, Any]:
    return {"engines": {"judge": {"name": name, "model": str(model), "max_model_len": 256, **fields}}}


def judged(**config: Any) -> dict[str, Any]:
    return {
        "reward.functions": [
            {"name": "judge", "config": {"engine": "judge", "template": "{answer}?", "max_tokens": 64, **config}}
        ]
    }


def test_a_judge_on_the_embedded_engine_scores_the_trajectories_of_a_scripted_policy(
    fit: Callable[..., RunDir], tiny_run: Any, tiny_model: Any
) -> None:
    (tiny_run.folder / "uses.py").write_text(USES)
    run = fit({**SCRIPTED, **engines(tiny_model), "reward.functions": [{"name": "./uses.py:Asks"}]})
    records = list(read_rollouts(run.rollout_file(1, "train")))
    assert len(records) == 4 and all(record.reward for record in records)
    assert len({record.reward for record in records}) == 1, "the policy says the same each time"
    assert run.read_metrics()[-1]["engines/judge/requests"] == 8


def test_a_scripted_judge_scores_what_the_embedded_engine_wrote(fit: Callable[..., RunDir], tiny_model: Any) -> None:
    changes = engines(tiny_model, "scripted", config={"turns": ["It is 8/10"]})
    run = fit({"trainer.steps": 1, **changes, **judged(scale=[0, 10])})
    assert [record.reward for record in read_rollouts(run.rollout_file(1, "train"))] == [0.8] * 4
    assert run.read_metrics()[-1]["reward/judge"] == 0.8


def test_a_judge_that_says_nonsense_or_nothing_is_a_reward_error_that_shows_why(
    fit: Callable[..., RunDir], tiny_model: Any
) -> None:
    survives = {**SCRIPTED, "rollout.max_failed_fraction": 1.0}
    run = fit({**survives, **engines(tiny_model, "scripted", config={"turns": ["hm"]}), **judged()})
    (error,) = {record.error for record in read_rollouts(run.rollout_file(1, "train"))}
    assert "'judge' gave no verdict" in error and "The last one: 'hm'" in error

    slot = {**judged()["reward.functions"][0], "timeout": 0.05}
    silent = engines(tiny_model, "scripted", config={"delay": 1000.0})
    run = fit({**survives, **silent, "reward.functions": [slot]})
    records = list(read_rollouts(run.rollout_file(1, "train")))
    assert {record.termination for record in records} == {"reward_error"}
    assert all("no answer within 0.05 s" in record.error for record in records)


def test_an_unknown_engine_is_refused_before_the_run(tiny_run: Any, tiny_model: Any) -> None:
    config = load_config(tiny_run({**SCRIPTED, **engines(tiny_model), **judged(engine="jugde")}))
    with pytest.raises(ConfigError, match="function 'judge' asks for the engine 'jugde', but `engines` has judge"):
        Trainer(config)


def test_a_function_in_a_child_process_learns_before_the_run_that_it_cannot_reach_engines(
    tiny_run: Any, tiny_model: Any
) -> None:
    slot = {**judged()["reward.functions"][0], "isolation": "process"}
    config = load_config(tiny_run({**SCRIPTED, **engines(tiny_model), "reward.functions": [slot]}))
    with pytest.raises(ConfigError, match="runs in a child process, which cannot reach engines; set `isolation: inl"):
        Trainer(config)


def test_named_engines_are_loaded_overridden_written_and_checked(tiny_run: Any, tiny_model: Any) -> None:
    path = tiny_run({**engines("judge-model"), **judged()})
    with pytest.raises(ConfigError, match=r"engines.judge.model .*no such directory: .*/judge-model"):
        load_config(path)
    config = load_config(path, ["engines.judge.replicas=2", f"engines.judge.model={tiny_model}"])
    slot = config.engines["judge"]
    assert isinstance(slot, NamedEngineSlot) and (slot.replicas, slot.model) == (2, str(tiny_model))
    assert dict(slots_by_path(config))["engines.judge"] is slot
    path.write_text(to_yaml(config))
    assert load_config(path) == config
    with pytest.raises(ConfigError, match="engines.judge.tensor_parallel .*found 2, but the local runtime") as refused:
        load_config(path, ["engines.judge.tensor_parallel=2"])
    assert "'parallel', which engines.judge.tensor_parallel=2 needs" in str(refused.value)
    with pytest.raises(ConfigError, match="engines.judge.sleep .*unknown key"):
        load_config(path, ["engines.judge.sleep=1"])
