"""A tree with everything in it: credit by hand, and two steps of training against an independent one in float64."""

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentrl_core.config import load_config
from agentrl_core.fsdp2 import packed_attention
from agentrl_core.trainer import Trainer
from tests.reference.plain_step import row_of

CALL = '<tool_call>\n{"name": "weigh", "arguments": {"x": 0}}\n</tool_call>'
PARTS = '''
import asyncio
from dataclasses import replace

import torch

from agentrl_core.api import (
    AdvantageEstimator, AdvantageOutput, AgentLoopBase, RewardResult, Termination, Tool, ToolResponse, ToolResult,
    function_schema,
)


class Weighs(Tool):
    """Earns its argument; the calls of 2 and 4 wait for each other, and 4 is answered first."""

    schema = function_schema("weigh", "Weighs.", {"x": {"type": "number"}}, ["x"])

    async def create(self, instance_id, **kwargs):
        self.seen = getattr(self, "seen", {})
        self.seen[instance_id] = (asyncio.Event(), asyncio.Event())

    async def execute(self, instance_id, parameters, **kwargs):
        first, second = self.seen[instance_id]
        if parameters["x"] == 2.0:
            first.set()
            await second.wait()
        if parameters["x"] == 4.0:
            await first.wait()
            second.set()
        return ToolResult(ToolResponse("done"), float(parameters["x"]))


class Grows(AgentLoopBase):
    """A planner forks after its first turn, compacts what the first branch found, and asks a worker."""

    capabilities = frozenset({"tools"})

    async def run(self, sampling_params, *, session, raw_prompt, sample_index, **row):
        tools = await session.open_tools()

        async def turn(trajectory, earns):
            sampled = await trajectory.generate(sampling_params)
            if earns:
                (call,) = sampled.tool_calls
                await session.call_tool(replace(call, arguments={"x": earns}))

        left = session.trajectory(raw_prompt, tools=tools)
        await turn(left, 1.0)
        right = left.fork()
        for branch, said in ((left, "left"), (right, "right")):
            branch.add_messages([{"role": "user", "content": said}])
        await asyncio.gather(turn(left, 2.0), turn(right, 4.0))
        left.add_messages([{"role": "user", "content": "Summarise."}])
        await turn(left, 0.0)
        compacted = session.trajectory([{"role": "user", "content": "So far: two."}], tools=tools)
        await turn(compacted, 8.0)
        worker = session.trajectory([{"role": "user", "content": "Do it."}], tools=tools)
        # Each sample earns something else here.
        await turn(worker, 16.0 * (1 + sample_index))
        rows = [each.finish(Termination.COMPLETED) for each in (left, right, compacted, worker)]
        for each, agent in zip(rows, ("planner", "planner", "planner", "worker"), strict=True):
            each.agent = agent
        return rows


class ToGo(AdvantageEstimator):
    """What is earned from a token to the end of its row, less 16."""

    def __call__(self, batch):
        to_go = batch.token_rewards.flip(-1).cumsum(-1).flip(-1)
        advantages = torch.where(batch.response_mask, to_go - 16, 0.0)
        return AdvantageOutput(advantages, to_go)


def outcome(trajectory):
    return RewardResult(0.5 if trajectory.agent == "planner" else 0.25)
'''


