"""Keys and values of verl's example scripts, what they become, and that agentrl accepts the result."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl_compat_verl import keys
from agentrl_compat_verl.conversion import Conversion
from agentrl_compat_verl.convert import convert
from agentrl_compat_verl.keys import UNSET, Key
from agentrl_compat_verl.reading import read
from agentrl_core.api import ConfigError

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
BASE = (f"{M}.path=org/model", "data.train_files=/d/train.parquet", f"{R}.n=5", "algorithm.adv_estimator=grpo")

CASES: dict[str, tuple[tuple[str, ...], dict[str, Any], set[str]]] = {
    "grpo with a reference": (
        (
            "data.train_batch_size=1024", "data.max_response_length=1024", "data.filter_overlong_prompts=True",
            f"{A}.ppo_mini_batch_size=256", f"{A}.ppo_micro_batch_size_per_gpu=80", f"{A}.use_kl_loss=True",
            f"{A}.kl_loss_coef=0.001", f"{A}.kl_loss_type=low_var_kl", f"{R}.log_prob_micro_batch_size_per_gpu=160",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=160",
            "actor_rollout_ref.ref.fsdp_config.param_offload=True", "trainer.logger=console", "trainer.save_freq=20",
        ),
        {
            "data.batch_size": 1024, "actor.mini_batches": 4, "actor.micro_batch_tokens": 80 * 1536,
            "algorithm.kl_coef": 0.001, "reference.micro_batch_tokens": 160 * 1536,
            "reference.offload_parameters": True, "trainer.checkpoint.interval": 20,
            "actor.optimizer.weight_decay": 0.01, "algorithm.loss.config.dual_clip": 3.0,
        },
        set(),
    ),
    "ppo with a critic and a reward model": (
        (
            "algorithm.adv_estimator=gae", "data.train_batch_size=4096", f"{A}.ppo_mini_batch_size=512",
            f"{A}.use_dynamic_bsz=True", f"{A}.ppo_max_token_len_per_gpu=24000", "critic.optim.lr=1e-5",
            "critic.model.path=org/critic", "critic.ppo_max_token_len_per_gpu=98304", "reward_model.enable=True",
            "reward_model.model.path=org/rm", "trainer.critic_warmup=2", f"{R}.n=1",
        ),
        {
            "algorithm.advantage.name": "gae", "actor.mini_batches": 8, "actor.micro_batch_tokens": 24000,
            "critic.path": "org/critic", "critic.micro_batch_tokens": 98304, "critic.optimizer.lr": 1e-5,
            "critic.mini_batches": 8, "critic.value_clip": 0.5, "critic.warmup_steps": 2, "rollout.n": 1,
        },
        {"reward_model.enable", "reward_model.model.path"},
    ),
    "a new adapter": (
        (f"{M}.lora_rank=64", f"{M}.lora_alpha=32", f"{M}.target_modules=[q_proj,v_proj]", f"{A}.optim.lr=3e-5"),
        {"model.adapter.rank": 64, "model.adapter.alpha": None, "model.adapter.targets": ["q_proj", "v_proj"]},
        set(),
    ),
    "an adapter of verl's defaults, but for some layers": (
        (f"{M}.lora_rank=16", f"{M}.target_modules=all-linear", f"{M}.exclude_modules=.*visual.*"),
        {"model.adapter.rank": 16, "model.adapter.alpha": 16, "model.adapter.targets": None},
        {f"{M}.exclude_modules"},
    ),
    "an adapter for layers that match a pattern": (
        (f"{M}.lora_rank=8", f"{M}.target_modules='.*(q|v)_proj'"),
        {"model.adapter.rank": 8, "model.adapter.targets": None},
        {f"{M}.target_modules"},
    ),
    "a stored adapter": (
        (f"{M}.lora_rank=64", f"{M}.lora_adapter_path=/a/adapter"),
        {"model.adapter.path": "/a/adapter", "model.adapter.rank": None},
        set(),
    ),
    "no adapter": ((f"{M}.lora_rank=0", f"{M}.lora_alpha=16"), {"model.adapter.alpha": None}, set()),
    "gspo": (
        (
            f"{A}.policy_loss.loss_mode=gspo", f"{A}.loss_agg_mode=seq-mean-token-mean", f"{A}.clip_ratio_low=0.0003",
            f"{A}.clip_ratio_high=0.0005", "data.train_batch_size=512", f"{A}.ppo_mini_batch_size=128",
            f"{A}.optim.lr_warmup_steps_ratio=0.05", "trainer.total_training_steps=500", f"{R}.val_kwargs.top_p=0.7",
            f"{R}.val_kwargs.temperature=1.0", f"{R}.top_k=-1", "trainer.resume_mode=auto",
        ),
        {
            "algorithm.loss.name": "gspo", "algorithm.loss.config.clip_high": 0.0005,
            "algorithm.aggregation": "seq-mean-token-mean", "actor.optimizer.warmup_steps": 100,
            "trainer.validation.greedy": False, "trainer.validation.sampling.top_p": 0.7, "trainer.resume": "auto",
        },
        set(),
    ),
    "rloo against the engine's policy": (
        (
            "algorithm.adv_estimator=rloo", "algorithm.rollout_correction.rollout_is=sequence",
            "algorithm.rollout_correction.rollout_is_threshold=2.0",
            "algorithm.rollout_correction.rollout_is_batch_normalize=true",
            "algorithm.rollout_correction.bypass_mode=true", "algorithm.rollout_correction.loss_type=reinforce",
            "data.truncation=left", "data.train_batch_size=128", f"{A}.ppo_mini_batch_size=32",
        ),
        {
            "algorithm.loss": {"name": "tis_reinforce", "config": {"max_ratio": 2.0}}, "actor.mini_batches": 4,
            "data.overlong_prompts": "left",
        },
        set(),
    ),
    "truncated weights": (
        (
            "algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=3.0",
            "algorithm.rollout_correction.rollout_rs='token_k1,seq_max_k3'",
            "algorithm.rollout_correction.rollout_rs_threshold='2.0,0.1'",
        ),
        {
            "algorithm.correction.name": "divergence_rejection",
            "algorithm.correction.config": {
                "limits": {"token_k1": [0.5, 2.0], "seq_max_k3": [0.1]}, "weights": "token", "max_weight": 3.0,
            },
        },
        set(),
    ),
    "truncated weights and rows far from the policy": (
        (
            "algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
            "algorithm.rollout_correction.rollout_rs_threshold=0.99_1.01",
        ),
        {
            "algorithm.correction.name": "geometric_rejection",
            "algorithm.correction.config": {"low": 0.99, "high": 1.01, "max_weight": 2.0},
        },
        set(),
    ),
    "weights of rows within two bounds, and a rejection": (
        (
            "algorithm.rollout_correction.rollout_is=sequence",
            "algorithm.rollout_correction.rollout_is_threshold=0.5_5.0",
            "algorithm.rollout_correction.rollout_rs=token_k2", "algorithm.rollout_correction.rollout_rs_threshold=0.1",
        ),
        {"algorithm.correction.name": "sequence_icepop", "algorithm.correction.config": {"low": 0.5, "high": 5.0}},
        {"algorithm.rollout_correction.rollout_rs"},
    ),
    "a rejection that verl does not have": (
        (
            "algorithm.rollout_correction.rollout_rs=seq_max_k1",
            "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
        ),
        {"algorithm.correction.name": None},
        {"algorithm.rollout_correction.rollout_rs"},
    ),
    "reinforce++ with a discount and another estimator of the KL": (
        (
            "algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.99", f"{A}.use_kl_loss=True",
            f"{A}.kl_loss_type=abs+",
        ),
        {"algorithm.advantage.config.gamma": 0.99, "algorithm.kl_estimator": "abs+"},
        set(),
    ),
    "cispo": (
        (f"{A}.policy_loss.loss_mode=cispo", f"{A}.clip_ratio_low=10", f"{A}.clip_ratio_high=0.2"),
        {"algorithm.loss.name": "cispo", "algorithm.loss.config.clip_high": 0.2},
        set(),
    ),
    "tools on sglang": (
        (
            f"{R}.name=sglang", f"{R}.gpu_memory_utilization=0.85", f"{R}.multi_turn.enable=True",
            f"{R}.multi_turn.max_user_turns=16", f"{R}.multi_turn.max_assistant_turns=16",
            f"{R}.multi_turn.tool_config_path=tools.yaml", f"{A}.clip_ratio_high=0.28", f"{A}.clip_ratio_c=10.0",
            "custom_reward_function.path=retool.py", "data.custom_cls.path=retool.py", f"{R}.val_kwargs.n=30",
            f"{R}.val_kwargs.temperature=1.0", "trainer.logger=['console','wandb']",
            "trainer.project_name=retool",
        ),
        {
            "rollout.engine.name": "sglang", "rollout.engine.config.mem_fraction": 0.85,
            "rollout.engine.config.max_running_requests": 256, "trainer.validation.n": 30,
            "algorithm.loss.config.clip_high": 0.28, "algorithm.loss.config.dual_clip": 10.0,
            "trainer.trackers": [
                "console", "jsonl", "tensorboard", "curve",
                {"name": "wandb", "config": {"project": "retool", "mode": "online"}},
            ],
        },
        {"data.custom_cls.path"},
    ),
    "remax": (
        (
            "algorithm.adv_estimator=remax", "algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.001",
            "data.train_batch_size=512", f"{A}.ppo_mini_batch_size=128", f"{A}.use_dynamic_bsz=True",
            f"{A}.ppo_max_token_len_per_gpu=30000", f"{R}.gpu_memory_utilization=0.8",
        ),
        {
            "algorithm.advantage.name": "remax", "rollout.engine.config.mem_fraction": 0.8,
            "algorithm.kl_placement": "reward", "algorithm.kl_coef": 0.001,
        },
        set(),
    ),
    "dynamic sampling and an adaptive KL penalty": (
        (
            "algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc",
            "algorithm.filter_groups.max_num_gen_batches=8", "algorithm.use_kl_in_reward=True",
            "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.2",
        ),
        {"rollout.resample_rounds": 7, "algorithm.kl_target": 0.2, "algorithm.kl_coef": 0.001},
        set(),
    ),
    "reinforce++ with a baseline": (
        ("algorithm.adv_estimator=reinforce_plus_plus_baseline", f"{A}.kl_loss_type=mse", "trainer.n_gpus_per_node=16"),
        {"algorithm.advantage.name": "reinforce_plus_plus_baseline", "cluster.processes_per_node": 16},
        set(),
    ),
    "gpg": (
        ("algorithm.adv_estimator=gpg", f"{A}.policy_loss.loss_mode=gpg", f"{A}.use_kl_loss=False"),
        {"algorithm.advantage.name": "gpg", "algorithm.loss.name": "gpg"},
        set(),
    ),
    "optimal token baseline": (
        ("algorithm.adv_estimator=optimal_token_baseline", f"{A}.calculate_sum_pi_squared=True"),
        {"algorithm.advantage.name": "optimal_token_baseline"},
        set(),
    ),
    "sapo": (
        (f"{A}.policy_loss.loss_mode=sapo", f"{A}.tau_pos=1.0", f"{A}.tau_neg=1.1"),
        {"algorithm.loss.name": "sapo", "algorithm.loss.config.tau_negative": 1.1},
        set(),
    ),
    "gmpo and long answers of dapo": (
        (
            f"{A}.policy_loss.loss_mode=geo_mean", f"{A}.clip_ratio_low=0.3", "reward_model.reward_manager=dapo",
            "+reward_model.reward_kwargs.overlong_buffer_cfg.len=4096",
        ),
        {"algorithm.loss.name": "gmpo", "algorithm.loss.config.clip_low": 0.3},
        {"reward_model.reward_manager", "reward_model.reward_kwargs.overlong_buffer_cfg.len"},
    ),
}  # fmt: skip

CHECK = """
import json, sys
from agentrl_core.config import load_config, to_dict
from agentrl_core.api import AgentRLError
results = []
for path in sys.argv[1:]:
    try:
        results.append(to_dict(load_config(path, [], check_files=False)))
    except AgentRLError as error:
        results.append(str(error))
