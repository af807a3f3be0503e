"""Inputs that are wrong: what is refused before anything starts, and what a run survives."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import ConfigError, DataError, RolloutError, TemplateError
from agentrl_core.config import load_config
from agentrl_core.runs.records import RolloutRecord, read_rollouts
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.trainer.preparation import Preparation
from agentrl_testing.tiny_model import CHATML_TEMPLATE, tiny_tokenizer

Fit = Callable[..., RunDir]
SCRIPTED = {"rollout.engine": {"name": "scripted"}, "trainer.steps": 1}
WITH_TOOLS = {"rollout.agent.loops": ["single_turn", "tool_agent"], "data.max_prompt_length": 1024}
TOOLS = '''
"""Tools that do not behave."""


def fails(text: str) -> str:
    """Fails."""
    raise ValueError("the shop is closed")


def floods(text: str) -> str:
    """Answers at length."""
    return "ab" * 2_000_000


def spins(text: str) -> str:
    """Never answers."""
    while True:
        pass
'''


def prepare(path: Path) -> Preparation:
    return Preparation.of(load_config(path))


def reward(name: str) -> dict[str, Any]:
    return {"reward.functions": [{"name": f"./rewards.py:{name}", "isolation": "inline"}]}


def records(run: RunDir) -> list[RolloutRecord]:
    return list(read_rollouts(run.rollout_file(1, "train")))


def rejecting_tools(template: str) -> str:
    return template.replace(
        "{%- if message.role == 'tool' -%}", "{%- if message.role == 'tool' -%}{{ raise_exception('no tool role') }}"
    )


# Refused before anything starts


def test_group_of_one_with_grpo(tiny_run: Any) -> None:
    with pytest.raises(ConfigError, match=r"rollout.n.*: group size 1 with advantage estimator 'grpo'"):
        prepare(tiny_run({"rollout.n": 1}))


def test_context_longer_than_the_models(tiny_run: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_prompt_length \+ rollout.max_response_length = 5008 tokens.*of 4096"):
        prepare(tiny_run({"data.max_prompt_length": 5000}))


def test_all_that_the_files_of_the_models_refuse_is_reported_together(tiny_run: Any) -> None:
    copied = tiny_run.folder / "copied"
    shutil.copytree(tiny_run.model, copied, ignore=shutil.ignore_patterns("*.safetensors"))
    changes = {
        "data.max_prompt_length": 5000,
        "rollout.sampling.logit_bias": {300_000: 1.0},
        "reference.path": str(copied),
        "algorithm.kl_coef": 0.1,
    }
    with pytest.raises(ConfigError) as caught:
        prepare(tiny_run(changes))
    weights, context, bias = caught.value.problems
    assert weights.startswith(f"weights in {copied}: ")
    assert "5008 tokens, but the model in model.path has a context of 4096" in context
    assert bias.startswith("rollout.sampling.logit_bias: 300000 is no token id of ")


def model_with(tiny_run: Any, template: str | None) -> str:
    path: Path = tiny_run.folder / "model"
    shutil.copytree(tiny_run.model, path, ignore=shutil.ignore_patterns("*.jinja"))
    tiny_tokenizer(template).save_pretrained(path)
    return str(path)


def test_model_that_transformers_cannot_read(tiny_run: Any) -> None:
    path = Path(model_with(tiny_run, CHATML_TEMPLATE))
    (path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config.json in .*: transformers cannot build a model from .*config.json"):
        prepare(tiny_run({"model.path": str(path)}))


def test_tokenizer_without_a_chat_template(tiny_run: Any) -> None:
    with pytest.raises(TemplateError, match=r"has no chat template.*set model.chat_template to a file"):
        prepare(tiny_run({"model.path": model_with(tiny_run, None)}))


def test_template_that_rejects_the_tool_role(tiny_run: Any) -> None:
    path = model_with(tiny_run, rejecting_tools(CHATML_TEMPLATE))
    with pytest.raises(TemplateError, match=r"(?s)chat template rejects the tool role: .*no tool role.*chat_template"):
        prepare(tiny_run({**WITH_TOOLS, "tools": ["calculator"], "model.path": path}))
    prepare(tiny_run({"model.path": path}))


def test_data_without_the_prompt_column(tiny_run: Any) -> None:
    rows = [{"question": "say 1", "reward_model": {"ground_truth": "1"}}]
    with pytest.raises(DataError, match=r"train.jsonl: no column 'prompt'; it has question, reward_model. Set data"):
        prepare(tiny_run({}, rows))


def test_parquet_without_the_prompt_column(tiny_run: Any) -> None:
    import datasets

    file = tiny_run.folder / "train.parquet"
    datasets.Dataset.from_list([{"question": "say 1"}]).to_parquet(str(file))
    with pytest.raises(DataError, match=r"train.parquet: no column 'prompt'; it has question"):
        prepare(tiny_run({"data.train_files": ["train.parquet"]}))


def test_row_without_a_ground_truth(tiny_run: Any) -> None:
    rows = tiny_run.rows(3)
    del rows[1]["reward_model"]["ground_truth"]
    with pytest.raises(DataError, match=r"train.jsonl, row 1: no reward_model.ground_truth; add it, or set .*=false"):
        prepare(tiny_run({}, rows))


def test_prompt_longer_than_the_limit(tiny_run: Any) -> None:
    rows = tiny_run.rows(3)
    rows[2]["prompt"][0]["content"] = "x" * 100
    error = {"data.overlong_prompts": "error"}
    with pytest.raises(
        DataError, match=r"train row 2 has a prompt of \d+ tokens .*more than data.max_prompt_length=64"
    ):
        prepare(tiny_run(error, rows))
    assert len(prepare(tiny_run({}, rows)).data.train) == 2


def test_unknown_agent_name(tiny_run: Any) -> None:
    with pytest.raises(DataError, match=r"train row 0: agent_name is 'tool_agnet', .* listed: single_turn"):
        prepare(tiny_run({}, tiny_run.rows(2, agent_name="tool_agnet")))


def test_tool_that_no_loop_can_reach(tiny_run: Any) -> None:
    lacks = r"agent loop 'single_turn' lacks the capability 'tools', which tools=\[calculator\] needs; installed with"
    with pytest.raises(ConfigError, match=lacks):
        prepare(tiny_run({"tools": ["calculator"]}))


def test_tool_that_no_row_can_reach(tiny_run: Any) -> None:
    with pytest.raises(ConfigError, match=r"tools: nothing can reach 'calculator': no row of the data runs a loop"):
        prepare(tiny_run({**WITH_TOOLS, "tools": ["calculator"]}, tiny_run.rows(2, agent_name="single_turn")))


def test_row_that_names_an_unknown_tool(tiny_run: Any) -> None:
    rows = tiny_run.rows(2, agent_name="tool_agent")
    rows[1]["extra_info"]["tools_kwargs"] = {"calculater": {"create_kwargs": {"seed": 1}}}
    with pytest.raises(DataError, match=r"row 1: .*tools_kwargs names calculater; configured tools: calculator"):
        prepare(tiny_run({**WITH_TOOLS, "tools": ["calculator"]}, rows))


def test_reserved_column(tiny_run: Any) -> None:
    with pytest.raises(DataError, match=r"train row 0: the columns session, uid are reserved; rename them"):
        prepare(tiny_run({}, tiny_run.rows(2, uid="a", session="b")))


# Survived: the model sees an observation, and the run goes on


def run_with_tool(fit: Fit, tiny_run: Any, name: str, **slot: Any) -> RunDir:
    (tiny_run.folder / "tools.py").write_text(TOOLS)
    call = json.dumps({"name": name, "arguments": {"text": "please"}})
    turns = [f"<tool_call>\n{call}\n</tool_call>", "well"]
    return fit(
        {
            **WITH_TOOLS,
            "rollout.agent.loops": ["tool_agent"],
            "rollout.engine": {"name": "scripted", "config": {"turns": turns}},
            "rollout.max_response_length": 600,
            "tools": [{"name": f"./tools.py:{name}", **slot}],
            "trainer.steps": 1,
        }
    )


def test_tool_that_raises(fit: Fit, tiny_run: Any) -> None:
    run = run_with_tool(fit, tiny_run, "fails", isolation="inline")
    for record in records(run):
        (call,) = record.tool_calls
        assert call["failed"] and "the shop is closed" in call["response"]
        assert "the shop is closed" in record.messages[-2]["content"]
        assert record.messages[-1]["content"] == "well"
        assert record.termination == "completed"
    assert run.read_metrics()[0]["rollout/failed_fraction"] == 0


def test_tool_that_returns_megabytes(fit: Fit, tiny_run: Any) -> None:
    run = run_with_tool(fit, tiny_run, "floods", isolation="inline")
    for record in records(run):
        assert record.messages[-2]["content"] == "ab" * 128 + "\n[the rest was cut]"
        assert record.messages[-1]["content"] == "well"
    assert run.rollout_file(1, "train").stat().st_size < 200_000


def test_tool_that_spins_for_ever(fit: Fit, tiny_run: Any) -> None:
    # It begins in a new process, which a busy machine does not let answer at once.
    run = run_with_tool(fit, tiny_run, "spins", timeout=2, processes=4)
    for record in records(run):
        (call,) = record.tool_calls
        assert call["failed"] and "no answer within 2 s" in call["response"]
        assert record.termination == "completed"


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("raises", r"Traceback(.|\n)*the judge is ill"),
        ("nan", "RewardError: reward function 'nan' returned .*nan, which is not a finite number"),
    ],
)
def test_reward_that_fails_stops_the_run(fit: Fit, tiny_run: Any, name: str, cause: str) -> None:
    with pytest.raises(RolloutError, match=rf"(?s)4 of 4 .*max_failed_fraction=0.1.*reward_error:\n{cause}"):
        fit({**SCRIPTED, **reward(name)})
    run = RunDir(tiny_run.folder / "runs" / "tiny")
    state = run.read_state()
    assert state is not None and state.status == "failed"
    assert re.search(cause, run.log_file.read_text())


def test_reward_that_fails_sometimes_excludes_those_trajectories(
    fit: Fit, tiny_run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {**SCRIPTED, **reward("sometimes"), "hooks": ["./hooks.py:Record"]}
    run = fit({**changes, "rollout.max_failed_fraction": 0.5}, tiny_run.rows(2))
    metrics = run.read_metrics()[0]
    assert metrics["rollout/failed_fraction"] == metrics["rollout/termination/reward_error"] == 0.5
    failed = [record for record in records(run) if record.termination == "reward_error"]
    assert len(failed) == 2
    for record in failed:
        assert record.reward is None and record.advantage is None and "the judge is ill" in str(record.error)
    events = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    assert [rows for event, _, rows, *_ in events if event == "rollout_end"] == [2]
    assert caplog.text.count("is excluded after 1 attempts (and 1 more): reward_error") == 1

    with pytest.raises(RolloutError, match="2 of 4 trajectories failed after 0 retries"):
        fit({**changes, "rollout.max_failed_fraction": 0.4}, tiny_run.rows(2))


def test_failure_of_the_engine_is_retried_from_a_fresh_state(fit: Fit) -> None:
    # The first request is the comparison of log-probs before step 1.
    broken = {"name": "scripted", "config": {"fail_every": 4}}
    run = fit({**SCRIPTED, "rollout.engine": broken, "rollout.retries": 2})
    assert run.read_metrics()[0]["rollout/retries"] == 1
    assert [record.termination for record in records(run)] == ["completed"] * 4


def test_step_in_which_everything_failed_updates_nothing(fit: Fit, caplog: pytest.LogCaptureFixture) -> None:
    run = fit({**SCRIPTED, **reward("raises"), "rollout.max_failed_fraction": 1.0})
    assert "no trajectory can be trained; the update is skipped" in caplog.text
    assert "actor/pg_loss" not in run.read_metrics()[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"agent_name": ["tool_agent"]}, r"agent_name is \['tool_agent'\]; allowed is a string"),
        ({"extra_info": "x"}, "extra_info is 'x'; allowed is a mapping"),
        ({"extra_info": ["x"]}, r"extra_info is \['x'\]; allowed is a mapping"),
        ({"extra_info": {"tools_kwargs": "x"}}, "extra_info.tools_kwargs is 'x'; allowed is a mapping from tools"),
        (
            {"extra_info": {"tools_kwargs": {"calculator": "x"}}},
            "tools_kwargs.calculator is 'x'; allowed is a mapping with create_kwargs",
        ),
        (
            {"extra_info": {"tools_kwargs": {"calculator": {"creat_kwargs": {}}}}},
            "tools_kwargs.calculator has the unknown key 'creat_kwargs'; allowed is a mapping with create_kwargs",
        ),
    ],
)
def test_a_row_of_wrong_types_is_named_before_anything_starts(tiny_run: Any, fields: Any, message: str) -> None:
    rows = tiny_run.rows(2)
    rows[1].update(fields)
    with pytest.raises(DataError, match=rf"data: train row 1: .*{message}"):
        prepare(tiny_run({**WITH_TOOLS, "tools": ["calculator"]}, rows))


def test_a_prompt_that_the_template_refuses_is_named(tiny_run: Any) -> None:
    rows = tiny_run.rows(2)
    rows[1]["prompt"].append({"role": "tool", "content": "42"})
    (tiny_run.folder / "strict.jinja").write_text(rejecting_tools(CHATML_TEMPLATE))
    with pytest.raises(TemplateError, match="data: train row 1: .*no tool role"):
        prepare(tiny_run({"model.chat_template": "strict.jinja"}, rows))


def test_prompts_that_leave_no_room_to_sample_are_not_trained(fit: Fit, tiny_run: Any) -> None:
    """As of an agent that asks with more than the context: a row without a sampled token has nothing to train."""
    (tiny_run.folder / "loops.py").write_text(FULL)
    run = fit(
        {**SCRIPTED, "rollout.agent.loops": ["./loops.py:Full"], "hooks": ["./hooks.py:Record"]}, tiny_run.rows(2)
    )
    assert [record.termination for record in records(run)].count("length") >= 2
    events = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    assert [rows for event, _, rows, *_ in events if event == "rollout_end"] == [2]
    assert run.read_metrics()[0]["rollout/failed_fraction"] == 0


FULL = """
from agentrl_core.api import AgentLoopBase

class Full(AgentLoopBase):
    async def run(self, sampling_params, *, session, raw_prompt, prompt_index, **row):
        content = "x" * 1_000_000 if prompt_index else "x"
        trajectory = session.trajectory([{"role": "user", "content": content}])
        return trajectory.finish((await trajectory.generate(sampling_params)).termination)
"""


def test_a_bias_of_a_token_that_the_model_lacks(tiny_run: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"rollout.sampling.logit_bias: 99999 is no token id of .*; allowed: 0 to \d+"
    ):
        prepare(tiny_run({"rollout.sampling.logit_bias": {5: 1.0, 99999: -100.0}}))


def test_sampling_from_another_distribution_is_a_warning(tiny_run: Any, caplog: pytest.LogCaptureFixture) -> None:
    prepare(tiny_run({"rollout.sampling.min_p": 0.1}))
    assert "distribution" not in caplog.text
    prepare(tiny_run({"rollout.sampling.min_p": 0.1, "algorithm.correction": "token_tis"}))
    assert "another distribution than the policy's (min_p=0.1)" in caplog.text
    assert "set min_p=0.0" in caplog.text
