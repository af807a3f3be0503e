"""What a sound configuration becomes."""

from pathlib import Path

import pytest

from agentrl_core.api.errors import ConfigError
from agentrl_core.config import Config, to_dict
from agentrl_core.config.schema import AgentConfig, AgentLoopSlot, DataConfig, ModelConfig, RolloutConfig


def test_defaults_come_from_the_schema(load, valid):
    config = load(valid)
    assert isinstance(config, Config)
    assert config.trainer.seed == 0
    assert [slot.name for slot in config.trainer.trackers] == ["console", "jsonl", "tensorboard", "curve"]


def test_slots_hold_instances_of_the_plugins_options_and_references(load, valid):
    config = load(valid, "rollout.engine.config.max_num_seqs=3", "rollout.engine.config.window=[2, 5]")
    options = config.rollout.engine.config
    assert (type(options).__name__, options.max_num_seqs, options.window) == ("EngineOptions", 3, (2, 5))
    assert options.cache.size == 1
    assert config.rollout.engine.ref.dist == "fake"
    assert config.rollout.agent.loops[0].ref.kind == "agent_loop"
    assert config.algorithm.advantage.ref.name == "grpo"


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "0.0001", ".1e-3", "10e-5", "1.e-4"])
def test_numbers_as_people_write_them(load, valid, text):
    for config in (
        load(valid, f"actor.optimizer.lr={text}"),
        load(f"{valid}actor: {{optimizer: {{lr: {text}}}}}\n"),
    ):
        assert config.actor.optimizer.lr == pytest.approx(1e-4)


@pytest.mark.parametrize(("before", "now"), [("true", "all"), ("false", "none")])
def test_the_file_of_a_run_from_before_rollout_records_still_loads(load, valid, before, now):
    config = load(f"{valid}trainer: {{save_rollouts: {before}}}\n")
    assert config.rollout.records == now
    assert load(valid).rollout.records == "all"


@pytest.mark.parametrize(("base", "file"), [("true", "false"), ("false", "true")])
def test_a_file_that_extends_another_one_has_the_last_word_of_it(load, write, valid, base, file):
    write(f"{valid}trainer: {{save_rollouts: {base}}}\n", "base.yaml")
    config = load(f"extends: base.yaml\ntrainer: {{save_rollouts: {file}}}\n")
    assert config.rollout.records == ("none" if file == "false" else "all")


def test_what_is_no_boolean_there_is_an_error(load, valid):
    with pytest.raises(ConfigError, match=r"trainer.save_rollouts .*: unknown key; in its place: rollout.records"):
        load(f"{valid}trainer: {{save_rollouts: never}}\n")


def test_an_option_of_an_earlier_version_that_changes_nothing_is_ignored_with_a_warning(write, valid, caplog):
    from agentrl_core.config import load_config

    file = Path(write(valid.replace("[exact]", "[exact_number]") + "cluster: {device: cpu}\n"))
    config = load_config(file, ["rollout.tool_parser.config.starts_in_think=true"], check_files=False)
    assert config.rollout.tool_parser.name == "hermes"
    (warning,) = caplog.messages
    assert warning.startswith("rollout.tool_parser.config.starts_in_think: this option is gone and is ignored. A turn")
    with pytest.raises(ConfigError, match=r"starts_in_thnk .*: unknown key"):
        load_config(file, ["rollout.tool_parser.config.starts_in_thnk=true"], check_files=False)


def test_an_integer_is_a_fine_number(load, valid):
    config = load(valid, "actor.grad_clip=1")
    assert config.actor.grad_clip == 1.0
    assert isinstance(config.actor.grad_clip, float)


def test_dates_and_versions_stay_strings(load, valid):
    assert load(valid, "trainer.name=2026-01-31").trainer.name == "2026-01-31"


def test_an_option_of_two_types_keeps_the_one_that_was_written(load, valid):
    assert load(valid, "rollout.engine.config.stop=7").rollout.engine.config.stop == 7
    assert load(valid, "rollout.engine.config.stop='7'").rollout.engine.config.stop == "7"


