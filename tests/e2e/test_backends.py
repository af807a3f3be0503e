"""Runs whose training backend is that of the template, which knows nothing of the core but the api."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl_core.api import CheckpointError, ConfigError, WorkerError
from agentrl_core.runs.run_dir import RunDir
from agentrl_testing.devtools.scaffold import render

Fit = Callable[..., RunDir]
BACKEND = {
    "trainer.backend": "./toy.py:ToyBackend",
    "rollout.deterministic": True,
    "trainer.steps": 3,
    "trainer.checkpoint.interval": 1,
    "actor.optimizer": {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 1},
    "actor.mini_batches": 2,
    "actor.micro_batch_tokens": 256,
    "algorithm.entropy_coef": 0.01,
}


@pytest.fixture
def toy(tmp_path: Path) -> None:
    """The template in one file beside the configuration."""
    files = render("training_backend", "toy")
    config = files["src/toy/config.py"]
    backend = files["src/toy/backend.py"].replace("from toy.config import ToyConfig\n", config)
    capabilities = 'capabilities = {"all_weights", "entropies", "temperature"}'
    text = backend.replace(
        "    config: ToyConfig\n", f"    config: ToyConfig\n    config_class = ToyConfig\n    {capabilities}\n"
    )
    (tmp_path / "toy.py").write_text(text)


def measured(run: RunDir) -> list[dict[str, Any]]:
    timed = ("timing/", "perf/")
    return [{key: value for key, value in row.items() if key != "time" and not key.startswith(timed)}
            for row in run.read_metrics()]  # fmt: skip


def weights(run: RunDir, step: int) -> dict[str, torch.Tensor]:
    return load_file(run.checkpoints_dir / f"step-{step:06d}" / "actor" / "model.safetensors")


@pytest.mark.usefixtures("toy")
def test_another_backend_trains_as_the_built_in_one(fit: Fit) -> None:
    built_in = fit({**BACKEND, "trainer.backend": "fsdp2", "trainer.name": "built-in", "model.packing": False})
    other = fit({**BACKEND, "trainer.name": "other"})
    assert "actor/entropy" in measured(other)[0]
    for one, two in zip(measured(built_in), measured(other), strict=True):
        assert two == pytest.approx(one, rel=1e-3, abs=1e-5)
    for name, tensor in weights(built_in, 3).items():
        torch.testing.assert_close(weights(other, 3)[name], tensor, atol=2e-4, rtol=0, msg=name)


@pytest.mark.usefixtures("toy")
def test_its_run_goes_on_where_it_stopped(fit: Fit) -> None:
    whole = fit({**BACKEND, "trainer.name": "whole"})
    checkpoint = whole.checkpoints_dir / "step-000002"
    resumed = fit({**BACKEND, "trainer.name": "again", "trainer.resume": str(checkpoint)})
    assert measured(resumed)[-1] == measured(whole)[-1]
    assert all(torch.equal(tensor, weights(whole, 3)[name]) for name, tensor in weights(resumed, 3).items())


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(
    ("changes", "capability", "feature"),
    [
        ({"model.adapter": {}}, "adapters", "model.adapter"),
        ({"algorithm.advantage": "gae"}, "critic", "a critic"),
        ({"cluster.runtime": "ray", "cluster.processes_per_node": 2}, "ranks", "training in several processes"),
        ({"model.quantize": "4bit", "model.adapter": {}}, "quantize", "model.quantize"),
        ({"actor.offload_optimizer": True}, "offload", "actor.offload_optimizer=true"),
    ],
)
def test_what_it_cannot_is_refused_before_the_start(
    fit: Fit, tmp_path: Path, changes: dict[str, Any], capability: str, feature: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        fit({**BACKEND, **changes})
    text = " ".join(str(refused.value).split())
    assert f"training backend 'ToyBackend' lacks the capability '{capability}', which {feature}" in text
    assert "installed with it: fsdp2" in text
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 2}, "make groups of 2 processes, and the run has 1, which is no multiple of 2"),
        ({"tensor_parallel": 3}, "tensor_parallel: 3 does not divide num_attention_heads = "),
    ],
)
def test_a_mesh_that_divides_neither_processes_nor_model_is_refused_before_the_start(
    fit: Fit, tmp_path: Path, options: dict[str, int], message: str
) -> None:
    processes = 3 if options["tensor_parallel"] == 3 else 1
    with pytest.raises(ConfigError) as refused:
        fit({
            "trainer.backend": {"name": "fsdp2", "config": options}, "cluster.processes_per_node": processes,
            "cluster.runtime": "ray" if processes > 1 else "local",
            "rollout.engine.placement": "standalone" if processes > 1 else "colocated",
        })  # fmt: skip
    assert message in " ".join(str(refused.value).split())
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("toy")
def test_the_checkpoint_of_another_backend_is_named(fit: Fit) -> None:
    once = {**BACKEND, "trainer.steps": 1, "plugins.allow_drift": True}
    fit(once)
    with pytest.raises(CheckpointError, match=r"toy.py:ToyBackend' wrote it, and this run has 'fsdp2'. Set .*or start"):
        fit({**once, "trainer.steps": 2, "trainer.resume": "auto", "trainer.backend": "fsdp2"})


FAULTS = """

class Raises(ToyBackend):
    def load(self):
        raise KeyError("q_proj")


class TooFew(ToyBackend):
    def forward(self, micros, wanted):
        yield from list(super().forward(micros, wanted))[1:]


class TooMany(ToyBackend):
    def forward(self, micros, wanted):
        yield from [*super().forward(micros, wanted), *super().forward(micros, wanted)]


class RowMissing(ToyBackend):
    def _outputs(self, micro, wanted):
        return Outputs(super()._outputs(micro, wanted).log_probs[1:])


class RowMissingInUpdates(ToyBackend):
    def _outputs(self, micro, wanted):
        found = super()._outputs(micro, wanted)
        return Outputs(found.log_probs[1:]) if torch.is_grad_enabled() else found
"""


@pytest.mark.usefixtures("toy")
def test_what_a_backend_raises_has_its_name(fit: Fit, tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text((tmp_path / "toy.py").read_text() + FAULTS)
    with pytest.raises(KeyError, match="q_proj") as caught:
        fit({**BACKEND, "trainer.backend": "./toy.py:Raises"})
    assert re.search(r"raised by the training backend '.*toy.py:Raises' in load\(\)", caught.value.__notes__[0])


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("TooFew", r"the training backend returned \d outputs for \d micro-batches"),
        ("TooMany", r"the training backend returned more outputs than the \d micro-batches"),
        (
            "RowMissing",
            r"the training backend returned old_log_probs of shape \[\d+, \d+\] for a micro-batch with responses",
        ),
        ("RowMissingInUpdates", r"the training backend returned log_probs of shape"),
    ],
)
def test_what_a_broken_backend_does_is_an_error_that_says_so(
    fit: Fit, tmp_path: Path, fault: str, message: str
) -> None:
    """A row too few would leave zeros as the log-probs of another one."""
    (tmp_path / "toy.py").write_text((tmp_path / "toy.py").read_text() + FAULTS)
    changes = {"trainer.backend": f"./toy.py:{fault}", "algorithm.old_log_probs": "actor", "algorithm.entropy_coef": 0}
    with pytest.raises(WorkerError, match=message):
        fit({**BACKEND, **changes})
