"""Every message in full: key path, place, what was found, what is allowed."""

import pytest

from agentrl_core.api.errors import ConfigError
from agentrl_core.config import Config, describe
from agentrl_core.config.validation import _VERL


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "cluster:\n  runtim: ray",
            "cluster.runtim (config.yaml:11): unknown key; did you mean 'runtime'? allowed: runtime, address, "
            "nodes, processes_per_node, device, cpu_threads",
        ),
        (
            "plugins:\n  lr: 1",
            "plugins.lr (config.yaml:11): unknown key; did you mean 'actor.optimizer.lr' or 'critic.optimizer.lr'? "
            "allowed: block, allow_drift",
        ),
        (
            "plugins:\n  zzzz: 1",
            "plugins.zzzz (config.yaml:11): unknown key; allowed: block, allow_drift",
        ),
        (
            "actor:\n  optimizer:\n    lr: -1",
            "actor.optimizer.lr (config.yaml:12): expected a number > 0, found -1",
        ),
        (
            "actor:\n  epochs: 0",
            "actor.epochs (config.yaml:11): expected an integer >= 1, found 0",
        ),
        (
            "actor:\n  epochs: true",
            "actor.epochs (config.yaml:11): expected an integer >= 1, found true",
        ),
        (
            "actor:\n  epochs: 1.0",
            "actor.epochs (config.yaml:11): expected an integer >= 1, found 1.0",
        ),
        (
            "actor:\n  epochs: '5'",
            "actor.epochs (config.yaml:11): expected an integer >= 1, found '5'; leave out the quotes",
        ),
        (
            "actor:\n  grad_clip: .nan",
            "actor.grad_clip (config.yaml:11): expected a number > 0, found nan",
        ),
        (
            "trainer:\n  name: 5",
            "trainer.name (config.yaml:11): expected a string, found 5; put it in quotes",
        ),
        (
            "actor:\n  offload_optimizer: 1",
            "actor.offload_optimizer (config.yaml:11): expected true or false, found 1",
        ),
        (
            "trainer:\n  name: null",
            "trainer.name (config.yaml:11): expected a string, found null",
        ),
        (
            "trainer:\n  steps: many",
            "trainer.steps (config.yaml:11): expected an integer >= 1 or null, found 'many'",
        ),
        (
            "trainer: 5",
            "trainer (config.yaml:10): expected a section (a mapping), found 5",
        ),
        (
            "critic:\n  value_clip: 0",
            "critic.value_clip (config.yaml:11): expected a number > 0 or null, found 0",
        ),
        (
            "cluster:\n  device: gpu",
            "cluster.device (config.yaml:11): expected one of 'auto', 'cpu', 'cuda', found 'gpu'",
        ),
        (
            "cluster:\n  device: cude",
            "cluster.device (config.yaml:11): expected one of 'auto', 'cpu', 'cuda', found 'cude'; did you mean "
            "'cuda'?",
        ),
        (
            "plugins:\n  block: wandb",
            "plugins.block (config.yaml:11): expected a list of strings, found 'wandb'; write [wandb]",
        ),
        (
            "plugins:\n  block:\n    - wandb\n    - 3",
            "plugins.block.1 (config.yaml:13): expected a string, found 3; put it in quotes",
        ),
        (
            "actor:\n  optimizer:\n    betas: [0.9, 1.0]",
            "actor.optimizer.betas.1 (config.yaml:12): expected a number >= 0 and < 1, found 1.0",
        ),
        (
            "tools: [5]",
            "tools.0 (config.yaml:10): expected a plugin: a name or {name: …, config: …}, found 5",
        ),
        (
            "tools:\n  - timeout: 3",
            "tools.0.name (config.yaml:11): required key is missing (a registered name, 'package:name', or "
            "'./file.py:object' relative to the config file)",
        ),
        (
            "tools:\n  - name: search",
            "tools.0.config.secret (config.yaml:11): required key is missing (password of the tool)",
        ),
        (
            "hooks: [nothing]",
            "hooks.0.name (config.yaml:10): 'nothing' is not an installed hook",
        ),
        (
            "hooks: [printer]\nplugins: {block: [printer]}",
            "hooks.0.name (config.yaml:10): 'printer' is blocked",
        ),
        (
            "trainer:\n  trackers:\n    - name: console\n      config:\n        x: 1",
            "trainer.trackers.0.config.x (config.yaml:14): unknown key; allowed: none",
        ),
        (
            "trainer:\n  trackers:\n    - name: console\n      config: 5",
            "trainer.trackers.0.config (config.yaml:13): expected a mapping with the options of tracker "
            "'console', found 5",
        ),
        (
            "trainer:\n  name: ${trainer.nam}",
            "trainer.name (config.yaml:11): interpolation '${trainer.nam}': Interpolation key 'trainer.nam' not found",
        ),
        (
            "3: x",
            "3 (config.yaml:10): unknown key; allowed: model, data, rollout, engines, tools, interactions, "
            "environments, policies, reward, algorithm, actor, critic, reference, teacher, trainer, cluster, hooks, "
            "plugins",
        ),
    ],
)
def test_message(problems, valid, lines, message):
    assert problems(f"{valid}{lines}\n") == [message]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "rollout.engine.config.max_num_seqs=0",
            "rollout.engine.config.max_num_seqs (override 'rollout.engine.config.max_num_seqs=0'): "
            "expected an integer >= 1, found 0",
        ),
        (
            "rollout.engine.max_num_seqs=9",
            "rollout.engine.max_num_seqs (override 'rollout.engine.max_num_seqs=9'): unknown key; did you mean "
            "'rollout.engine.config.max_num_seqs'? allowed: name, python, tensor_parallel, "
            "pipeline_parallel, data_parallel, nodes, max_in_flight, retry, restarts, start_timeout, health_interval, "
            "health_timeout, replicas, placement, dtype, sleep, weight_transfer, config",
        ),
        (
            "rollout.engine.config.mode=slow",
            "rollout.engine.config.mode (override 'rollout.engine.config.mode=slow'): "
            "expected one of 'fast', 'small', found 'slow'",
        ),
        (
            "rollout.engine.config.stop=[1]",
            "rollout.engine.config.stop (override 'rollout.engine.config.stop=[1]'): "
            "expected an integer or a string, found a list",
        ),
        (
            "rollout.engine.config.window=[1]",
            "rollout.engine.config.window (override 'rollout.engine.config.window=[1]'): "
            "expected a list of 2 integers, found a list",
        ),
        (
            "rollout.engine.config.limits={1: 2}",
            "rollout.engine.config.limits.1 (override 'rollout.engine.config.limits={1: 2}'): "
            "expected a string as a key, found 1",
        ),
        (
            "rollout.engine.config.cache.size=x",
            "rollout.engine.config.cache.size (override 'rollout.engine.config.cache.size=x'): "
            "expected an integer >= 1, found 'x'",
        ),
        (
            "rollout.engine={name: fussy, config: {low: 3}}",
            "rollout.engine.config (override 'rollout.engine={name: fussy, config: {low: 3}}'): "
            "low (3) must not exceed high (1)",
        ),
        ("trainr.steps=1", None),
        (
            "data.train_batch_size=1",
            "data.train_batch_size (override 'data.train_batch_size=1'): unknown key, verl's name; here: "
            "data.batch_size",
        ),
        (
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref (override 'actor_rollout_ref.rollout.n=4'): unknown key, verl's name; `agentrl "
            "from-verl` of agentrl-compat-verl converts configurations of verl",
        ),
        (
            "trainer.stepz=1",
            "trainer.stepz (override 'trainer.stepz=1'): unknown key; did you mean 'steps'? allowed: name, output_dir, "
            "steps, epochs, seed, backend, resume, trackers, validation, checkpoint, profile, warn_after",
        ),
        ("trainer.steps", "override 'trainer.steps': expected key.path=value"),
        ("trainer..steps=1", "override 'trainer..steps=1': expected key.path=value"),
        ("trainer.name=[", None),
        (
            "model.path.x=1",
            None,
        ),
        (
            "tools.0.name=x",
            "tools.0.name (override 'tools.0.name=x'): '0' is no index of tools; allowed: none, the list is empty "
            "(or set the whole list: tools=[…])",
        ),
        (
            "trainer.trackers.4=console",
            "trainer.trackers.4 (override 'trainer.trackers.4=console'): '4' is no index of trainer.trackers; "
            "allowed: 0 to 3 (or set the whole list: trainer.trackers=[…])",
        ),
    ],
)
def test_message_of_an_override(problems, valid, override, message):
    (found,) = problems(valid, override)
    if message is None:
        assert f"override '{override}'" in found
    else:
        assert found == message