json.dump(results, sys.stdout)
"""


def loaded(folder: Path, trees: list[dict[str, Any]]) -> list[Any]:
    """What agentrl makes of each configuration, or its message; all in one process."""
    files = [folder / f"{index}.yaml" for index in range(len(trees))]
    for file, tree in zip(files, trees, strict=True):
        reward = {"functions": ["hash_answer"]}
        file.write_text(yaml.safe_dump({**tree, "reward": {**tree.get("reward", {}), **reward}}))
    command = [sys.executable, "-c", CHECK, *map(str, files)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    results: list[Any] = json.loads(output)
    return results


def converted(*overrides: str) -> Conversion:
    return convert(read([*BASE, *overrides]))


@pytest.mark.parametrize("name", CASES)
def test_keys_of_an_example(name: str) -> None:
    overrides, expected, decisions = CASES[name]
    result = converted(*overrides)
    assert {key: result.values.get(key) for key in expected} == expected
    assert decisions <= set(result.decisions)
    assert not [key for key, reason in result.missing.items() if reason.startswith("unknown")]
    reported = {*result.converted, *result.default, *result.missing, *result.decisions, *result.incomplete}
    assert {keys.RENAMED.get(key, key) for key in read(overrides).values} <= {*reported, "custom_reward_function.path"}


def test_agentrl_accepts_every_example(tmp_path: Path) -> None:
    results = loaded(tmp_path, [converted(*overrides).tree for overrides, _, _ in CASES.values()])
    assert {name: found for name, found in zip(CASES, results, strict=True) if isinstance(found, str)} == {}


def at(tree: Any, path: str) -> Any:
    for part in path.split("."):
        tree = tree[int(part)] if isinstance(tree, list) else tree.get(part)
    return tree


def test_defaults_of_agentrl_are_those_of_the_tables(tmp_path: Path) -> None:
    """A converted key that equals the default is left out, so a wrong default would change the run."""
    choices: list[tuple[str, str, str, tuple[Key, ...]]] = [
        *(("vllm", "grpo", name, table) for name, table in keys.LOSSES.values()),
        *(("vllm", name, "ppo", table) for name, table in keys.ESTIMATOR_OPTIONS.items()),
        *((name, "grpo", "ppo", table) for name, table in keys.ENGINES.items()),
        ("hf", "gae", "ppo", (*keys.KEYS, *keys.CRITIC, *keys.REFERENCE, *keys.VALIDATION_SAMPLING, *keys.TOOL_AGENT)),
    ]
    trees = [
        {
            "model": {"path": "/m"},
            "data": {"train_files": ["/d.parquet"]},
            "rollout": {"engine": engine, "agent": {"loops": ["tool_agent"]}},
            "algorithm": {"advantage": advantage, "loss": loss},
            "cluster": {"runtime": "ray"},
        }
        for engine, advantage, loss, _ in choices
    ]
    wrong = [
        (key.here, key.here_default, at(tree, key.here))
        for tree, (_, _, _, table) in zip(loaded(tmp_path, trees), choices, strict=True)
        for key in table
        if key.here not in ("model.path", "data.train_files") and at(tree, key.here) != key.here_default
    ]
    assert wrong == []


SCRIPT = r"""
#!/usr/bin/env bash
# data.train_batch_size=1 is a comment
size=${SIZE:-64}
prompt=$((1024 * 2)); answer=$(nproc)
files="['/a.parquet', '/b.parquet']"
DATA=(
    data.train_files="$files"
    data.max_prompt_length=$(((prompt + 1024) * 2))
)
python3 -m verl.trainer.main_ppo --config-name=ppo "${DATA[@]}" \
    data.train_batch_size=${size} \
    +data.max_response_length=$answer \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    trainer.logger='["console","wandb"]' $@
