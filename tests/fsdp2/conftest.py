import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.fsdp2.ranks import Case, Row, Trained, reference

VOCAB = 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 128,
    "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip


@pytest.fixture(scope="session")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of models: dense, with tied embeddings, and of experts."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False)).save_pretrained(folder / "dense")
    Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)).save_pretrained(folder / "tied")
    experts = Qwen3MoeConfig(
        **SIZES, tie_word_embeddings=False, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        norm_topk_prob=True, decoder_sparse_step=1,
    )  # fmt: skip
    Qwen3MoeForCausalLM(experts).save_pretrained(folder / "experts")
    return {path.name: str(path) for path in Path(folder).iterdir()}


@pytest.fixture(scope="session")
def rows() -> list[Row]:
    """A tree of several branches, and rows apart from it; one ends in a token of padding's id."""
    rng = random.Random(0)

    def ids(length: int) -> list[int]:
        return [rng.randrange(2, VOCAB) for _ in range(length)]

    prompt, turn, other = ids(5), ids(4), ids(7)
    rows = [
        (prompt, turn + ids(3), [1] * 7), (prompt, turn + ids(5), [0] * 4 + [1] * 5), (prompt, ids(2), [1, 1]),
        (other, ids(6), [1, 1, 0, 0, 1, 1]), (other[:3], ids(3), [0, 1, 1]), (ids(2), [*ids(3), 0, 5], [1] * 5),
        (prompt, turn + ids(1), [1] * 5), (ids(9), ids(1), [1]),
    ]  # fmt: skip
    return rows


@pytest.fixture(scope="session")
def expected(paths: dict[str, str], rows: list[Row]) -> Callable[..., Trained]:
    """What one process finds for a model."""
    found: dict[tuple[str, str], Trained] = {}

    def get(name: str, head: str = "tokens") -> Trained:
        if (name, head) not in found:
            found[name, head] = reference(Case(paths[name], rows, head=head))
        return found[name, head]

    return get
