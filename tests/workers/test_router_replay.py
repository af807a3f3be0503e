"""Router replay: log-probs and gradients with given experts, against the model's own block with these experts."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from agentrl_core.api.errors import ConfigError, ProtocolError, WorkerError
from agentrl_core.api.training_backend import EXPERTS, Wanted
from agentrl_core.engine_kit.routers import Routers
from agentrl_core.protocol import DataProto
from agentrl_core.workers.actor import ActorWorker
from agentrl_core.workers.micro_batching import columns_of, expert_column, micro_batches, narrowed, prefixes_of

E, K, N = 6, 2, 2
SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": N, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
MOE = {"num_experts_per_tok": K, "moe_intermediate_size": 16}
CONFIGS = {
    "qwen3": Qwen3MoeConfig(**SHAPE, **MOE, num_experts=E, norm_topk_prob=True),
    "qwen2": Qwen2MoeConfig(**SHAPE, **MOE, num_experts=E, shared_expert_intermediate_size=16),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=E, num_experts_per_tok=K),
    "olmoe": OlmoeConfig(**SHAPE, num_experts=E, num_experts_per_tok=K),
    "deepseek": DeepseekV3Config(
        **SHAPE | {"num_key_value_heads": 4}, **MOE, n_routed_experts=E, n_group=2, topk_group=2, n_shared_experts=1,
        first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    ),
}  # fmt: skip
Row = tuple[list[int], list[int], list[int]]
ROWS: list[Row] = [
    ([3, 4, 5, 6], [7, 8], [1, 1]), ([3, 4, 5, 6], [9, 10, 11], [1, 0, 1]), ([3, 4], [5, 6, 7, 8, 9], [1] * 5),
    ([12, 13, 14], [15], [1]), ([3, 4, 5, 6], [7, 8, 20], [0, 0, 1]),
]  # fmt: skip


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    return {name: str(folder / name) for name in CONFIGS}


def experts_of(rows: list[Row], seed: int = 0, shared: bool = True) -> list[np.ndarray[Any, Any]]:
    """Different ones of each token of a row but the last; of rows that begin alike the same at the beginning."""
    rng = np.random.default_rng(seed)
    first = {}
    found = []
    for prompt, response, _ in rows:
        ids, own = prompt + response, []
        for end in range(1, len(ids)):
            made = np.stack([rng.permutation(E)[:K] for _ in range(N)])
            own.append(first.setdefault(tuple(ids[:end]), made) if shared else made)
        found.append(np.array(own, np.uint8))
    return found


def with_experts(batch: DataProto, experts: list[np.ndarray[Any, Any]]) -> DataProto:
    column = np.empty(len(experts), dtype=object)
    column[:] = experts
    batch.non_tensor_batch[EXPERTS] = column
    return batch


def reference(path: str, rows: list[Row], experts: list[np.ndarray[Any, Any]]) -> tuple[Any, list[torch.Tensor]]:
    """Each row alone; the routers' scores are worked out here, from what each family's paper says of them."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    given: list[torch.Tensor] = []

    def forced(layer: int, router: Any) -> Any:
        def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits = hidden.reshape(-1, hidden.shape[-1]).float() @ router.weight.T
            chosen = given[0][:, layer]
            kind = model.config.model_type
            scores = logits.sigmoid() if kind == "deepseek_v3" else logits.softmax(-1)
            weights = scores.gather(-1, chosen)
            # Qwen3-MoE, Mixtral and DeepSeek divide by the sum of those that were chosen.
            if kind in ("mixtral", "deepseek_v3") or getattr(model.config, "norm_topk_prob", False):
                weights = weights / weights.sum(-1, keepdim=True)
            if kind == "deepseek_v3":
                weights = weights * model.config.routed_scaling_factor
            return logits, weights, chosen

        return forward

    for layer, block in enumerate(model.model.layers):
        if hasattr(block.mlp, "gate"):
            block.mlp.gate.forward = forced(layer, block.mlp.gate)
    found = []
    for (prompt, response, sampled), own in zip(rows, experts, strict=True):
        given[:] = [torch.from_numpy(own.astype(np.int64))]
        logits = model(torch.tensor([prompt + response[:-1]])).logits[0, len(prompt) - 1 :]
        log_probs = logits.log_softmax(-1).gather(-1, torch.tensor(response).unsqueeze(-1)).squeeze(-1)
        found.append(log_probs[torch.tensor(sampled, dtype=torch.bool)])
    return model, found