def test_paths_are_relative_to_where_they_were_written(load, valid, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config = load(valid, "data.validation_files=[v.jsonl]", "rollout.engine.config.weights=w.bin")
    assert config.model.path == str(tmp_path / "model")
    assert config.data.train_files == [str(tmp_path / "train.jsonl")]
    assert config.data.validation_files == [str(elsewhere / "v.jsonl")]
    assert config.rollout.engine.config.weights == str(elsewhere / "w.bin")


def test_addresses_and_absolute_paths_are_left_alone(load, valid):
    config = load(valid, "data.train_files=[/a/b.jsonl, 's3://bucket/c.parquet']")
    assert config.data.train_files == ["/a/b.jsonl", "s3://bucket/c.parquet"]


def test_file_plugins_are_relative_to_where_they_were_written(load, write, valid, tmp_path, monkeypatch):
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    write("", "reward.py")
    write("", "cwd/hook.py")
    config = load(valid.replace("[exact]", "[./reward.py:score]"), "hooks=[hook.py:Hook]")
    assert config.reward.functions[0].name == f"{tmp_path / 'reward.py'}:score"
    assert config.reward.functions[0].ref.name == "reward.py:score"
    assert config.hooks[0].name == f"{tmp_path / 'cwd' / 'hook.py'}:Hook"


def test_interpolations_see_values_defaults_and_the_environment(load, valid, tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_TAG", "tag")
    text = valid.replace("[train.jsonl]", '["${model.path}/train.jsonl"]')
    config = load(text, "trainer.name=${oc.env:RUN_TAG}-${trainer.seed}", "actor.epochs=${rollout.n}", "rollout.n=4")
    assert config.trainer.name == "tag-0"
    assert config.actor.epochs == 4
    assert config.data.train_files == [str(tmp_path / "model" / "train.jsonl")]


def test_an_interpolation_may_be_a_whole_list_of_slots(load, valid):
    hooks = "model.chat_template_kwargs={mine: [printer]}"
    config = load(valid, hooks, "hooks=${model.chat_template_kwargs.mine}")
    assert [slot.name for slot in config.hooks] == ["printer"]


def test_interpolation_problems_come_with_the_others(problems, valid):
    found = problems(valid, "trainer.name=${a", "trainer.output_dir=${trainer.output_dir}", "actor.epochs=${nope}")
    assert [message.split(" ")[0] for message in found] == ["trainer.name", "trainer.output_dir", "actor.epochs"]


def test_an_escaped_interpolation_is_text(load, valid):
    assert load(valid, r"trainer.name=\${x}").trainer.name == "${x}"


def test_anchors_and_merge_keys(load, valid):
    text = (
        valid + "actor: {optimizer: &adam {lr: 0.5, weight_decay: 0.1}}\ncritic: {optimizer: {<<: *adam, lr: 0.25}}\n"
    )
    critic = load(text).critic.optimizer
    assert (critic.lr, critic.weight_decay) == (0.25, 0.1)


class TestExtends:
    def test_the_own_values_win(self, load, write, valid):
        write(valid + "trainer: {seed: 1, steps: 2}\n", "base.yaml")
        config = load("extends: base.yaml\ntrainer: {seed: 5}\n")
        assert (config.trainer.seed, config.trainer.steps) == (5, 2)

    def test_lists_are_replaced(self, load, write, valid):
        write(valid + "hooks: [printer, printer]\n", "base.yaml")
        assert load("extends: base.yaml\nhooks: []\n").hooks == []

    def test_each_file_keeps_its_own_directory(self, load, write, valid, tmp_path):
        write(valid, "shared/base.yaml")
        config = load("extends: shared/base.yaml\ndata: {validation_files: [v.jsonl]}\n")
        assert config.model.path == str(tmp_path / "shared" / "model")
        assert config.data.validation_files == [str(tmp_path / "v.jsonl")]

    def test_another_slot_name_drops_the_options(self, load, write, valid):
        write(valid.replace("rollout:\n", "rollout:\n  engine: {config: {max_num_seqs: 2}}\n"), "base.yaml")
        changed = load("extends: base.yaml\nrollout: {engine: {name: fussy, config: {high: 7}}}\n")
        kept = load("extends: base.yaml\nrollout: {engine: {name: hf, config: {stop: 3}}}\n")
        assert changed.rollout.engine.config.high == 7
        assert (kept.rollout.engine.config.max_num_seqs, kept.rollout.engine.config.stop) == (2, 3)

    def test_messages_name_the_file(self, problems, write, valid):
        write(valid + "trainer:\n  seed: x\n", "shared/base.yaml")
        assert problems("extends: shared/base.yaml\ntrainer:\n  steps: x\n") == [
            "trainer.steps (config.yaml:3): expected an integer >= 1 or null, found 'x'",
            "trainer.seed (shared/base.yaml:11): expected an integer >= 0, found 'x'",
        ]

    def test_a_circle_is_shown(self, problems, write):
        write("extends: config.yaml\n", "base.yaml")
        assert problems("extends: base.yaml\n") == [
            "extends: files extend each other in a circle: config.yaml -> base.yaml -> config.yaml"
        ]

    def test_missing_or_misspelt(self, problems, tmp_path):
        assert problems("extends: no.yaml\n") == [f"extends (config.yaml:1): no such file: {tmp_path / 'no.yaml'}"]
        assert problems("extends: [a]\n") == ["extends (config.yaml:1): expected a file name, found a list"]


class TestBind:
    def built(self, **rollout) -> Config:
        agent = AgentConfig(loops=[AgentLoopSlot("single_turn")])
        return Config(
            model=ModelConfig(path="model"),
            data=DataConfig(train_files=["train.jsonl"]),
            rollout=RolloutConfig(agent=agent, **rollout),
        )

    def test_a_tree_built_in_python(self, bind, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        config = self.built()
        config.reward.manager.name = "tools_only"
        bound = bind(config)
        assert bound.model.path == str(tmp_path / "model")
        assert bound.rollout.engine.config.max_num_seqs == 64
        assert bound.rollout.engine.ref is not None
        assert bind(bound) == bound

    def test_its_problems(self, bind):
        config = self.built(n="eight")
        config.trainer.steps = 0
        config.rollout.engine.config = {"stop": None}
        with pytest.raises(ConfigError) as caught:
            bind(config)
        assert caught.value.problems == (
            "rollout.engine.config.stop: expected an integer or a string, found null",
            "rollout.n: expected an integer >= 1, found 'eight'",
            "trainer.steps: expected an integer >= 1 or null, found 0",
        )

    def test_a_literal_dollar_is_not_resolved(self, bind, load, valid):
        config = load(valid)
        config.trainer.name = "${x}"
        assert bind(config).trainer.name == "${x}"

    def test_the_loaded_is_bound(self, bind, load, valid):
        config = load(valid)
        assert bind(config) == config
        assert to_dict(bind(config)) == to_dict(config)


def test_importing_the_configuration_imports_nothing_heavy():
    import subprocess
    import sys

    code = "import sys, agentrl_core.config; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "ray", "transformers", "tensordict", "datasets"} & set(modules)


def test_the_public_loader_uses_the_installed_plugins(write, valid):
    from agentrl_core.config import load_config

    with pytest.raises(ConfigError, match="no-such-loop"):
        load_config(Path(write(valid.replace("single_turn", "no-such-loop"))), check_files=False)