def test_all_problems_at_once_with_their_source(load, valid):
    text = valid.replace("  path: model\n", "  dtype: float8\n") + "trainer: {stepz: 3, seed: -1}\ntools: [nothing]\n"
    with pytest.raises(ConfigError) as caught:
        load(text, "rollout.n=none", "actor.optimizer.lr=fast")
    keys = [problem.split(" ")[0] for problem in caught.value.problems]
    assert keys == [
        "model.path",
        "model.dtype",
        "rollout.n",
        "tools.0.name",
        "actor.optimizer.lr",
        "trainer.stepz",
        "trainer.seed",
    ]
    assert caught.value.source.endswith("config.yaml")
    assert str(caught.value).startswith("7 problems in ")


def test_required_keys_of_an_empty_file(problems):
    assert problems("") == [
        "model.path (config.yaml): required key is missing (directory with weights, config and tokenizer, relative to "
        "the config file; or a model of the Hugging Face hub: org/name, org/name@revision)",
        "rollout.agent.loops (config.yaml): required key is missing (agent loops that rows select with agent_name; "
        "the first is the default)",
    ]


def test_a_default_plugin_that_is_missing_is_said_to_be_a_default(problems, valid):
    assert problems(valid + "plugins: {block: [hermes]}\n") == [
        "rollout.tool_parser.name (default): 'hermes' is blocked"
    ]