def actor_of(make_config: Any, path: str, **model: Any) -> ActorWorker:
    actor = ActorWorker(make_config(actor={"router_replay": True}, path=path, **model), 10)
    actor.init_model()
    return actor


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_are_those_with_these_experts(paths, make_config, make_batch, name, packing):
    experts = experts_of(ROWS)
    actor = actor_of(make_config, paths[name], packing=packing)
    found = actor.compute_log_prob(with_experts(make_batch(ROWS), experts)).batch["old_log_probs"]
    _, expected = reference(paths[name], ROWS, experts)
    for row, (_, _, sampled) in enumerate(ROWS):
        places = torch.tensor(sampled, dtype=torch.bool)
        torch.testing.assert_close(found[row, : len(sampled)][places], expected[row].detach(), atol=2e-5, rtol=1e-5)
    actor.close()


@pytest.mark.parametrize("recomputed", [True, False])
def test_gradients_are_those_with_these_experts(paths, make_config, make_batch, recomputed):
    experts = experts_of(ROWS)
    actor = actor_of(make_config, paths["qwen3"], gradient_checkpointing=recomputed)
    model, expected = reference(paths["qwen3"], ROWS, experts)
    torch.cat(expected).sum().backward()
    batch = with_experts(make_batch(ROWS), experts)
    columns = actor._columns_of(batch, (), "update")
    with actor._computing():
        micros = micro_batches(columns, 8, by_prefix=True)
        assert len(micros) > 1, "another micro-batch has other experts"

        def loss(number: int, outputs: Any) -> torch.Tensor:
            return outputs.log_probs[micros[number]["response_mask"]].sum()

        actor._backend.forward_backward(micros, Wanted(), loss)
    for (one, ours), (other, theirs) in zip(actor.module.named_parameters(), model.named_parameters(), strict=True):
        assert one == other
        torch.testing.assert_close(ours.grad, theirs.grad, atol=2e-5, rtol=1e-4, msg=one)
    assert actor._backend._routers.given is None, "an engine that shares the module chooses itself"
    actor.close()


def test_tokens_without_experts_choose_themselves(paths, make_config, make_batch):
    plain = ActorWorker(make_config(path=paths["qwen3"]), 10)
    plain.init_model()
    expected = plain.compute_log_prob(make_batch(ROWS)).batch["old_log_probs"]
    actor = actor_of(make_config, paths["qwen3"])
    none = [each[:0] for each in experts_of(ROWS)]
    found = actor.compute_log_prob(with_experts(make_batch(ROWS), none)).batch["old_log_probs"]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert actor._backend.metrics() == {"router_difference": 0.0}
    without = actor.compute_log_prob(make_batch(ROWS)).batch["old_log_probs"]
    torch.testing.assert_close(without, expected, atol=1e-6, rtol=0)
    given = actor.compute_log_prob(with_experts(make_batch(ROWS), experts_of(ROWS))).batch["old_log_probs"]
    assert (given - expected).abs().max() > 1e-3
    assert 0.3 < actor._backend.metrics()["router_difference"] < 1


def test_the_share_that_differs_is_counted(paths):
    model = AutoModelForCausalLM.from_pretrained(paths["qwen3"]).eval()
    routers, ids = Routers(model, "test"), torch.tensor([[3, 4, 5, 6, 7]])
    with torch.no_grad(), routers.kept() as kept:
        model(ids)
    own = routers.stacked(kept)
    given = own.clone()
    # Of 5 x 2 x 2 one that the router does not choose, and its own in another order.
    given[3, 0, 1] = next(each for each in range(E) if each not in own[3, 0].tolist())
    given[1, 1] = own[1, 1].flip(-1)
    given[0] = E
    routers.given = given
    with torch.no_grad():
        model(ids)
    # What the first layer computes decides what the second one's router would choose.
    share = routers.share_that_differs()
    assert share is not None and 1 / 16 <= share <= 3 / 16 and routers.share_that_differs() is None


def test_rows_share_tokens_that_went_to_the_same_experts_alone(make_batch):
    batch = make_batch(ROWS)
    columns = columns_of(batch, (), "test")
    plain = prefixes_of(columns)
    shared = {**columns, EXPERTS: expert_column(experts_of(ROWS), columns["attention_mask"], "test")}
    other = {**columns, EXPERTS: expert_column(experts_of(ROWS, shared=False), columns["attention_mask"], "test")}
    assert plain is not None and (found := prefixes_of(shared)) is not None
    # The last token of the first row has no experts, the same one of the last row has.
    assert plain.tokens <= found.tokens <= plain.tokens + 2
    assert (apart := prefixes_of(other)) is not None and apart.tokens == sum(apart.lengths)