"""


def test_a_script_is_read_and_not_run(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    assert read([str(script), "data.seed=3"], {}).values == {
        "data.train_files": ["/a.parquet", "/b.parquet"],
        "data.max_prompt_length": 6144,
        "data.train_batch_size": 64,
        "data.max_response_length": "$(nproc)",
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "trainer.logger": ["console", "wandb"],
        "data.seed": 3,
    }
    assert "$(nproc)" in convert(read([str(script)], {})).decisions["data.max_response_length"]


def test_trees_and_lists_of_yaml(tmp_path: Path) -> None:
    (tmp_path / "tree.yaml").write_text("data: {train_batch_size: 8, seed: null}\ntrainer: {nnodes: 2}\n")
    (tmp_path / "overrides.yaml").write_text("- data.train_batch_size=16\n")
    found = read([str(tmp_path / "tree.yaml"), str(tmp_path / "overrides.yaml")])
    assert found.values == {"data.train_batch_size": 16, "trainer.nnodes": 2}


@pytest.mark.parametrize(
    ("argument", "message"), [("nowhere.sh", "nowhere.sh: expected verl's key=value"), ("a=b", "a=b: expected verl's")]
)
def test_what_is_no_source(argument: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read([argument])


def test_a_value_that_is_no_number() -> None:
    with pytest.raises(ConfigError, match="data.train_batch_size: expected a number, found 'many'"):
        converted("data.train_batch_size=many")


def test_what_nobody_knows_is_reported() -> None:
    result = converted("trainer.brand_new=1", f"{A}.policy_loss.loss_mode=brand_new")
    assert result.missing["trainer.brand_new"] == "unknown to this converter"
    assert "brand_new" in result.decisions[f"{A}.policy_loss.loss_mode"]


def test_the_command(tmp_path: Path) -> None:
    output = tmp_path / "config.yaml"
    command = [sys.executable, "-m", "agentrl_core.cli.main", "from-verl", *BASE, "--output", str(output)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert yaml.safe_load(output.read_text())["rollout"]["n"] == 5
    assert "To decide" in done.stderr and not done.stdout


def test_every_default_that_is_unset_is_left_out() -> None:
    assert not any(value is UNSET for value in converted().values.values())
