"""The checks of `make gpu`, rehearsed on the CPU: they pass, and each of them finds a fault."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from agentrl_core.algorithms.token_log_probs import token_log_probs
from agentrl_core.engine_kit.weight_group import WeightGroup
from agentrl_core.fsdp2 import backend, sharding
from agentrl_core.fsdp2.packed_attention import Packing
from agentrl_core.workers.actor import ActorWorker
from agentrl_engine_hf.model import Model

CHECKS = ("log-probs", "packing", "fsdp", "ipc", "sleep", "offload")


@pytest.fixture(scope="module")
def gpu_checks(import_script: Callable[[str], ModuleType]) -> ModuleType:
    return import_script("gpu_checks")


@pytest.fixture(scope="module")
def gpu_bench(import_script: Callable[[str], ModuleType]) -> ModuleType:
    return import_script("_gpu_bench")


@pytest.fixture
def check(
    gpu_checks: ModuleType,
    gpu_bench: ModuleType,
    installed_plugins: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Callable[[str], list[Any]]:
    """The figures of a check, by its name."""
    monkeypatch.setattr("agentrl_core.plugins.resolution.registrations", installed_plugins)
    bench = gpu_bench.Bench(torch.device("cpu"), gpu_bench.TINY, tmp_path)
    return lambda name: list(gpu_checks.CHECKS[name](bench))


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_passes(check: Callable[[str], list[Any]], name: str) -> None:
    figures = check(name)
    assert any(figure.verdict == "pass" for figure in figures)
    assert not [figure for figure in figures if figure.verdict == "miss"]


def round_everything(*inputs: Any) -> Any:
    return tuple(result.bfloat16().float() for result in token_log_probs(*inputs))


def twice_the_gradient(module: torch.nn.Module, *inputs: Any) -> None:
    SHARD(module, *inputs)
    for part in module.modules():
        if isinstance(part, sharding.FSDPModule):
            part.set_gradient_divide_factor(0.5)


def another_byte(group: WeightGroup, tensor: torch.Tensor) -> None:
    tensor = tensor.clone()
    tensor[-1] ^= 64
    SEND(group, tensor)


def other_weights(model: Model, device: Any) -> None:
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.copy_(parameter.roll(1, -1))


SHARD, SEND = sharding.shard, WeightGroup.broadcast
FAULTS = {
    "log-probs": ("gpu_checks", "token_log_probs", round_everything, "log-probs, largest error against float64"),
    "packing": (Packing, "_difference", lambda *inputs: "they differ", "the model packs"),
    "fsdp": (sharding, "shard", twice_the_gradient, "norm of the gradient, relative difference"),
    "ipc": (WeightGroup, "broadcast", another_byte, "update 1: tensors that are not the model's"),
    "sleep": (Model, "move", other_weights, "tokens that differ after sleep at level 2"),
    "offload": (backend, "load_training_state", lambda *inputs: 0, "of them not as they were saved"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_finds_a_fault(
    check: Callable[[str], list[Any]],
    gpu_checks: ModuleType,
    gpu_bench: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """Also in memory, of a device that is only told of: a GiB more is reserved with every look at it."""
    where, attribute, fault, figure = FAULTS[name]
    monkeypatch.setattr(gpu_checks if where == "gpu_checks" else where, attribute, fault)
    looks = iter(range(1000))
    for quantity, value in (("held", 0.0), ("growth", 1000.0), ("reserved", None)):
        told = property(lambda memory, value=value: float(next(looks)) if value is None else value)
        monkeypatch.setattr(gpu_bench.Memory, quantity, told)
    figures = check(name)
    assert figure in {each.name for each in figures if each.verdict == "miss"}
    # The process that receives by IPC has memory of its own, which nobody tells of.
    memory = [each for each in figures if each.unit == "GiB"]
    assert not any(each.verdict == "pass" for each in memory)
    assert any(each.verdict == "miss" for each in memory) or name in ("packing", "ipc")


def test_memory_is_counted_from_where_it_has_settled(gpu_bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *device, name=name: called.append(name))
    for name, gib in (("memory_allocated", 2), ("memory_reserved", 5), ("max_memory_allocated", 3)):
        monkeypatch.setattr(torch.cuda, name, lambda *device, gib=gib: gib << 30)
    memory = gpu_bench.Memory(torch.device("cuda"))
    memory.settle()
    assert (memory.held, memory.reserved, memory.growth) == (2, 5, 1)
    assert called == ["synchronize", "empty_cache", "reset_peak_memory_stats"]


def test_the_shapes_are_those_that_people_train(gpu_bench: ModuleType) -> None:
    """Qwen3-0.6B without its weights, and a worker's weights as they are by default."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**gpu_bench.FULL.model, tie_word_embeddings=True))
    assert sum(parameter.numel() for parameter in model.parameters()) == 596_049_920
    assert gpu_bench.FULL.model["vocab_size"] == 151_936


def test_a_worker_of_a_check_has_the_default_dtypes(gpu_bench: ModuleType, tmp_path: Path) -> None:
    bench = gpu_bench.Bench(torch.device("cpu"), gpu_bench.TINY, tmp_path)
    with bench.actor() as actor:
        assert isinstance(actor, ActorWorker)
        assert (actor.config.model.dtype, actor.config.model.compute_dtype) == ("float32", None)
