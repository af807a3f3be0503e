"""``agentrl plan``."""

import json
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from typer.testing import CliRunner, Result

from agentrl_core.api.errors import SimulationError
from agentrl_core.cli.main import app
from agentrl_plan import prediction

ConfigFile = Callable[..., Path]


def plan(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "200"})


def test_a_run_that_fits_has_a_table_bars_and_what_is_left(config_file: ConfigFile) -> None:
    result = plan(config_file(), "--gpu", "h100-80g")
    assert result.exit_code == 0, result.output
    for part in ("weights", "gradients", "moments", "activations", "together", "update       |", "are left"):
        assert part in result.output
    assert "\nfits: " in result.output and "a step takes at least" in result.output


def test_json_has_bytes_seconds_and_the_verdict(config_file: ConfigFile) -> None:
    result = plan(config_file(), "--gpu", "a100-40g", "--json", "--no-advise")
    found = json.loads(result.stdout)
    assert found["fits"] and found["processes"] == 1 and found["estimated"] == ""
    update = found["phases"]["update"]
    assert update["total"] == sum(update["memory"].values()) and update["operations"] > 0


@pytest.mark.slow
def test_a_run_that_does_not_fit_names_changes_that_fit(config_file: ConfigFile) -> None:
    overrides = ["actor.micro_batch_tokens=65536", "rollout.max_response_length=3000"]
    result = plan(config_file(intermediate_size=8192), *overrides, "--gpu", "small:6:1:100")
    assert result.exit_code == 1
    assert "does not fit" in result.output and "fits with actor.micro_batch_tokens=" in result.output


def test_a_config_that_never_fits_says_which_model_would(config_file: ConfigFile) -> None:
    result = plan(config_file(intermediate_size=65536), "--gpu", "tiny:1:1:100")
    assert result.exit_code == 1
    assert "no change of the configuration makes it fit; a model of about 0.0" in result.output


def test_an_unknown_gpu_is_an_error_that_says_how_to_add_it(config_file: ConfigFile) -> None:
    result = plan(config_file(), "--gpu", "h900")
    assert result.exit_code == 2
    assert "unknown GPU 'h900'; known: h100-80g" in result.output and "name:GiB of memory" in result.output


def test_a_model_that_cannot_be_simulated_is_estimated(
    config_file: ConfigFile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*arguments: object) -> None:
        raise SimulationError("aten.strange.default asks for a value")

    monkeypatch.setattr(prediction, "simulate", fails)
    result = plan(config_file(), "--gpu", "h100-80g", "--no-advise")
    assert "ESTIMATE" in result.output and "aten.strange.default" in result.output


def test_several_gpus_share_the_model(config_file: ConfigFile) -> None:
    result = plan(config_file(), "rollout.engine.placement=standalone", "--gpus-per-node", "4", "--json", "--no-advise")
    found = json.loads(result.stdout)
    assert found["processes"] == 4
    assert found["phases"]["update"]["collectives"]["all-gather"] > 0


@pytest.mark.parametrize("figures", ["nan:1:1", "-5:1:1", "0:1:1", "inf:1:1", "24:0:1", "24:1:0", "24:one:1", "24"])
def test_a_gpu_that_cannot_be_is_an_error(config_file: ConfigFile, figures: str) -> None:
    result = plan(config_file(), "--gpu", f"my-gpu:{figures}")
    assert result.exit_code == 2 and f"unknown GPU 'my-gpu:{figures}'" in result.output
    assert "three numbers above 0" in result.output


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "not a valid JSON"),
        ('{"model_type": "qwen3", "hid', "not a valid JSON"),
        ("[1]", "Unrecognized model"),
        ('{"temperature": 1.0}', "Unrecognized model"),
        ('{"model_type": "no-such-model"}', "`no-such-model`"),
        ('{"model_type": "t5"}', "T5Config"),
        ('{"model_type": "qwen3", "num_hidden_layers": "two"}', "expected int, got str"),
        ('{"model_type": "qwen3_moe", "num_hidden_layers": -1}', "num_hidden_layers: expected 1 or more, found -1"),
        ('{"model_type": "mamba"}', "In agentrl this argument is the key model.attn_implementation"),
        (
            '{"model_type": "x", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}',
            "In agentrl this argument is the key model.trust_remote_code",
        ),
    ],
)
def test_a_config_json_that_is_no_language_models_is_an_error(
    config_file: ConfigFile,
    content: str,
    reason: str,
) -> None:
    file = config_file()
    (file.parent / "model" / "config.json").write_text(content)
    result = plan(file, "--gpu", "h100-80g", "--json")
    assert result.exit_code == 2 and list(found := json.loads(result.stdout)) == ["error"]
    for text in (found["error"], result.stderr):
        assert "transformers cannot build a model from" in text and reason in text


def test_a_model_that_another_role_has_must_have_a_config_too(config_file: ConfigFile) -> None:
    file = config_file()
    (file.parent / "critic").mkdir()
    (file.parent / "critic" / "config.json").write_text("{}")
    result = plan(file, "algorithm.advantage.name=gae", f"critic.path={file.parent}/critic")
    assert result.exit_code == 2 and "critic/config.json: ValueError: Unrecognized model" in result.output


