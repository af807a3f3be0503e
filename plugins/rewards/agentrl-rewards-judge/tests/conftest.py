from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with a byte tokenizer and a head of one label."""
    return make_reward_model(tmp_path_factory.mktemp("reward-model"), labels=1)


@pytest.fixture(scope="session")
def two_labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("two-labels"), labels=2)


@pytest.fixture(scope="session")
def token_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("tokens"), labels=1, tokens=True)


def make_reward_model(path: Path, labels: int, tokens: bool = False) -> Path:
    import torch
    from transformers import AutoConfig, Qwen3ForSequenceClassification, Qwen3ForTokenClassification

    from agentrl_testing.tiny_model import save_tiny_model

    save_tiny_model(path)
    config = AutoConfig.from_pretrained(path)
    config.num_labels = labels
    torch.manual_seed(labels)
    model = (Qwen3ForTokenClassification if tokens else Qwen3ForSequenceClassification)(config)
    # A fresh head says nearly the same of everything.
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(path)
    return path