def test_unreadable_plugin_options(problems, valid):
    (problem,) = problems(valid, "rollout.engine=unreadable")
    assert problem.startswith("rollout.engine.config (override 'rollout.engine=unreadable'): the option types of ")
    assert problem.endswith("Unreadable cannot be evaluated: name 'NoSuchType' is not defined")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {path: [}", "config.yaml:1: not valid YAML: "),
        ("- 1", "config.yaml: expected a mapping of sections, found list"),
        (
            "trainer:\n  seed: 1\n  seed: 2",
            "seed (config.yaml:3): duplicate key in one section, first used in line 2",
        ),
        ("? [a]\n: 1", "config.yaml:1: expected text as a key, found tag:yaml.org,2002:seq"),
        ("x: !!python/object:os.system 1", "config.yaml:1: not valid YAML: could not determine a constructor"),
        ("x: &a [*a]", "config.yaml: not valid YAML: an alias that contains itself"),
    ],
)
def test_a_file_that_cannot_be_read(problems, text, message):
    (problem,) = problems(text)
    assert problem.startswith(message)


def test_missing_file(tmp_path):
    from agentrl_core.config import load_config

    path = tmp_path / "nowhere.yaml"
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.problems == (f"no such file: {path}",)


def test_keys_that_verls_names_lead_to_exist() -> None:
    existing = {option.path for option in describe(Config)}
    prefixes = {".".join(path.split(".")[: end + 1]) for path in existing for end in range(len(path.split(".")))}
    assert set(_VERL.values()) <= prefixes
    assert not set(_VERL) & prefixes