@pytest.mark.parametrize("plain", [True, False])
def test_a_column_stands_where_the_tokens_are(make_batch, plain):
    batch = make_batch(ROWS)
    experts = experts_of(ROWS)
    column = expert_column(experts, batch.batch["attention_mask"], "test")
    assert column.dtype == torch.uint8 and column.shape == (*batch.batch["input_ids"].shape, N, K)
    for row, own in enumerate(experts):
        places = batch.batch["attention_mask"][row].nonzero().squeeze(-1)
        np.testing.assert_array_equal(column[row, places[:-1]].numpy(), own)
        assert int((column[row] == 255).sum()) == (column.shape[1] - len(own)) * N * K
    many = [each.astype(np.int16) for each in experts]
    many[0][0, 0, 0] = 255
    column = expert_column([*experts[:1], *many[1:]], batch.batch["attention_mask"], "test")
    assert column.dtype == torch.int16 and int(column.max()) == torch.iinfo(torch.int16).max


def test_errors_say_what_is_wrong(paths, make_config, make_batch, tmp_path):
    batch = make_batch(ROWS)
    long = [np.zeros((50, N, K), np.uint8)] * len(ROWS)
    with pytest.raises(ProtocolError, match=r"row 0 has 6 tokens, and routed_experts of shape \[50, 2, 2\]"):
        expert_column(long, batch.batch["attention_mask"], "update")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"actor.router_replay: Qwen3ForCausalLM has no routers"):
        actor_of(make_config, str(tmp_path))
    actor = actor_of(make_config, paths["qwen3"])
    with pytest.raises(ProtocolError, match="actor.router_replay is true, and the batch has no routed_experts"):
        actor._columns_of(batch, (), "update")


def test_a_router_that_does_not_choose_with_topk_is_refused(paths, make_config, monkeypatch):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    def forward(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = hidden.reshape(-1, self.hidden_dim) @ self.weight.T
        scores, chosen = logits.softmax(-1).sort(-1, descending=True)
        return logits, scores[:, : self.top_k], chosen[:, : self.top_k]

    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", forward)
    with pytest.raises(ConfigError, match="do not choose with torch.topk"):
        actor_of(make_config, paths["qwen3"])


def test_only_who_reads_experts_gets_them(make_batch):
    batch = with_experts(make_batch(ROWS), experts_of(ROWS))
    assert EXPERTS not in narrowed(batch, ()).non_tensor_batch
    assert EXPERTS in narrowed(batch, (EXPERTS,)).non_tensor_batch


def test_unknown_experts_of_a_model_of_256_are_left_to_the_router(tmp_path):
    """In one byte the number of its last expert says that none is known."""
    config = Qwen3MoeConfig(**SHAPE, num_experts=256, num_experts_per_tok=K, moe_intermediate_size=8)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    routers, ids = Routers(model, "test"), torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        expected = model(ids).logits
        routers.given = torch.full((3, N, K), 255, dtype=torch.uint8)
        assert torch.equal(model(ids).logits, expected)
        assert routers.share_that_differs() == 0
        routers.given = torch.full((3, N, K), 255, dtype=torch.int16)
        assert not torch.equal(model(ids).logits, expected)


def test_experts_of_other_tokens_are_an_error(paths):
    model = AutoModelForCausalLM.from_pretrained(paths["qwen3"]).eval()
    routers = Routers(model, "test")
    routers.given = torch.zeros(4, N, K, dtype=torch.uint8)
    with (
        torch.no_grad(),
        pytest.raises(WorkerError, match="layer 0 did not take the experts of 4 tokens"),
    ):
        model(torch.tensor([[3, 4, 5]]))


def test_routers_that_choose_all_experts_are_refused_and_leave_nothing(tmp_path, make_config):
    config = Qwen3MoeConfig(**SHAPE, num_experts=K, num_experts_per_tok=K, moe_intermediate_size=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    actor = ActorWorker(make_config(actor={"router_replay": True}, path=str(tmp_path)), 10)
    with pytest.raises(ConfigError, match="sends every token to all 2 experts"):
        actor.init_model()
    actor.close()
