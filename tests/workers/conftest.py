import random
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl_core.config.schema import (
    ActorConfig,
    AgentConfig,
    AgentLoopSlot,
    AlgorithmConfig,
    BackendSlot,
    ClusterConfig,
    CriticConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyLossSlot,
    ResolvedConfig,
    RolloutConfig,
    TrainerConfig,
)
from agentrl_core.plugins.resolution import resolve
from agentrl_core.protocol import DataProto

VOCAB = 40
PAD = 0

Row = tuple[list[int], list[int], list[int]]
"""prompt ids, response ids, response mask."""


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3 of two layers with weights large enough that its distributions are far from uniform."""
    path = tmp_path_factory.mktemp("model")
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, tie_word_embeddings=True,
        initializer_range=0.2, pad_token_id=PAD, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def make_config(model_path: str) -> Callable[..., ResolvedConfig]:
    def make(
        algorithm: dict | None = None, actor: dict | None = None, critic: dict | None = None, **model
    ) -> ResolvedConfig:
        slot = PolicyLossSlot()
        plugin = resolve("policy_loss", slot.name)
        slot.resolved, slot.config = plugin, plugin.spec.config()
        backend = BackendSlot()
        backend.resolved = resolve("training_backend", backend.name)
        backend.config = backend.resolved.spec.config()
        optimizer = OptimizerConfig(lr=1e-3)
        return ResolvedConfig(
            model=ModelConfig(**{"path": model_path, **model}),
            data=DataConfig(train_files=[]),
            rollout=RolloutConfig(agent=AgentConfig(loops=[AgentLoopSlot("single_turn")]), max_response_length=16),
            algorithm=AlgorithmConfig(**{"loss": slot, **(algorithm or {})}),
            actor=ActorConfig(**{"optimizer": optimizer, **(actor or {})}),
            critic=CriticConfig(**{"optimizer": optimizer, **(critic or {})}),
            cluster=ClusterConfig(device="cpu"),
            trainer=TrainerConfig(backend=backend),
        )

    return make


@pytest.fixture
def rows() -> list[Row]:
    """Ragged rows with tool tokens in between, one of them without a sampled token."""
    rng = random.Random(0)

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(2, VOCAB) for _ in range(rng.randint(low, high))]

    made = []
    for _ in range(9):
        response = ids(1, 10)
        made.append((ids(1, 8), response, [int(rng.random() < 0.7) for _ in response]))
    made[4] = (made[4][0], made[4][1], [0] * len(made[4][1]))
    made[0] = (made[0][0], made[0][1], [1] * len(made[0][1]))
    return made


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., DataProto]:
    """A padded batch of rows; per-token columns and meta_info by keyword."""

    def make(rows: Sequence[Row], extra_padding: int = 2, **columns: torch.Tensor) -> DataProto:
        width_p = max(len(prompt) for prompt, _, _ in rows) + extra_padding
        width_r = max(len(response) for _, response, _ in rows) + extra_padding
        prompts = torch.full((len(rows), width_p), PAD)
        responses = torch.full((len(rows), width_r), PAD)
        mask = torch.zeros(len(rows), width_r, dtype=torch.bool)
        attention = torch.zeros(len(rows), width_p + width_r, dtype=torch.long)
        for row, (prompt, response, sampled) in enumerate(rows):
            prompts[row, width_p - len(prompt) :] = torch.tensor(prompt)
            responses[row, : len(response)] = torch.tensor(response, dtype=torch.long)
            mask[row, : len(response)] = torch.tensor(sampled, dtype=torch.bool)
            attention[row, width_p - len(prompt) : width_p + len(response)] = 1
        tensors = {
            "prompts": prompts,
            "responses": responses,
            "response_mask": mask,
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        }
        return DataProto.from_dict(tensors={**tensors, **columns}, meta_info={"temperature": 1.0, "seed": 0})

    return make