@pytest.fixture
def packed_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each forward pass of packed rows; the first one is the trial."""
    found: list[int] = []
    pack = packed_attention.pack

    def counted(*args: Any, **kwargs: Any) -> Any:
        packed = pack(*args, **kwargs)
        if packed is not None:
            found.append(packed.inputs["input_ids"].numel())
        return packed

    monkeypatch.setattr(packed_attention, "pack", counted)
    return found


@pytest.fixture
def grown(
    tiny_run: Any,
    installed_plugins: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
    packed_tokens: list[int],
) -> tuple[Path, dict[str, Any]]:
    """The run directory and the configuration of two steps in float64."""
    monkeypatch.setattr("agentrl_core.plugins.resolution.registrations", installed_plugins)
    (tiny_run.folder / "parts.py").write_text(PARTS)
    manager = {"name": "naive", "config": {"tool_reward_weight": 1.0}}
    config = load_config(tiny_run({
        "data.batch_size": 1, "rollout.n": 2, "trainer.steps": 2, "trainer.checkpoint": {"interval": 1},
        "data.max_prompt_length": 500, "rollout.max_response_length": 700,
        "rollout.engine": {"name": "scripted", "config": {"turns": [CALL]}},
        "rollout.agent": {"loops": ["./parts.py:Grows"], "num_workers": 1},
        "tools": [{"name": "./parts.py:Weighs", "isolation": "inline"}],
        "reward.manager": manager, "reward.functions": [{"name": "./parts.py:outcome", "isolation": "inline"}],
        "algorithm.advantage": "./parts.py:ToGo", "algorithm.old_log_probs": "actor",
        "actor.optimizer": {"lr": 1e-4, "schedule": "constant", "warmup_steps": 0}, "actor.micro_batch_tokens": 8192,
    }))  # fmt: skip
    object.__setattr__(config.model, "dtype", "float64")
    return Trainer(config).fit(), {"lr": 1e-4, "model": config.model.path, "config": config}


def lines_of(path: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / f"rollouts/step-{step:06d}.jsonl").read_text().splitlines()]


def test_credit_is_on_the_nodes_that_earned_it_and_two_steps_are_those_of_the_papers(
    grown: tuple[Path, dict[str, Any]], packed_tokens: list[int]
) -> None:
    path, settings = grown
    trial, *packed_tokens = packed_tokens
    optimizer = settings["config"].actor.optimizer
    model = AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=torch.float64, attn_implementation="eager"
    ).eval()
    first = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
    second = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
    for step in (1, 2):
        lines = lines_of(path, step)
        assert [line["schema_version"] for line in lines] == [2, 2]
        rows = []
        for sample, line in enumerate(lines):
            rows += check_tree(line, sample)
        # Everything that the policy sampled is in one row and in one only.
        sampled = sum(len(node["ids"]) for line in lines for node in line["nodes"] if node["kind"] == "turn")
        assert sum(sum(row["response_mask"]) for row in rows) == sampled
        # Log-probs and update compute what rows of both samples begin with once.
        whole = [row["prompt_ids"] + row["response_ids"] for row in rows]
        prefixes = {tuple(ids[:end]) for ids in whole for end in range(1, len(ids) + 1)}
        assert packed_tokens[2 * step - 2 : 2 * step] == [len(prefixes)] * 2
        assert len(prefixes) < 0.7 * sum(map(len, whole))
        losses = []
        for row in rows:
            ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
            places = torch.tensor(row["response_mask"]).nonzero()[:, 0] + len(row["prompt_ids"])
            log_probs = model(ids, use_cache=False).logits[0, places - 1].log_softmax(-1)
            log_probs_n = log_probs.gather(-1, ids[0, places, None])[:, 0]
            advantages_n = torch.tensor(row["advantages"], dtype=torch.float64)[places - len(row["prompt_ids"])]
            losses.append(-advantages_n * (log_probs_n - log_probs_n.detach()).exp())
        model.zero_grad()
        torch.cat(losses).mean().backward()
        gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
        scale = min(1.0, settings["config"].actor.grad_clip / norm)
        beta1, beta2 = optimizer.betas
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                gradient = gradients[name] * scale
                first[name] = beta1 * first[name] + (1 - beta1) * gradient
                second[name] = beta2 * second[name] + (1 - beta2) * gradient.square()
                moved = (first[name] / (1 - beta1**step)) / ((second[name] / (1 - beta2**step)).sqrt() + 1e-8)
                parameter -= settings["lr"] * (moved + optimizer.weight_decay * parameter)
        saved = load_file(path / f"checkpoints/step-{step:06d}/actor/model.safetensors")
        assert {each.dtype for each in saved.values()} == {torch.float64}
        gaps = [(saved[name] - each).abs().max().item() for name, each in model.named_parameters() if name in saved]
        assert max(gaps) < 1e-6, max(gaps)


def check_tree(line: dict[str, Any], sample: int) -> list[dict[str, Any]]:
    """The rows of a trajectory, whose credit is what follows by hand from the loop."""
    nodes, agents = line["nodes"], line["agents"]
    turns = [number for number, node in enumerate(nodes) if node["kind"] == "turn"]
    root, left, right, summary, compacted, worker = turns
    parents = [nodes[number]["parent"] for number in (root, left, right, summary)]
    # Both branches hang, each behind its own message, on the first turn, and the summary on the left one.
    assert nodes[parents[1]]["parent"] == nodes[parents[2]]["parent"] == root and parents[1] != parents[2]
    assert nodes[parents[3]]["parent"] == left
    assert [nodes[nodes[number]["parent"]]["parent"] for number in (compacted, worker)] == [None, None]
    last = 16.0 * (1 + sample)
    calls = [[call["reward"] for call in nodes[number]["calls"]] for number in turns]
    assert calls == [[1.0], [2.0], [4.0], [], [8.0], [last]]
    assert Counter(node.get("agent") for node in nodes if node["kind"] == "turn") == {"planner": 5, "worker": 1}
    planner, of_worker = agents
    assert planner["turn_rewards"] == [1.0, 2.0, 4.0, 0.0, 8.0] and of_worker["turn_rewards"] == [last]
    assert (planner["reward"], of_worker["reward"]) == (15.5, last + 0.25)
    rows = [row_of(line, agent, row) for agent in agents for row in agent["rows"]]
    assert [row["agent"] for row in rows] == ["planner"] * 3 + ["worker"]
    # Of each row, from the last turn back: what its turns earned, and the outcome, which each row of the agent has.
    expected = [
        {0: 1 + 2 + 0 + 0.5, 1: 2 + 0 + 0.5, 3: 0 + 0.5},  # left, with the turn before the fork and the summary
        {2: 4 + 0.5},
        {4: 8 + 0.5},
        {0: last + 0.25},
    ]
    for row, by_turn in zip(rows, expected, strict=True):
        found = {
            (turn, advantage) for turn, advantage in zip(row["turn_ids"], row["advantages"], strict=True) if turn >= 0
        }
        assert found == {(turn, value - 16) for turn, value in by_turn.items()}
    # The branch's row has what it shares with the left one as its prompt.
    assert rows[1]["prompt_ids"] == [token for node in nodes[: root + 1] for token in node["ids"]]
    return rows
