"""Several policies in one run, each an adapter of one model: against PEFT and torch on their own."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from agentrl_core.api import ConfigError
from agentrl_core.cli.main import app
from agentrl_core.runs.records import RolloutRecord, read_rollouts
from agentrl_core.runs.run_dir import RunDir

Fit = Callable[..., RunDir]
TRIO = """
from agentrl_core.api import AgentLoopBase, Termination


class Trio(AgentLoopBase):
    \"\"\"White, black and ghost speak twice each.\"\"\"

    async def run(self, sampling_params, *, session, raw_prompt, **row):
        trajectories = {}
        for turn in range(6):
            agent = ("white", "black", "ghost")[turn % 3]
            session.agent = agent if AGENTS_ARE_SET else ""
            said = [{"role": "user", "content": f"to {agent}"}]
            if agent in trajectories:
                trajectories[agent].add_messages(said)
            else:
                trajectories[agent] = session.trajectory([*raw_prompt, *said])
            await trajectories[agent].generate(sampling_params)
        rows = []
        for agent, trajectory in trajectories.items():
            rows.append(trajectory.finish(Termination.COMPLETED))
            rows[-1].agent = agent
        return rows


def letters(trajectory):
    return sum(map(ord, trajectory.model_text)) % 17 / 17


def often_letters(trajectory):
    return letters(trajectory) if trajectory.extra_info["index"] < 4 else 0.0
"""
TRAINED = ("white", "black")
LR = {"white": 0.01, "black": 0.003}


@pytest.fixture
def adapters(tiny_run: Any) -> dict[str, Path]:
    """For each policy an adapter that changes the model, as PEFT saves it."""
    folders = {}
    for seed, name in enumerate(("white", "black", "ghost")):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(tiny_run.model)
        settings = LoraConfig(r=2 + seed, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
        adapted: Any = get_peft_model(model, settings)
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(parameter, std=0.3)
        adapted.save_pretrained(tiny_run.folder / f"from-{name}")
        folders[name] = tiny_run.folder / f"from-{name}"
    return folders


@pytest.fixture
def trio(fit: Fit, tiny_run: Any, adapters: dict[str, Path]) -> Fit:
    """White and black are trained, from adapters of their own."""
    # Equal files are one module.
    (tiny_run.folder / "trio.py").write_text(f"{TRIO}\nAGENTS_ARE_SET = True\n# {tiny_run.folder}\n")

    def run(ghost: Mapping[str, Any], **changes: Any) -> RunDir:
        policies: dict[str, Any] = {
            name: {"adapter": {"path": str(adapters[name])}, "actor": {"optimizer": {"lr": LR[name]}}}
            for name in TRAINED
        }
        policies["black"]["algorithm"] = {"aggregation": "seq-mean-token-sum"}
        return fit({
            "policies": {**policies, "ghost": dict(ghost)},
            "rollout.agent.loops": ["./trio.py:Trio"],
            "rollout.n": 4,
            "rollout.max_response_length": 60,
            "rollout.sampling.max_tokens": 5,
            "rollout.max_logprob_gap": 1e-3,
            "algorithm.advantage": {"name": "grpo"},
            "actor.grad_clip": 1e9,
            "reward.functions": [{"name": "./trio.py:letters", "isolation": "inline"}],
            "trainer.steps": 3,
            "trainer.checkpoint": {"interval": 1, "keep": 10},
            **changes,
        })  # fmt: skip

    return run


def rows_of(run: RunDir, step: int, agent: str) -> list[RolloutRecord]:
    return [row for row in read_rollouts(run.rollout_file(step, "train")) if row.agent == agent]


def saved(run: RunDir, step: int, policy: str) -> Path:
    return run.path / "checkpoints" / f"step-{step:06d}" / "policies" / policy


def with_adapter(model: Path, adapter: Path | None, trains: bool = False) -> Any:
    base = AutoModelForCausalLM.from_pretrained(model)
    return base if adapter is None else PeftModel.from_pretrained(base, str(adapter), is_trainable=trains)


def log_probs(model: Any, row: RolloutRecord) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the sampled tokens of a row, and what the engine said of them."""
    ids, start = torch.tensor([*row.prompt_ids, *row.response_ids]), len(row.prompt_ids)
    table = model(input_ids=ids[None]).logits[0, start - 1 : -1].float().log_softmax(-1)
    sampled = torch.tensor(row.response_mask).bool()
    assert row.response_logprobs is not None
    found = table.gather(-1, ids[start:, None]).squeeze(-1)[sampled]
    return found, torch.tensor(row.response_logprobs)[sampled]


def assert_sampled_with(model: Any, rows: list[RolloutRecord]) -> None:
    assert rows
    with torch.no_grad():
        for row in rows:
            expected, engine = log_probs(model, row)
            torch.testing.assert_close(engine, expected, atol=1e-4, rtol=0)


