"""``agentrl config schema``: the schema for editors."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner, Result

from agentrl_core.api import option
from agentrl_core.config import load_config, to_dict
from agentrl_core.config.nodes import read_file
from agentrl_testing.cli import schema as command
from agentrl_testing.devtools.json_schema import json_schema, schema_of
from agentrl_testing.plugins import IsolatedPlugins

ROOT = Path(__file__).parents[4]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))


def printed() -> Result:
    return CliRunner().invoke(command, [])


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(printed().stdout)
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
        "model: {adapter: null}",
        "model: {adapter: {rank: 8, targets: all-linear}}",
        "model: {adapter: {targets: [q_proj]}}",
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
        "model: {adapter: {rnk: 8}}",
        "model: {adapter: {rank: 0}}",
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
    assert json.loads(printed().stdout)["$defs"]["tool.options"] == {}


@dataclass
class Voice:
    pitch: float = option(440.0, gt=0, unit="Hz", help="of the voice")


@dataclass
class Options:
    text: str = option(help="what is shouted")
    volume: int = option(3, ge=1, le=11, help="how loud")
    style: Literal["plain", "bold"] = option("plain")
    voice: Voice = field(default_factory=Voice)
    names: list[str] = option(default_factory=list)


def test_the_schema_of_options() -> None:
    schema = json_schema(Options)
    assert schema["required"] == ["text"]
    assert schema["additionalProperties"] is False
    properties = schema["properties"]
    assert properties["text"] == {"type": "string", "description": "what is shouted"}
    assert properties["volume"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 11,
        "description": "how loud",
        "default": 3,
    }
    assert properties["style"] == {"type": "string", "enum": ["plain", "bold"], "default": "plain"}
    assert properties["voice"]["properties"]["pitch"]["exclusiveMinimum"] == 0
    assert properties["voice"]["properties"]["pitch"]["x-unit"] == "Hz"
    assert properties["names"] == {"type": "array", "items": {"type": "string"}, "default": []}
