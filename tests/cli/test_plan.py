"""``agentrl plan``."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from agentrl_core.api.errors import SimulationError
from agentrl_core.cli.main import app
from agentrl_core.simulation import prediction
from tests.simulation.conftest import config_file, make_config  # noqa: F401 - fixtures

ConfigFile = Callable[..., Path]


def plan(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "200"})


def test_a_run_that_fits_has_a_table_bars_and_what_is_left(config_file: ConfigFile) -> None:  # noqa: F811
    result = plan(config_file(), "--gpu", "h100-80g")
    assert result.exit_code == 0, result.output
    for part in ("weights", "gradients", "moments", "activations", "together", "update       |", "are left"):
        assert part in result.output
    assert "\nfits: " in result.output and "a step takes at least" in result.output


def test_json_has_bytes_seconds_and_the_verdict(config_file: ConfigFile) -> None:  # noqa: F811
    result = plan(config_file(), "--gpu", "a100-40g", "--json", "--no-advise")
    found = json.loads(result.stdout)
    assert found["fits"] and found["processes"] == 1 and found["estimated"] == ""
    update = found["phases"]["update"]
    assert update["total"] == sum(update["memory"].values()) and update["operations"] > 0


def test_a_run_that_does_not_fit_names_changes_that_fit(config_file: ConfigFile) -> None:  # noqa: F811
    overrides = ["actor.micro_batch_tokens=65536", "rollout.max_response_length=3000"]
    result = plan(config_file(intermediate_size=8192), *overrides, "--gpu", "small:6:1:100")
    assert result.exit_code == 1
    assert "does not fit" in result.output and "fits with actor.micro_batch_tokens=" in result.output


def test_a_config_that_never_fits_says_which_model_would(config_file: ConfigFile) -> None:  # noqa: F811
    result = plan(config_file(num_hidden_layers=1), "--gpu", "tiny:0.01:1:100")
    assert result.exit_code == 1 and "no change of the configuration makes it fit; a model of about" in result.output


def test_an_unknown_gpu_is_an_error_that_says_how_to_add_it(config_file: ConfigFile) -> None:  # noqa: F811
    result = plan(config_file(), "--gpu", "h900")
    assert result.exit_code == 2
    assert "unknown GPU 'h900'; known: h100-80g" in result.output and "name:GiB of memory" in result.output


def test_a_model_that_cannot_be_simulated_is_estimated(
    config_file: ConfigFile,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*arguments: object) -> None:
        raise SimulationError("aten.strange.default asks for a value")

    monkeypatch.setattr(prediction, "simulate", fails)
    result = plan(config_file(), "--gpu", "h100-80g", "--no-advise")
    assert "ESTIMATE" in result.output and "aten.strange.default" in result.output


def test_several_gpus_share_the_model(config_file: ConfigFile) -> None:  # noqa: F811
    result = plan(config_file(), "rollout.engine.placement=standalone", "--gpus-per-node", "4", "--json", "--no-advise")
    found = json.loads(result.stdout)
    assert found["processes"] == 4
    assert found["phases"]["update"]["collectives"]["all-gather"] > 0