def test_each_policy_is_trained_on_its_own_rows_as_peft_would_train_it(
    trio: Fit, tiny_run: Any, adapters: dict[str, Path]
) -> None:
    run = trio({"frozen": True, "adapter": {"path": str(adapters["ghost"])}})
    for name in TRAINED:
        model = with_adapter(tiny_run.model, adapters[name], trains=True)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], LR[name], weight_decay=0.0)
        start = load_file(adapters[name] / "adapter_model.safetensors")
        for step in (1, 2, 3):
            rows = rows_of(run, step, name)
            assert {row.policy for row in rows} == {name}
            assert_sampled_with(model, rows)
            tokens = sum(sum(row.response_mask) for row in rows)
            for row in rows:
                found, _ = log_probs(model, row)
                advantage = float(row.advantage or 0.0)
                total = -(advantage * (found - found.detach()).exp()).sum()
                # black: the mean over sequences of sums over tokens.
                (total / (len(rows) if name == "black" else tokens)).backward()
            optimizer.step()
            optimizer.zero_grad()
            stored = load_file(saved(run, step, name) / "adapter_model.safetensors")
            own = {key.replace(".default.", "."): value for key, value in model.state_dict().items() if "lora_" in key}
            assert own.keys() == stored.keys()
            moved = sum(float((own[key] - start[key]).square().sum()) for key in own) ** 0.5
            off = sum(float((own[key] - stored[key]).square().sum()) for key in own) ** 0.5
            assert moved > 0.01 and off < 1e-3 * moved
    ghost = with_adapter(tiny_run.model, adapters["ghost"])
    for step in (1, 2, 3):
        rows = rows_of(run, step, "ghost")
        assert_sampled_with(ghost, rows)
        assert {(row.status, row.reason, row.policy) for row in rows} == {
            ("excluded", "its agent is not trained", "ghost")
        }
    assert not (saved(run, 1, "white").parent / "ghost").exists()
    metrics = run.read_metrics()
    for name in TRAINED:
        assert metrics[-1][f"policy/{name}/actor/lr"] == LR[name] and f"reward/policy/{name}" in metrics[-1]
    assert "reward/policy/ghost" in metrics[-1] and "actor/lr" not in metrics[-1]


def test_a_frozen_policy_without_an_adapter_is_the_model(trio: Fit, tiny_run: Any) -> None:
    run = trio({"frozen": True}, **{"trainer.steps": 2})
    result = CliRunner().invoke(app, ["replay", str(run.path)])
    # The recorded prompt holds what this loop says first, so it stands there twice; the turns are the same.
    assert re.search(r"24 trajectories, 24 differ: tokens 24\nmean reward (\S+) -> \1\n", result.output), result.output
    model = with_adapter(tiny_run.model, None)
    for step in (1, 2):
        assert_sampled_with(model, rows_of(run, step, "ghost"))


def test_a_copy_plays_with_the_weights_of_earlier_steps(trio: Fit, tiny_run: Any, adapters: dict[str, Path]) -> None:
    changes = {"rollout.deterministic": True, "trainer.steps": 5, "trainer.name": "through"}
    # Nothing is trained in step 3, which counts as one.
    changes |= {
        "data.sampler": "sequential",
        "reward.functions": [{"name": "./trio.py:often_letters", "isolation": "inline"}],
    }
    run = trio({"copy_of": "white", "updates_ago": 2}, **changes)
    idle = [row["step"] for row in run.read_metrics() if "policy/white/actor/grad_norm" not in row]
    assert idle == [3]
    # Step 4 samples with the weights after step 3; two updates before, they were those after step 1.
    for step, weights in enumerate((adapters["white"], adapters["white"], adapters["white"], 1, 2), 1):
        source = saved(run, weights, "white") if isinstance(weights, int) else weights
        assert_sampled_with(with_adapter(tiny_run.model, source), rows_of(run, step, "ghost"))
    trio({"copy_of": "white", "updates_ago": 2}, **{**changes, "trainer.steps": 3, "trainer.name": "resumed"})
    again = trio(
        {"copy_of": "white", "updates_ago": 2}, **{**changes, "trainer.name": "resumed", "trainer.resume": "auto"}
    )
    for name in TRAINED:
        one, other = (load_file(saved(each, 5, name) / "adapter_model.safetensors") for each in (run, again))
        assert all(torch.equal(one[key], other[key]) for key in one)
    for step in (4, 5):
        one_rows, other_rows = rows_of(run, step, "ghost"), rows_of(again, step, "ghost")
        assert [row.response_ids for row in one_rows] == [row.response_ids for row in other_rows]
    played = load_file(saved(run, 5, "ghost") / "adapter_model.safetensors")
    earlier = load_file(saved(run, 3, "white") / "adapter_model.safetensors")
    assert all(torch.equal(played[key], earlier[key]) for key in earlier)


