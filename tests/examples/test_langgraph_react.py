"""The LangGraph example: the policy meets the tokens of its warm start, and its mistakes are scored."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agentrl_core.api import Termination
from agentrl_core.config import load_config
from agentrl_core.runs.records import RolloutRecord, read_rollouts
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.trainer import Trainer
from agentrl_testing.tiny_model import save_tiny_model
from tests.examples.test_recipes import EXAMPLES, langgraph_react

warm_start = langgraph_react.warm_start
TASK = langgraph_react.Shopping()
PROBLEM = langgraph_react.Problem("What do I pay for 12 x lamp?", "lamp", 12, "*", 37)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return warm_start.build_tokenizer(TASK)


def said_in(tokenizer: Any, conversation: list[dict[str, Any]]) -> list[str]:
    """The turns of the assistant, as the policy writes them."""
    turns = warm_start.ASSISTANT_TURN.split(warm_start.render(tokenizer, conversation))[1::2]
    return [turn.removesuffix("<|im_end|>") for turn in turns]


def play(tokenizer: Any, turns: list[str], folder: Path) -> RolloutRecord:
    """One step of the example's config with a policy that says these turns; the first trajectory."""
    save_tiny_model(folder / "model", tokenizer=tokenizer)
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps(langgraph_react.data_row(0, PROBLEM, Random(0))) + "\n")
    overrides = [
        f"model.path={folder / 'model'}",
        f"data.train_files=[{rows}]",
        "data.validation_files=[]",
        "data.batch_size=1",
        "rollout.engine.name=scripted",
        f"rollout.engine.config={json.dumps({'turns': turns})}",
        "rollout.n=2",
        "rollout.max_response_length=1000",
        "trainer.steps=1",
        "trainer.validation.before=false",
        "trainer.checkpoint.best_metric=null",
        f"trainer.output_dir={folder / 'runs'}",
    ]
    run = RunDir(Trainer(load_config(EXAMPLES / "langgraph_react/config.yaml", overrides)).fit())
    return next(iter(read_rollouts(run.rollout_file(1, "train"))))


def test_the_agent_sends_the_policy_the_tokens_of_its_warm_start(tokenizer: Any, tmp_path: Path) -> None:
    good = TASK.good(PROBLEM)
    record = play(tokenizer, said_in(tokenizer, good), tmp_path)
    ((ids, mask),) = warm_start.encode_demonstrations(tokenizer, [good], TASK.tools)
    last = len(mask) - mask[::-1].index(1)
    assert record.prompt_ids + record.response_ids == ids[:last]
    assert record.response_mask == mask[:last][len(record.prompt_ids) :]
    assert record.reward == 1.0 and record.metrics["endpoint_forks"] == 0


def test_calls_that_fail_are_answered_and_the_agent_goes_on(tokenizer: Any, tmp_path: Path) -> None:
    calls = [("price", {"item": "castle"}), ("calculator", {"a": 1, "operator": "/", "b": 2}), ("buy", {})]
    wrong = [warm_start.tool_call(name, **arguments) for name, arguments in calls]
    record = play(tokenizer, [*said_in(tokenizer, wrong), "#### 444"], tmp_path)
    told = [message["content"] for message in record.messages if message["role"] == "tool"]
    assert "castle" in told[0] and "operator: Input should be" in told[1] and "buy is not a valid tool" in told[2]
    assert record.reward == 1.0


def test_a_policy_that_never_answers_is_stopped_and_scored(tokenizer: Any, tmp_path: Path) -> None:
    (again,) = said_in(tokenizer, [warm_start.tool_call("price", item="lamp")])
    record = play(tokenizer, [again], tmp_path)
    assert sum(message["role"] == "assistant" for message in record.messages) == 5
    assert record.termination is Termination.COMPLETED and record.reward == 0.0
