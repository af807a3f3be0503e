"""Log-probabilities, gradients and steps of a real server, against PEFT and torch in this process."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tinker_support.policy import Reference, batch, loss_of, saved_at, train

from agentrl_backend_tinker.backend import TinkerBackend
from agentrl_backend_tinker.config import TinkerBackendConfig
from agentrl_backend_tinker.paths import NAME, SIZE
from agentrl_core.api.errors import CheckpointError, ConfigError, WorkerError
from agentrl_core.api.training_backend import Wanted

RANK = 4


def path_in(backend: Any) -> str:
    (tensors,) = backend.weights(1 << 20)
    return bytes(tensors[NAME].numpy()).rstrip(b"\0").decode()


def log_probs(backend: Any, seed: int = 0) -> list[torch.Tensor]:
    with torch.no_grad():
        return [each.log_probs for each in backend.forward(batch(seed), Wanted())]


def masked(micros: Any, values: Any) -> list[float]:
    return [float(value) for micro, each in zip(micros, values, strict=True) for value in each[micro["response_mask"]]]


@pytest.fixture
def backend(make: Any, server: Any) -> Any:
    return make.loaded(server.url)


@pytest.fixture
def reference(backend: Any, server: Any, model: str) -> Reference:
    """The same adapter, in this process."""
    return Reference(model, RANK, saved_at(server, path_in(backend)))


def test_log_probs_are_those_of_transformers(backend: Any, reference: Reference) -> None:
    train(backend, 1)
    reference.step(batch(0), 0)
    micros = batch(1)
    with torch.no_grad():
        expected = masked(micros, [reference.log_probs(micro) for micro in micros])
    np.testing.assert_allclose(masked(micros, log_probs(backend, 1)), expected, atol=1e-5)


def test_three_steps_make_the_weights_that_torch_makes(backend: Any, server: Any, reference: Reference) -> None:
    """Of a loss that no server knows, with clipping, weight decay and rows without a sampled token."""
    before = reference.weights()
    norms = train(backend, 3)
    expected = [reference.step(batch(seed), seed) for seed in range(3)]
    np.testing.assert_allclose(norms, expected, rtol=1e-4)
    assert expected[0] > 0.5, "nothing is clipped"
    weights, found = reference.weights(), saved_at(server, path_in(backend))
    assert weights.keys() == found.keys()
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=0, msg=name)
    assert max(float((value - before[name]).abs().max()) for name, value in weights.items()) > 0.01


def test_gradients_add_up_until_the_step(backend: Any, server: Any, reference: Reference) -> None:
    """Micro-batches in one call or in two; what zero_grad forgets is not trained."""
    micros = batch(0)
    backend.forward_backward(batch(5), Wanted(), lambda number, out: loss_of(batch(5)[number], out, 5))
    backend.zero_grad()
    for micro in micros:
        backend.forward_backward([micro], Wanted(), lambda _, out, micro=micro: loss_of(micro, out, 0))
    assert backend.optimizer_step(0.01, 0.5) == pytest.approx(reference.step(micros, 0), rel=1e-4)


def test_a_step_without_gradients_moves_the_moments(backend: Any, server: Any, reference: Reference) -> None:
    def zero(number: int, outputs: Any) -> Any:
        return outputs.log_probs.sum() * 0.0

    train(backend, 1)
    backend.zero_grad()
    backend.forward_backward(batch(1), Wanted(), zero)
    assert backend.optimizer_step(0.01, 0.5) == 0.0
    reference.step(batch(0), 0)
    for parameter in reference.parameters:
        parameter.grad = torch.zeros_like(parameter)
    reference.optimizer.step()
    found = saved_at(server, path_in(backend))
    for name, value in reference.weights().items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=0, msg=name)


def test_gradients_that_are_not_finite_change_nothing(backend: Any) -> None:
    before = log_probs(backend)
    backend.forward_backward(batch(0), Wanted(), lambda number, out: out.log_probs.sum() * float("inf"))
    assert not np.isfinite(backend.optimizer_step(0.01, 1.0))
    for one, other in zip(log_probs(backend), before, strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)


def test_the_reference_is_the_base(backend: Any) -> None:
    before = log_probs(backend)
    train(backend, 2)
    with backend.reference():
        within = log_probs(backend)
    after = log_probs(backend)
    for one, other in zip(before, within, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
    assert max(float((one - last).abs().max()) for one, last in zip(before, after, strict=True)) > 0.01


def test_what_engines_get_is_a_path_of_one_size(backend: Any) -> None:
    (layout,) = backend.weight_layout(1)
    assert (layout.names, layout.shapes, layout.dtypes) == ((NAME,), ((SIZE,),), ("uint8",))
    first = path_in(backend)
    assert path_in(backend) == first, "weights that have not changed are not saved again"
    train(backend, 1)
    assert path_in(backend) != first


def test_old_weights_of_samplers_are_deleted(make: Any, server: Any) -> None:
    backend = make.loaded(server.url, options={"keep_samplers": 2})
    paths = []
    for step in range(4):
        train(backend, 1, step)
        paths.append(path_in(backend))
    for path in paths[:2]:
        with pytest.raises(ValueError, match="unpack"):
            saved_at(server, path)
    assert saved_at(server, paths[2]) and saved_at(server, paths[3])


def test_a_checkpoint_continues_bit_for_bit(make: Any, server: Any, tmp_path: Path) -> None:
    one, other = make.loaded(server.url), make.loaded(server.url)
    train(one, 2)
    write = one.snapshot()
    train(one, 1, 2)
    names = write(str(tmp_path))
    assert sorted(names) == sorted(str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*") if each.is_file())
    other.restore(str(tmp_path))
    assert other.steps == 2
    train(other, 1, 2)
    for found, expected in zip(log_probs(other), log_probs(one), strict=True):
        torch.testing.assert_close(found, expected, atol=0, rtol=0)


def test_a_checkpoint_of_another_adapter_or_server_is_refused(make: Any, server: Any, tmp_path: Path) -> None:
    backend = make.loaded(server.url)
    backend.snapshot()(str(tmp_path))
    with pytest.raises(CheckpointError, match="rank=4.*rank=8"):
        make.loaded(server.url, adapter={"rank": 8}).restore(str(tmp_path))
    file = tmp_path / "training/tinker.json"
    saved = json.loads(file.read_text())
    file.write_text(json.dumps({**saved, "state": saved["state"] + "x"}))
    with pytest.raises(CheckpointError, match="does not have for this API key.*trainer.resume=PATH"):
        backend.restore(str(tmp_path))
    file.write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        backend.restore(str(tmp_path))
    train(backend, 1)


def test_an_adapter_begins_with_a_checkpoint(make: Any, server: Any, tmp_path: Path) -> None:
    """And it is the reference."""
    one = make.loaded(server.url)
    train(one, 2)
    one.snapshot()(str(tmp_path))
    other = make.loaded(server.url, adapter={"path": str(tmp_path)})
    expected = log_probs(one)
    train(other, 1)
    with other.reference():
        for found, wanted in zip(log_probs(other), expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
    (tmp_path / "training/tinker.json").unlink()
    with pytest.raises(ConfigError, match="model.adapter.path: .*cannot be sent"):
        make.loaded(server.url, adapter={"path": str(tmp_path)})


def test_metrics_count_tokens_and_requests(backend: Any) -> None:
    backend.metrics()
    train(backend, 1)
    found = backend.metrics()
    tokens = sum(len(row) - 1 for row in ([0] * 9, [0] * 10, [0] * 10, [0] * 11))
    assert found["forward_tokens"] == found["trained_tokens"] == tokens
    assert found["requests"] >= 6
    assert backend.metrics() == {"forward_tokens": 0.0, "trained_tokens": 0.0, "requests": 0.0}


def test_what_the_api_has_not_is_refused(backend: Any) -> None:
    with pytest.raises(WorkerError, match="rollout.sampling.temperature: found 0.7"):
        next(iter(backend.forward(batch(0), Wanted(temperature=0.7))))
    with pytest.raises(WorkerError, match="algorithm.entropy_coef=0"):
        next(iter(backend.forward(batch(0), Wanted(entropies="value"))))
    (micro, _) = batch(0)
    micro["position_ids"][1, -3:] += 1
    with pytest.raises(WorkerError, match="row 1 of the batch has positions"):
        next(iter(backend.forward([micro], Wanted())))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"head": "values", "role": "critic"}, "trains no value function"),
        ({"world_size": 2}, "found 2 ranks"),
        ({"adapters": {}}, "model.adapter: found null"),
        ({"sends_adapter": False}, "rollout.engine.name: "),
        ({"trains": False, "path": "other", "key": "teacher.path"}, "teacher.path: found other"),
        ({"adapter": {"alpha": 16.0}}, "model.adapter.alpha: found 16"),
        ({"adapter": {"dropout": 0.1}}, "model.adapter.dropout: found 0.1"),
        ({"adapter": {"targets": ["q_proj"]}}, "model.adapter.targets: .*train_attn"),
    ],
)
def test_what_the_api_has_not_is_refused_before_the_start(make: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make.loaded("http://127.0.0.1:9", **kwargs)


def test_a_server_needs_an_address_a_key_and_the_model(make: Any, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="trainer.backend.config.url: found none.*TINKER_BASE_URL"):
        make.loaded(None)
    with pytest.raises(ConfigError, match="url: found 'localhost'"):
        make.loaded("localhost")
    with pytest.raises(ConfigError, match=r"url: found none"):
        TinkerBackend.check(TinkerBackendConfig(), None, True, 1, "model.path")
    assert make.loaded(f"{server.url}/api/v1/")._connection.url == server.url
    with pytest.raises(ConfigError, match="base_model: .* has no model 'Qwen/Qwen3'"):
        make.loaded(server.url, options={"base_model": "Qwen/Qwen3"})
    with pytest.raises(WorkerError, match="rank: 512 is more than"):
        make.loaded(server.url, adapter={"rank": 512})
    monkeypatch.delenv("TINKER_API_KEY")
    with pytest.raises(ConfigError, match="TINKER_API_KEY is not set"):
        make.loaded(server.url)


def test_a_checkpoint_has_the_adapter_as_peft_reads_it(backend: Any, server: Any, model: str, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    train(backend, 2)
    backend.snapshot()(str(tmp_path))
    assert load_file(tmp_path / "adapter_model.safetensors")
    module: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(tmp_path))
    reference = Reference(model, RANK)
    reference.model = module.eval()
    micros = batch(0)
    with torch.no_grad():
        expected = masked(micros, [reference.log_probs(micro) for micro in micros])
    np.testing.assert_allclose(masked(micros, log_probs(backend)), expected, atol=1e-5)
