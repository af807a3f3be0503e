"""The interpreter of an engine's own environment, checked before anything starts."""

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import AgentRLError, ConfigError, PluginRef, PluginSpec
from agentrl_core.serving import interpreter
from agentrl_core.serving.interpreter import check_interpreter

SPEC = PluginSpec("engine", "own", 1, "for tests", "module:Engine", requires=("no-such-package>=3",))
PLAIN = PluginSpec("engine", "own", 1, "for tests", "module:Engine")
REF = PluginRef("engine", "own", "agentrl-engine-hf", "0.1.0")
RAY, CORE = importlib.metadata.version("ray"), importlib.metadata.version("agentrl-core")
HF = importlib.metadata.version("agentrl-engine-hf")


@pytest.fixture
def answering(tmp_path: Path) -> Any:
    """An interpreter that answers as it is told."""

    def make(python: Any = sys.version_info[:3], missing: Any = (), **versions: Any) -> str:
        found = {"ray": RAY, "agentrl-core": CORE, "agentrl-engine-hf": HF}
        found |= {name.replace("_", "-"): value for name, value in versions.items()}
        path = tmp_path / "env" / "bin" / "python"
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parents[1] / "pyvenv.cfg").touch()
        path.write_text(f"#!/bin/sh\necho 'agentrl:{json.dumps([list(python), found, list(missing)])}'\n")
        path.chmod(0o755)
        return str(path)

    return make


def test_this_interpreter_can_serve() -> None:
    check_interpreter(sys.executable, REF, PLAIN)


def test_a_requirement_that_is_not_met_there_is_told_with_the_command_that_mends_it() -> None:
    with pytest.raises(ConfigError, match=r"needs no-such-package>=3 in .*found nothing; .* -m pip install 'no-such"):
        check_interpreter(sys.executable, REF, SPEC)


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout.engine.python: no such file: .*/none/bin/python; .* -m venv"):
        check_interpreter(str(tmp_path / "none" / "bin" / "python"), REF, PLAIN)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"python": (3, 99, 1)}, rf"is Python 3.99.1, the driver runs 3\.{sys.version_info[1]}.* -m venv .*/env"),
        ({"ray": "1.0"}, f"has ray 1.0, the driver has {RAY}; .* -m pip install 'ray=={RAY}'"),
        ({"ray": None}, f"has no ray, the driver has {RAY}"),
        ({"agentrl_core": None}, f"has no agentrl-core, .* -m pip install 'agentrl-core=={CORE}'"),
        ({"agentrl_engine_hf": "0.0"}, f"has agentrl-engine-hf 0.0, .* install 'agentrl-engine-hf=={HF}'"),
        ({"missing": [["vllm>=1", "0.9"]]}, "the plugin needs vllm>=1 in .*, found 0.9"),
    ],
)
def test_another_version_there(answering: Any, answer: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_interpreter(answering(**answer), REF, PLAIN)


@pytest.mark.parametrize("name", ["nvidia-nccl-cu12", "nvidia-nccl-cu13"])
def test_another_nccl_is_refused_where_a_group_spans_both(
    answering: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = interpreter._installed
    monkeypatch.setattr(interpreter, "_installed", lambda each: "2.28.9" if each == "nvidia-nccl-cu13" else real(each))
    python = answering(**{name: "2.27.5"})
    with pytest.raises(ConfigError, match=r"has NCCL 2\.27\.5, the trainer's environment 2\.28\.9.*one version"):
        check_interpreter(python, REF, PLAIN, shares_nccl=True)
    check_interpreter(python, REF, PLAIN)
    check_interpreter(answering(**{name: "2.28.9"}), REF, PLAIN, shares_nccl=True)
    check_interpreter(answering(), REF, PLAIN, shares_nccl=True)


@pytest.mark.parametrize(("there", "warns"), [("2.13.0+cu130", False), ("2.14.1", True)])
def test_another_torch_is_a_warning(
    answering: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, there: str, warns: bool
) -> None:
    real = interpreter._installed
    monkeypatch.setattr(interpreter, "_installed", lambda each: "2.13.0+cpu" if each == "torch" else real(each))
    check_interpreter(answering(torch=there), REF, PLAIN)
    assert ("torch 2.14.1, this environment 2.13.0+cpu" in caplog.text) is warns


def test_no_environment_is_suggested_outside_of_one() -> None:
    """The advice for /nope was to make an environment of the root directory."""
    with pytest.raises(ConfigError, match="no such file: /nope; expected ENVIRONMENT/bin/python") as caught:
        check_interpreter("/nope", REF, PLAIN)
    assert "-m venv" not in str(caught.value)


@pytest.mark.parametrize("answer", ["exit 1", """echo 'agentrl:[[3, 99, 1], {}, []]'"""])
def test_an_installation_is_not_written_over(tmp_path: Path, answer: str) -> None:
    """The advice for /bin/true was to make an environment of the root directory."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f"#!/bin/sh\n{answer}\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=r"expected ENVIRONMENT/bin/python; make one with: .* -m venv ENVIRONMENT$"):
        check_interpreter(str(python), REF, PLAIN)


def test_all_that_is_wrong_is_told_at_once(answering: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        check_interpreter(answering(ray="1.0", agentrl_core=None, missing=[["vllm>=1", ""]]), REF, PLAIN)
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo hello", "it is no Python interpreter"),
        ("echo no module named encodings >&2; exit 3", "it ended with 3: no module named encodings"),
        ("exec sleep 60", "it did not answer within 0.05 s"),
    ],
)
def test_what_is_no_interpreter(tmp_path: Path, script: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "sleep" in script:
        monkeypatch.setattr(interpreter, "TIMEOUT", 0.05)
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    with pytest.raises(ConfigError, match=message):
        check_interpreter(str(path), REF, PLAIN)


def test_a_run_refuses_it_before_anything_starts(tiny_run: Any, tmp_path: Path) -> None:
    from agentrl_core.config import load_config
    from agentrl_core.trainer.preparation import Preparation

    changes = {"cluster.runtime": "ray", "rollout.engine.python": str(tmp_path / "none" / "bin" / "python")}
    with pytest.raises(ConfigError, match="rollout.engine.python: no such file"):
        Preparation.of(load_config(tiny_run(changes)))


def test_a_run_refuses_that_of_its_training_processes(tiny_run: Any, tmp_path: Path) -> None:
    from agentrl_core.config import load_config
    from agentrl_core.trainer.preparation import Preparation

    python = str(tmp_path / "none" / "bin" / "python")
    with pytest.raises(ConfigError, match="trainer.backend.python: no such file"):
        Preparation.of(load_config(tiny_run({"cluster.runtime": "ray", "trainer.backend.python": python})))
    with pytest.raises(ConfigError, match="trainer.backend.python .*: training processes .* need cluster.runtime=ray"):
        load_config(tiny_run({"trainer.backend.python": python}))


def test_a_run_without_megatron_says_where_it_may_be(tiny_run: Any) -> None:
    from agentrl_core.config import load_config
    from agentrl_core.trainer.preparation import Preparation

    message = "needs megatron-core.* or set trainer.backend.python to an environment that has it"
    with pytest.raises(AgentRLError, match=message):
        Preparation.of(load_config(tiny_run({"trainer.backend.name": "megatron"})))