def test_rows_that_are_longer_than_the_context_are_an_error(config_file: ConfigFile) -> None:
    result = plan(config_file(), "rollout.max_response_length=5000")
    assert result.exit_code == 2 and "= 5032 tokens, but the model in model.path has a context of 4096" in result.output


def test_what_is_left_is_that_of_the_phases_which_could_use_it(config_file: ConfigFile) -> None:
    """The KV cache takes what the trainer leaves, which is less than all requests at their full length would take."""
    overrides = ["cluster.runtime=ray", "data.batch_size=400", "rollout.max_response_length=4000"]
    result = plan(config_file(num_key_value_heads=4, head_dim=128), *overrides, "--gpu", "small:3:1:100")
    assert result.exit_code == 0, result.output
    assert " GiB are left while it trains" in result.output and "\n0.0 GiB" not in result.output
    assert "of the 256 requests in flight at full length" in result.output


def test_a_gpu_without_room_for_cuda_needs_no_smaller_model(config_file: ConfigFile) -> None:
    result = plan(config_file(), "--gpu", "tiny:0.1:1:100")
    assert result.exit_code == 1 and "makes it fit; CUDA contexts alone take 0.8 GiB" in result.output


def test_what_torch_logs_of_a_failed_operation_is_no_output_of_the_command(
    config_file: ConfigFile,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's own simulation refuses a mixture of experts with float32 weights."""
    monkeypatch.setattr("agentrl_plan.mode._GROUPED", None)
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    found = {}
    for offload in ("false", "true"):
        result = plan(config_file(**experts), f"actor.offload_optimizer={offload}", "--json", "--no-advise")
        content = json.loads(result.stdout)
        assert "BF16" in content["estimated"] and "Traceback" not in result.stderr + capfd.readouterr().err
        found[offload] = content["phases"]["update"]["memory"]["moments"]
    assert found == {"false": 8 * content["parameters"], "true": 0}


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--gpu", "h900"], 2, "unknown GPU 'h900'"),
        (["rollout.n=none"], 2, "rollout.n"),
        (["--nodes", "none"], 2, "Invalid value for '--nodes'"),
        (["cluster.runtime=ray", "rollout.engine.name=vllm", "rollout.engine.tensor_parallel=4"], 2, "up to 1:"),
    ],
)
def test_json_of_an_error_is_json(
    config_file: ConfigFile,
    arguments: list[str],
    code: int,
    said: str,
    as_json: bool,
) -> None:
    result = plan(config_file(), *arguments, *(["--json"] if as_json else []))
    assert result.exit_code == code and said in result.stderr
    if as_json:
        assert said in json.loads(result.stdout)["error"]
    else:
        assert result.stdout == ""


def test_json_of_a_defect_is_json(
    config_file: ConfigFile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*arguments: object) -> None:
        raise IndexError("a defect of ours")

    monkeypatch.setattr(prediction, "predict", fails)
    result = plan(config_file(), "--json")
    assert isinstance(result.exception, IndexError)
    assert json.loads(result.stdout) == {"error": "IndexError: a defect of ours"}


@pytest.mark.parametrize("path", ["./missing/path", "/no/such/model", "models/of/mine", "model"])
def test_a_path_that_is_not_there_is_an_error_without_the_hub(
    config_file: ConfigFile,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    path: str,
) -> None:
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", None)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    result = plan(config_file(), "--model", path)
    assert result.exit_code == 2
    full = tmp_path / "empty" / path
    assert f"model.path: no such directory: {full}; name a directory with the model's config.json" in result.stderr


def test_a_model_that_the_hub_does_not_give_says_what_to_do(
    config_file: ConfigFile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*arguments: object, **options: object) -> None:
        raise OSError("[Errno 101] Network is unreachable")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fails)
    result = plan(config_file(), "--model", "org/name", "--json")
    assert result.exit_code == 2
    said = json.loads(result.stdout)["error"]
    assert "model.path: 'org/name' is neither a directory" in said and "Network is unreachable" in said
    assert "check the name and the connection, or name a directory" in said
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    result = plan(config_file(), "--model", "org/name")
    assert "HF_HUB_OFFLINE is set" in result.stderr and "`hf download org/name` fetches it" in result.stderr


@pytest.mark.slow
def test_meshes_are_tried_and_the_best_one_is_named(config_file: ConfigFile) -> None:
    arguments = ["rollout.engine.placement=standalone", "--gpus-per-node", "2", "--mesh"]
    result = plan(config_file(), *arguments)
    assert result.exit_code == 0, result.output
    assert "\nMeshes, the best one first:\n" in result.output and "\ncheapest" in result.output
    assert "trainer.backend.config.tensor_parallel=2: " in result.output
    found = json.loads(plan(config_file(), *arguments, "--json").stdout)
    assert {tuple(each["options"].values()) for each in found["meshes"]} >= {(1, 1, 1, 1), (2, 1, 1, 1), (1, 1, 2, 1)}
    assert all(each["bytes"] > 0 and each["seconds"] > 0 for each in found["meshes"])


def test_a_run_with_router_replay_is_predicted(config_file: ConfigFile) -> None:
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    result = plan(config_file(**experts), "actor.router_replay=true", "--json", "--no-advise")
    content = json.loads(result.stdout)
    assert not content.get("estimated") and content["phases"]["update"]["memory"], result.output
