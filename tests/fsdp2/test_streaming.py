"""What writing a model holds in memory: one file of it and one layer, however large the model is."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl_core.api import ConfigError
from agentrl_core.fsdp2 import model_files
from agentrl_core.fsdp2.checkpoints import copied, copied_weights
from agentrl_core.fsdp2.model_files import save_merged, save_model
from agentrl_testing.ranks import on_ranks
from tests.fsdp2.conftest import SIZES
from tests.fsdp2.ranks import Case, backend_of

LAYERS = 12
DEEP = {**SIZES, "num_hidden_layers": LAYERS, "tie_word_embeddings": False}


class Memory(TorchDispatchMode):
    """The most bytes that operators inside have allocated and that lived at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._before: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if _is_plain(each)}
        result = function(*args, **(kwargs or {}))
        for tensor in filter(_is_plain, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: each for key, each in self._live.items() if not each[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return result


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.device.type == "cpu"


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directories of models of many layers, dense and of experts."""
    folder = tmp_path_factory.mktemp("deep")
    experts = Qwen3MoeConfig(
        **DEEP, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**DEEP)).save_pretrained(folder / "dense")
    Qwen3MoeForCausalLM(experts).save_pretrained(folder / "experts")
    return lambda name: folder / name


def sizes(model: Path) -> SimpleNamespace:
    """Bytes of a model, of its largest layer and of its largest tensor in memory."""
    tensors = load_file(model / "model.safetensors")
    layers = [sum(t.nbytes for name, t in tensors.items() if f".layers.{n}." in name) for n in range(LAYERS)]
    return SimpleNamespace(
        model=sum(tensor.nbytes for tensor in tensors.values()), layer=max(layers),
        tensor=max(tensor.nbytes for tensor in tensors.values()),
    )  # fmt: skip


def write(rank: int, ranks: int, model: str, folder: str, file_bytes: int) -> int:
    """The peak of writing a copy of a model, next to that copy."""
    backend = backend_of(Case(model, []), rank, ranks)
    backend.load()
    group = backend._ranks.another_group()
    state = copied({f"model.{name}": each for name, each in backend._model.state_dict(keep_vars=True).items()}, group)
    with Memory() as memory, torch.no_grad():
        save_model(backend._model, folder, copied_weights(state), file_bytes)
    return memory.peak


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_rank_holds_one_file_and_one_layer(deep: Any, tmp_path: Path, kind: str, ranks: int) -> None:
    size = sizes(deep(kind))
    file_bytes = 2 * size.layer
    assert size.model > 4 * file_bytes
    first, *others = on_ranks(ranks, write, str(deep(kind)), str(tmp_path), file_bytes)
    assert first <= file_bytes + 2 * size.layer
    # What another rank gathers for rank 0 it drops: the tensor, and the parts that it comes in.
    assert all(peak <= 3 * size.layer for peak in others)
    if kind == "dense":
        assert all(peak <= 3 * size.tensor for peak in others)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 4 and index["metadata"]["total_size"] == size.model
    found, expected = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (tmp_path, deep(kind)))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("kind", ["dense", "experts", "pickled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merge_holds_one_file_and_is_that_of_peft(
    deep: Any, tmp_path: Path, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter, merged = tmp_path / "base", tmp_path / "adapter", tmp_path / "merged"
    model = AutoModelForCausalLM.from_pretrained(deep("experts" if kind == "experts" else "dense"), dtype=dtype)
    model.save_pretrained(base, max_shard_size="40KB")
    if kind == "pickled":
        torch.save(model.state_dict(), base / "pytorch_model.bin")
        for file in (*base.glob("*.safetensors"), base / "model.safetensors.index.json"):
            file.unlink()
    torch.manual_seed(1)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained(adapter)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    monkeypatch.setattr(model_files, "FILE_BYTES", whole // 8)
    # Mapped files are no memory of this process.
    mapped = model_files._mapped
    monkeypatch.setattr(model_files, "_mapped", _disable_current_modes()(mapped))
    with Memory() as memory, torch.no_grad():
        save_merged(str(adapter), str(merged), str(base))
    # Merging is in float32, and has the adapter's matrices of all layers. What transformers maps as it looks at pickled
    # weights is counted like memory.
    assert memory.peak < whole / 2 or kind == "pickled"
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=dtype), adapter)
    expected = peft.merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(merged).state_dict()
    assert found.keys() == expected.keys() and len(list(merged.glob("*.safetensors"))) > 4
    rounding = {} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-6}
    for name, tensor in expected.items():
        assert found[name].dtype == dtype
        torch.testing.assert_close(found[name], tensor, msg=name, **rounding)


def test_an_adapter_of_another_model_is_not_merged(deep: Any, tmp_path: Path) -> None:
    other = Qwen3ForCausalLM(Qwen3Config(**{**DEEP, "num_hidden_layers": 2}))
    get_peft_model(other, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match="is an adapter of another model than model.path"):
        save_merged(str(tmp_path / "adapter"), str(tmp_path / "merged"), str(deep("dense")))
    assert not (tmp_path / "merged").exists()