def test_each_policy_is_exported_and_all_are_evaluated(trio: Fit, tiny_run: Any, adapters: dict[str, Path]) -> None:
    changes = {"trainer.steps": 1, "data.validation_files": ["validation.jsonl"], "trainer.validation.greedy": False}
    run = trio({"copy_of": "black", "updates_ago": 1}, **changes)
    checkpoint, folder = str(run.path / "checkpoints" / "latest"), tiny_run.folder
    for name in (*TRAINED, "ghost"):
        result = CliRunner().invoke(app, ["export", checkpoint, str(folder / name), "--policy", name])
        assert result.exit_code == 0, result.output
        assert sorted(file.name for file in (folder / name).glob("*.safetensors")) == ["adapter_model.safetensors"]
        with_adapter(tiny_run.model, folder / name)
    result = CliRunner().invoke(app, ["export", checkpoint, str(folder / "merged"), "--policy", "black", "--merge"])
    assert result.exit_code == 0 and (folder / "merged" / "model.safetensors").is_file(), result.output
    for arguments, found in ((["--policy", "grey"], "grey"), ([], "none")):
        result = CliRunner().invoke(app, ["export", checkpoint, str(folder / "no"), *arguments])
        assert result.exit_code == 1 and f"--policy: found {found}" in result.output
        assert "black, ghost, white" in " ".join(result.output.split())
    for arguments in (["--checkpoint", checkpoint], []):
        out = folder / f"eval-{len(arguments)}"
        command = ["eval", str(folder / "config.yaml"), *arguments, "--output", str(out), "--json"]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["metrics"]
        folders = {name: saved(run, 1, name) for name in (*TRAINED, "ghost")} if arguments else adapters
        rows = list(read_rollouts(RunDir(out).rollout_file(1 if arguments else 0, "validation")))
        for name in TRAINED:
            assert_sampled_with(with_adapter(tiny_run.model, folders[name]), [row for row in rows if row.agent == name])
        played = folders["ghost"] if arguments else adapters["black"]
        assert_sampled_with(with_adapter(tiny_run.model, played), [row for row in rows if row.agent == "ghost"])

    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("  white:", "  red:\n    agents: [white]", 1))
    result = CliRunner().invoke(app, ["eval", str(folder / "config.yaml"), "--checkpoint", checkpoint])
    assert result.exit_code and "has the policies black, ghost, white" in " ".join(result.output.split())


def test_a_loop_that_does_not_say_whose_turn_it_is_ends_the_run(trio: Fit, tiny_run: Any) -> None:
    (tiny_run.folder / "trio.py").write_text(f"{TRIO}\nAGENTS_ARE_SET = False\n# {tiny_run.folder}\n")
    with pytest.raises(ConfigError, match="set session.agent before the turn is generated"):
        trio({"frozen": True})


def test_an_agent_that_no_policy_plays_ends_the_run(trio: Fit) -> None:
    with pytest.raises(ConfigError, match="none plays the agent .ghost."):
        trio({"frozen": True, "agents": ["other"]})


def test_names_that_torch_uses_itself_are_refused(trio: Fit) -> None:
    with pytest.raises(ConfigError, match="policies: torch uses the names train, type itself; rename them"):
        trio({"frozen": True}, **{"model.adapter.rank": 2, "policies.train": {}, "policies.type": {}})


def test_a_resume_keeps_the_reference_that_a_policy_alone_has(trio: Fit, adapters: dict[str, Path]) -> None:
    policies = {"white": {"algorithm": {"kl_coef": 0.1}}, "black": {}, "ghost": {"frozen": True}}
    begun = {"path": str(adapters["white"])}
    trio({}, policies=policies, **{"trainer.steps": 1, "model.adapter": begun})
    with pytest.raises(ConfigError, match="was made with another adapter:\\n  model.adapter.path"):
        trio({}, policies=policies, **{"trainer.resume": "auto", "model.adapter": {"rank": 16}})


@pytest.mark.slow
@pytest.mark.ray
def test_ranks_and_processes_train_the_same_policies(trio: Fit) -> None:
    ghost = {"copy_of": "white", "updates_ago": 1}
    changes = {"rollout.deterministic": True, "trainer.steps": 2}
    local = trio(ghost, **changes, **{"trainer.name": "local"})
    cluster = {"runtime": "ray", "processes_per_node": 2, "device": "cpu"}
    ranks = trio(ghost, **changes, **{"trainer.name": "ranks", "cluster": cluster, "rollout.engine.replicas": 1})
    for name in TRAINED:
        one, other = (load_file(saved(run, 1, name) / "adapter_model.safetensors") for run in (local, ranks))
        for key in one:
            torch.testing.assert_close(one[key], other[key], atol=1e-5, rtol=1e-4)
    gaps = [value for row in ranks.read_metrics() for key, value in row.items() if key.endswith("logprob_gap_max")]
    assert gaps and max(gaps) < 1e-4
