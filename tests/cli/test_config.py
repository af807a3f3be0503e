"""``agentrl config show``: the resolved tree with origins, and the schema for editors."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner, Result

from agentrl_core.cli.main import app
from agentrl_core.config import load_config, to_dict
from agentrl_core.config.json_schema import schema_of
from agentrl_core.config.nodes import read_file
from agentrl_testing.plugins import IsolatedPlugins

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
CALCULATOR = ROOT / "examples" / "calculator" / "config.yaml"


def show(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["config", "show", *arguments])


def test_values_with_their_origins_load_back(tmp_path: Path) -> None:
    shown = show(str(CALCULATOR), "rollout.n=4")
    assert shown.exit_code == 0, shown.output
    lines = {line.split("#")[0].strip(): line.rpartition("# ")[2] for line in shown.stdout.splitlines()}
    assert lines["n: 4"] == "override 'rollout.n=4'"
    assert lines["name: shuffle"] == "default"
    assert lines["batch_size: 32"] == "config.yaml:9"
    assert yaml.safe_load(shown.stdout)["rollout"]["n"] == 4
    again = tmp_path / "again.yaml"
    again.write_text(shown.stdout)
    assert load_config(again, check_files=False) == load_config(CALCULATOR, ["rollout.n=4"], check_files=False)


def test_json(tmp_path: Path) -> None:
    content = json.loads(show(str(CALCULATOR), "--json").stdout)
    assert content["schema_version"] == 1
    values = {each["key"]: (each["value"], each["origin"]) for each in content["values"]}
    assert values["data.batch_size"] == (32, "config.yaml:9")
    assert values["data.sampler.name"] == ("shuffle", "default")
    assert to_dict(load_config(CALCULATOR, check_files=False))["rollout"]["n"] == values["rollout.n"][0]


def test_a_configuration_with_problems_lists_them() -> None:
    shown = show(str(CALCULATOR), "rollout.m=4", "trainer.seed=x")
    assert shown.exit_code == 2
    assert "2 problems" in shown.stderr and "rollout.m" in shown.stderr and "trainer.seed" in shown.stderr


def test_a_file_that_a_slot_names_is_shown_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n")
    slot = f"reward.functions=[{{name: {tmp_path / 'reward.py'}:score, config: {{scale: [2, {{}}]}}}}]"
    shown = show(str(CALCULATOR), slot)
    assert shown.exit_code == 0, shown.output
    assert not (tmp_path / "ran").exists()
    assert yaml.safe_load(shown.stdout)["reward"]["functions"][0]["config"] == {"scale": [2, {}]}


def test_neither_file_nor_schema() -> None:
    shown = show()
    assert shown.exit_code == 2
    assert "expected a YAML file, or --schema" in shown.stderr


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(show("--schema").stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_schema_accepts_the_examples(validator: jsonschema.Draft202012Validator, path: Path) -> None:
    validator.validate(read_file(path, path.name).plain())


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_schema_accepts_every_value_of_a_resolved_tree(
    validator: jsonschema.Draft202012Validator, path: Path
) -> None:
    validator.validate(to_dict(load_config(path, check_files=False)))


@pytest.mark.parametrize(
    "text",
    [
        "rollout: {n: '${oc.env:SAMPLES}'}",
        "actor: {optimizer: '${critic.optimizer}'}",
        "rollout: {engine: hf}",
        "rollout: {engine: {config: {anything: 1}}}",
        "rollout: {engine: {name: ./mine.py:Engine, config: {anything: 1}}}",
        "critic: {path: null}",
        "algorithm: {correction: null}",
        "algorithm: {correction: token_tis}",
        "actor: {optimizer: {betas: [0.9, 0.95]}}",
    ],
)
def test_the_schema_accepts(validator: jsonschema.Draft202012Validator, text: str) -> None:
    validator.validate(yaml.safe_load(text))


@pytest.mark.parametrize(
    "text",
    [
        "rolout: {}",
        "rollout: {n: 0}",
        "rollout: {n: many}",
        "rollout: {template_break: forks}",
        "rollout: {engine: {name: hf, config: {max_num_seq: 1}}}",
        "rollout: {engine: {name: 'agentrl-engine-hf:hf', config: {max_num_seqs: x}}}",
        "rollout: {engine: {replica: 2}}",
        "tools: [{timeout: 3}]",
        "actor: {optimizer: {betas: [0.9, 1.5]}}",
    ],
)
def test_the_schema_rejects(validator: jsonschema.Draft202012Validator, text: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(yaml.safe_load(text))


def test_the_schema_carries_help_units_bounds_and_choices() -> None:
    rollout = schema_of({})["properties"]["rollout"]["anyOf"][0]["properties"]
    length = rollout["max_response_length"]
    assert (length["description"], length["x-unit"]) == (
        "maximum length of everything after the prompt, over all turns",
        "tokens",
    )
    assert length["anyOf"][0] == {"type": "integer", "minimum": 1}
    assert rollout["template_break"]["anyOf"][0] == {"type": "string", "enum": ["fork", "mask", "error"]}


def test_a_broken_plugin_does_not_keep_the_schema_from_the_editor(isolated_plugins: IsolatedPlugins) -> None:
    isolated_plugins.add("acme", {"agentrl.tools": {"shout": "acme_nowhere.plugin:PLUGIN"}})
    assert json.loads(show("--schema").stdout)["$defs"]["tool.options"] == {}
