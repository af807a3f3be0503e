"""``agentrl config show``: the resolved tree with origins."""

import json
from pathlib import Path

import yaml
from typer.testing import CliRunner, Result

from agentrl_core.cli.main import app
from agentrl_core.config import load_config, to_dict

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
