"""Several ranks do what one process does: real processes on Ray, gloo, FSDP2. One cluster for the whole module."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl_core.api.errors import WorkerError
from agentrl_core.config.schema import AdapterConfig
from agentrl_core.controller import ClassWithInitArgs, LocalRuntime
from agentrl_core.controller.runtime import Runtime
from agentrl_core.fsdp2.log_probs import MOST_LOGITS as LOGITS
from agentrl_core.plugins.official import OFFICIAL

pytestmark = pytest.mark.ray

ALGORITHM = {"kl_coef": 0.1, "entropy_coef": 0.01, "aggregation": "seq-mean-token-mean"}
UPDATE = {"mini_batches": 2, "epochs": 2, "micro_batch_tokens": 40, "grad_clip": 0.5}
Groups = Mapping[str, Any]
LOSSES = [name for kind, name in OFFICIAL if kind == "policy_loss"]
LOSS_OPTIONS = {"clip_cov": {"share": 0.3, "cov_low": 0.0}, "kl_cov": {"share": 0.3}}
"""With the defaults not one token of so small a batch is chosen."""


def roles(config: Any) -> dict[str, ClassWithInitArgs]:
    """Actor, critic and reference with a few more methods; made in a function, so that they travel by value."""
    from torch.distributed.tensor import DTensor

    from agentrl_core.controller import Dispatch, register
    from agentrl_core.fsdp2.model_files import save_model
    from agentrl_core.workers.actor import ActorWorker
    from agentrl_core.workers.critic import CriticWorker
    from agentrl_core.workers.ranks import COLLECTIVE
    from agentrl_core.workers.reference import ReferenceWorker

    class Actor(ActorWorker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def set_model_key(self, key: str, value: Any) -> None:
            setattr(self.config.model, key, value)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def train_adapter(self, adapter: Any, served: bool = False) -> None:
            """From the start, with this ``model.adapter``, which engines serve or get merged."""
            self.config.model.adapter = adapter
            type(self)._sends_adapter = property(lambda self: served)
            self.init_model()

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def set_coefficients(self, kl_coef: float, entropy_coef: float, eps: float) -> None:
            self.config.algorithm.kl_coef, self.config.algorithm.entropy_coef = kl_coef, entropy_coef
            self.init_model()
            for group in self._backend._optimizer._adamw.param_groups:
                group["eps"] = eps

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def use_loss(self, name: str, options: Mapping[str, Any], micro_batch_tokens: int, epochs: int = 1) -> None:
            from agentrl_core.config.schema import PolicyLossSlot
            from agentrl_core.plugins.resolution import resolve

            plugin = resolve("policy_loss", name)
            self.config.algorithm.loss = PolicyLossSlot(name, plugin.spec.config(**options), resolved=plugin)
            self.config.actor.micro_batch_tokens, self.config.actor.epochs = micro_batch_tokens, epochs
            self.init_model()

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def compute_at_once(self, logits: int) -> None:
            """So many logits at a time, with the model as at the start."""
            from agentrl_core.fsdp2 import log_probs

            log_probs.MOST_LOGITS = logits
            self.init_model()
            self._widths: list[int] = []
            self.module.lm_head.register_forward_hook(lambda _, inputs, out: self._widths.append(out.shape[1]))

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def most_tokens_of_the_head(self) -> int:
            return max(self._widths)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def move_weights(self) -> None:
            """What offload does to the tensors of a module, with a copy in place of another device."""
            self.module._apply(torch.clone)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def fall_ill(self) -> None:
            def fail(*inputs: Any) -> None:
                raise RuntimeError("can't allocate memory")

            if self.rank == 1:
                self.module.model.layers[1].register_forward_pre_hook(fail)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def shard_numels(self) -> tuple[int, int]:
            """Elements that this rank holds, and of the whole model."""
            parameters = list(self.module.parameters())
            return sum(p.to_local().numel() for p in parameters), sum(p.numel() for p in parameters)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def bucket_sizes(self, bucket_bytes: int) -> list[tuple[tuple[str, ...], int]]:
            layout, gathered = self._backend.weight_layout(bucket_bytes), self._weights.buckets(bucket_bytes)
            return [(each.names, bucket.nbytes) for each, bucket in zip(layout, gathered, strict=True)]

        @register(dispatch_mode=COLLECTIVE)
        def file_without_gathering(self) -> str:
            """Path of the weights' file, on ranks that cannot gather."""

            def fail(tensor: DTensor) -> None:
                raise AssertionError("a tensor was gathered")

            gather, DTensor.full_tensor = DTensor.full_tensor, fail  # type: ignore[method-assign]
            try:
                return self._weights.files()[0] if self.rank == 0 else str(self._weights.files())
            finally:
                DTensor.full_tensor = gather  # type: ignore[method-assign]

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def export_in_parts(self, path: str, file_bytes: int) -> None:
            save_model(self.module, path, file_bytes=file_bytes)

    return {
        "actor": ClassWithInitArgs(Actor, config, 100),
        "critic": ClassWithInitArgs(CriticWorker, config, 100),
        "reference": ClassWithInitArgs(ReferenceWorker, config),
    }


@pytest.fixture(scope="module")
def groups_of(make_config: Callable[..., Any], ray_runtime: Runtime) -> Iterator[Callable[[int], Groups]]:
    """The groups of so many ranks, with models and optimizers as at the start; the processes stay."""
    config = make_config(algorithm=ALGORITHM, actor=UPDATE, critic=UPDATE)
    made: dict[int, Groups] = {}

    def get(ranks: int) -> Groups:
        if ranks not in made:
            runtime: Runtime = local if ranks == 1 else ray_runtime
            made[ranks] = runtime.colocated_worker_groups(roles(config), processes_per_node=ranks)
        for group in made[ranks].values():
            group.init_model()
        return made[ranks]

    with LocalRuntime() as local:
        yield get


@pytest.fixture
def batches(make_batch: Callable[..., Any], rows: list[Any]) -> list[Any]:
    """Five steps: with uneven rows, one of them without a sampled token, with fewer rows than ranks, and with forks."""
    forks = [
        ([3, 4, 5, 6], [7, 8, 9, 10], [1, 1, 1, 1]), ([3, 4, 5, 6], [7, 8, 11], [0, 0, 1]),
        ([3, 4, 5, 6, 7], [12, 13], [1, 0]), ([3, 4, 5, 6], [7, 8, 9, 10], [1, 1, 1, 1]), ([3, 4, 9], [5, 5], [1, 1]),
    ]  # fmt: skip
    return [make_batch(chosen) for chosen in (rows, rows[:3], rows[2:], rows[:1], forks + rows[5:])]


def step(groups: Groups, batch: Any, seed: int) -> dict[str, float]:
    """What the trainer does with a batch."""
    batch = batch.slice()
    batch.meta_info["seed"] = seed
    batch.union(groups["actor"].compute_log_prob(batch))
    batch.union(groups["reference"].compute_ref_log_prob(batch))
    batch.union(groups["critic"].compute_values(batch))
    mask = batch.batch["response_mask"]
    generator = torch.Generator().manual_seed(seed)
    batch.batch["advantages"] = torch.randn(mask.shape, generator=generator) * mask
    batch.batch["returns"] = torch.randn(mask.shape, generator=generator) * mask
    return groups["critic"].update(batch)[0] | groups["actor"].update(batch)[0]


def weights(groups: Groups, bucket_bytes: int = 10_000) -> dict[str, np.ndarray]:
    return {
        name: data.view(np.float32).reshape(shape)
        for bucket in groups["actor"].weight_buckets(bucket_bytes)
        for name, shape, _, data in bucket.tensors()
    }


def assert_same_weights(first: Groups, second: Groups, tolerance: float = 1e-5) -> None:
    expected, found = weights(first), weights(second)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor, atol=tolerance, rtol=0, err_msg=name)


@pytest.mark.slow
def test_every_loss_is_the_same_over_ranks_and_micro_batches(groups_of: Any, batches: list[Any]) -> None:
    cases = []
    for ranks, micro_batch_tokens in ((1, 1000), (1, 40), (2, 40), (4, 40)):
        groups = groups_of(ranks)
        groups["actor"].use_loss("ppo", {}, micro_batch_tokens)
        cases.append((groups, micro_batch_tokens, ready_to_train(groups, batches[0])))
    try:
        for name in LOSSES:
            found = []
            for groups, micro_batch_tokens, batch in cases:
                groups["actor"].init_model()
                groups["actor"].use_loss(name, LOSS_OPTIONS.get(name, {}), micro_batch_tokens)
                # Two mini-batches: the loss of the second one shows the first step.
                found.append(groups["actor"].update(batch.slice())[0])
            for other in found[1:]:
                assert other == pytest.approx(found[0], rel=1e-4, abs=1e-6), name
            assert found[0]["actor/grad_norm"] > 0
    finally:
        for groups, _, _ in cases:
            groups["actor"].use_loss("ppo", {}, UPDATE["micro_batch_tokens"], UPDATE["epochs"])


def ready_to_train(groups: Groups, batch: Any) -> Any:
    """The batch with log-probs of the initial weights and with advantages."""
    batch = batch.slice()
    batch.union(groups["actor"].compute_log_prob(batch))
    batch.union(groups["reference"].compute_ref_log_prob(batch))
    mask = batch.batch["response_mask"]
    generator = torch.Generator().manual_seed(0)
    batch.batch["advantages"] = torch.randn(mask.shape, generator=generator) * mask
    noise = 0.1 * torch.randn(mask.shape, generator=generator)
    batch.batch["rollout_log_probs"] = (batch.batch["old_log_probs"] + noise) * mask
    return batch


@pytest.mark.parametrize("ranks", [2, 4])
def test_five_steps_equal_those_of_one_process(groups_of: Any, batches: list[Any], ranks: int) -> None:
    one, several = groups_of(1), groups_of(ranks)
    shards = several["actor"].shard_numels()
    assert sum(part for part, _ in shards) == shards[0][1] and max(part for part, _ in shards) < shards[0][1]
    for seed, batch in enumerate(batches):
        expected, found = step(one, batch, seed), step(several, batch, seed)
        assert found == pytest.approx(expected, abs=1e-5, rel=1e-5)
        assert expected["actor/grad_norm"] > UPDATE["grad_clip"]
    assert_same_weights(one, several)
    initial = weights(groups_of(1))
    assert max(np.abs(tensor - initial[name]).max() for name, tensor in weights(several).items()) > 1e-3


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_agree_where_rows_have_no_advantage(groups_of: Any, batches: list[Any], ranks: int) -> None:
    """Of each mini-batch some ranks have only rows without a gradient, and of one of them all ranks."""
    one, several = groups_of(1), groups_of(ranks)
    for groups in (one, several):
        # AdamW divides a gradient by its size: with an eps of 1e-8 one that is all rounding makes a step of its own.
        groups["actor"].set_coefficients(0.0, 0.0, 1e-5)
    try:
        results = []
        for groups in (one, several):
            batch = batches[0].slice()
            batch.union(groups["actor"].compute_log_prob(batch))
            advantages = torch.zeros(batch.batch["response_mask"].shape)
            advantages[0] = 1.0
            batch.batch["advantages"] = advantages * batch.batch["response_mask"]
            results.append([groups["actor"].update(batch)[0] for _ in range(2)])
        assert results[1] == [pytest.approx(expected, abs=1e-5, rel=1e-4) for expected in results[0]]
        assert 0 < results[0][0]["actor/trained_rows_share"] < 0.2
        assert_same_weights(one, several)
    finally:
        for groups in (one, several):
            groups["actor"].set_coefficients(ALGORITHM["kl_coef"], ALGORITHM["entropy_coef"], 1e-8)


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (2, 1), (1, 2), (2, 2)])
def test_a_checkpoint_goes_on_with_another_number_of_ranks(
    groups_of: Any, batches: list[Any], tmp_path: Path, before: int, after: int
) -> None:
    saved = groups_of(before)
    step(saved, batches[0], 0)
    for role in ("actor", "critic"):
        saved[role].save_checkpoint(str(tmp_path / role), background=True)
    # Meanwhile training goes on, and must not change what is written.
    expected, expected_weights = step(saved, batches[1], 1), weights(saved)
    for role in ("actor", "critic"):
        written = {name for files in saved[role].checkpoint_written() for name in files}
        assert written == {str(file.relative_to(tmp_path / role)) for file in (tmp_path / role).rglob("*.*")}
    loaded = groups_of(after)
    for role in ("actor", "critic"):
        loaded[role].load_checkpoint(str(tmp_path / role))
    assert step(loaded, batches[1], 1) == pytest.approx(expected, abs=1e-5, rel=1e-5)
    for name, tensor in weights(loaded).items():
        np.testing.assert_allclose(tensor, expected_weights[name], atol=1e-6, rtol=0, err_msg=name)


@pytest.mark.parametrize("served", [True, False])
def test_an_adapter_over_ranks_is_that_of_one_process(
    groups_of: Any, batches: list[Any], tmp_path: Path, served: bool
) -> None:
    found = []
    made = {ranks: groups_of(ranks) for ranks in (1, 2)}
    try:
        for ranks, groups in made.items():
            actor = groups["actor"]
            actor.train_adapter(AdapterConfig(rank=4), served)
            metrics = [step({**groups, "reference": actor}, batch, seed) for seed, batch in enumerate(batches[:3])]
            reference = actor.compute_ref_log_prob(batches[0]).batch["ref_log_prob"]
            file, sent = load_file(actor.weight_files()[0]), weights(groups)
            assert file.keys() == sent.keys() and all(("lora_" in name) == served for name in file)
            for name, tensor in file.items():
                np.testing.assert_array_equal(tensor.numpy(), sent[name])
            actor.save_checkpoint(str(tmp_path / str(ranks)))
            found.append((metrics, reference, sent))
        (expected, reference, tensors), (other, other_reference, other_tensors) = found
        for mine, theirs in zip(expected, other, strict=True):
            assert theirs == pytest.approx(mine, abs=1e-5, rel=1e-5)
        np.testing.assert_allclose(other_reference, reference, atol=1e-5)
        for name, tensor in tensors.items():
            np.testing.assert_allclose(other_tensors[name], tensor, atol=1e-5, rtol=0, err_msg=name)
        # The checkpoint of two ranks, in one process that has trained something else.
        actor = made[1]["actor"]
        actor.load_checkpoint(str(tmp_path / "2"))
        for name, tensor in weights({"actor": actor}).items():
            np.testing.assert_allclose(tensor, other_tensors[name], atol=1e-6, rtol=0, err_msg=name)
        stored = load_file(tmp_path / "2" / "adapter_model.safetensors")
        assert len(stored) == 2 * 2 * 7 and {tensor.dtype for tensor in stored.values()} == {torch.float32}
    finally:
        for groups in made.values():
            groups["actor"].train_adapter(None)


def test_a_damaged_checkpoint_is_named_and_nobody_waits(groups_of: Any, tmp_path: Path) -> None:
    actor = groups_of(2)["actor"]
    actor.save_checkpoint(str(tmp_path))
    (tmp_path / "training" / "__1_0.distcp").unlink()
    with pytest.raises(WorkerError, match="CheckpointError(.|\n)*training: cannot be read.*resume from another"):
        actor.load_checkpoint(str(tmp_path))


def test_a_loss_that_is_not_finite_stops_all_ranks_before_anything_has_changed(
    groups_of: Any, batches: list[Any]
) -> None:
    groups = groups_of(2)
    before = weights(groups)
    batch = batches[0].slice()
    mask = batch.batch["response_mask"]
    batch.union(groups["actor"].compute_log_prob(batch))
    batch.batch["ref_log_prob"] = batch.batch["old_log_probs"]
    batch.batch["advantages"] = mask.float()
    batch.batch["advantages"][0, 0] = math.nan
    with pytest.raises(WorkerError, match=r"rank \d: the actor's loss is not finite.*NaN or infinite rewards"):
        groups["actor"].update(batch)
    for name, tensor in weights(groups).items():
        np.testing.assert_array_equal(tensor, before[name])
    assert math.isfinite(step(groups, batches[0], 0)["actor/loss"])


def test_a_model_that_cannot_be_read_is_named_by_all_ranks(groups_of: Any) -> None:
    actor = groups_of(2)["actor"]
    path = groups_of(1)["actor"].workers[0].config.model.path
    actor.set_model_key("path", "nowhere")
    with pytest.raises(WorkerError, match="ConfigError(.|\n)*model.path: 'nowhere' is not a directory"):
        actor.init_model()
    actor.set_model_key("path", path)
    actor.init_model()


def test_recomputed_activations_change_nothing(groups_of: Any, batches: list[Any]) -> None:
    groups = groups_of(2)
    expected = step(groups, batches[0], 0)
    groups["actor"].set_model_key("gradient_checkpointing", True)
    assert step(groups_of(2), batches[0], 0) == pytest.approx(expected, abs=1e-6, rel=1e-6)
    groups["actor"].set_model_key("gradient_checkpointing", False)


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(2, {}), (4, {"packing": False, "gradient_checkpointing": True}), (2, {"compute_dtype": "bfloat16"})],
)
def test_logits_in_chunks_change_nothing(
    groups_of: Any, batches: list[Any], ranks: int, settings: Mapping[str, Any]
) -> None:
    groups, results = groups_of(ranks), []
    actor, model = groups["actor"], groups_of(1)["actor"].workers[0].config.model
    before = {key: getattr(model, key) for key in settings}
    try:
        for key, value in settings.items():
            actor.set_model_key(key, value)
        for logits in (LOGITS, 3 * 40):
            actor.compute_at_once(logits)
            batch = ready_to_train(groups, batches[0])
            # Two mini-batches each: the loss of all but the first shows the steps before.
            results.append([actor.update(batch.slice())[0] for _ in range(2)])
            results[-1].append({"sum": float(batch.batch["old_log_probs"].sum())})
            assert all((most <= 3) is (logits < LOGITS) for most in actor.most_tokens_of_the_head())
    finally:
        for key, value in before.items():
            actor.set_model_key(key, value)
        actor.compute_at_once(LOGITS)
    # AdamW makes large steps of gradients that are all rounding.
    tolerance = 0.05 if "compute_dtype" in settings else 1e-5
    assert results[1] == [pytest.approx(expected, abs=tolerance, rel=tolerance) for expected in results[0]]


def test_training_goes_on_with_weights_that_have_moved(groups_of: Any, batches: list[Any]) -> None:
    groups = groups_of(2)
    expected = [step(groups, batch, seed) for seed, batch in enumerate(batches[:3])]
    groups = groups_of(2)
    for seed, batch in enumerate(batches[:3]):
        groups["actor"].move_weights()
        assert step(groups, batch, seed) == pytest.approx(expected[seed], abs=1e-6, rel=1e-6)


def test_bfloat16_is_for_computing_and_for_engines_only(groups_of: Any, batches: list[Any], tmp_path: Path) -> None:
    groups = groups_of(2)
    exact = groups["actor"].compute_log_prob(batches[0]).batch["old_log_probs"]
    groups["actor"].set_model_key("compute_dtype", "bfloat16")
    groups["actor"].init_model()
    rough = groups["actor"].compute_log_prob(batches[0]).batch["old_log_probs"]
    assert 0 < float((exact - rough).abs().max()) < 0.1
    assert math.isfinite(step(groups, batches[0], 0)["actor/grad_norm"])
    groups["actor"].export_in_parts(str(tmp_path), 2**30)
    stored = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    sent = load_file(groups["actor"].weight_files()[0])
    assert sent.keys() == stored.keys()
    assert all(torch.equal(sent[name], tensor.bfloat16()) for name, tensor in stored.items())
    assert {kind for bucket in groups["actor"].weight_buckets(2**30) for kind in bucket.dtypes} == {"bfloat16"}
    groups["actor"].set_model_key("compute_dtype", None)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_writes_its_shards_into_one_file(groups_of: Any, batches: list[Any], ranks: int) -> None:
    """On one host nothing is gathered, and the file holds the same bytes as the gathered buckets."""
    groups = groups_of(ranks)
    for number in range(2):
        path = groups["actor"].file_without_gathering()
        assert_same_file(path, weights(groups))
        step(groups, batches[number], number)
    assert groups["actor"].weight_files() == (path,)
    assert_same_file(path, weights(groups))


def assert_same_file(path: str, expected: dict[str, np.ndarray]) -> None:
    found = load_file(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name].numpy(), tensor, err_msg=name)


def test_buckets_are_gathered_one_by_one_and_kept_by_rank_zero(groups_of: Any) -> None:
    groups, limit = groups_of(4), 5000
    first, *others = groups["actor"].bucket_sizes(limit)
    assert len(first) > 3 and all(nbytes <= limit or len(names) == 1 for names, nbytes in first)
    assert [names for names, _ in first] == [names for names, _ in others[0]]
    assert all(nbytes == 0 for rank in others for _, nbytes in rank)
    assert_same_weights(groups_of(1), groups, tolerance=0)


@pytest.mark.parametrize("file_bytes", [5000, 2**30])
def test_an_export_is_loaded_by_transformers(groups_of: Any, tmp_path: Path, file_bytes: int) -> None:
    groups = groups_of(2)
    groups["actor"].export_in_parts(str(tmp_path), file_bytes)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, tensor in weights(groups).items():
        np.testing.assert_array_equal(exported[name].numpy(), tensor)
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (file_bytes == 5000)
    if index.exists():
        files = json.loads(index.read_text())["weight_map"]
        assert len(set(files.values())) > 3 and all((tmp_path / file).is_file() for file in files.values())


def test_fused_experts_are_exported_as_the_files_of_the_model_have_them(groups_of: Any, tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, pad_token_id=0,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "moe")
    actor = groups_of(2)["actor"]
    path = groups_of(1)["actor"].workers[0].config.model.path
    actor.set_model_key("path", str(tmp_path / "moe"))
    actor.init_model()
    actor.export_in_parts(str(tmp_path / "out"), 20_000)
    actor.set_model_key("path", path)
    names, exported = names_in(tmp_path / "moe"), AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert names_in(tmp_path / "out") == names and "model.layers.0.mlp.experts.3.up_proj.weight" in names
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "moe").state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in original.items())


def names_in(path: Path) -> set[str]:
    return {name for file in path.glob("*.safetensors") for name in load_file(file)}


def test_an_error_of_one_rank_ends_the_call_though_the_others_wait_for_it(groups_of: Any, batches: list[Any]) -> None:
    """The last one: its processes are stuck in a collective until they are killed."""
    actor = groups_of(2)["actor"]
    actor.fall_ill()
    with pytest.raises(WorkerError, match="rank 1 of 2 of 'actor'(.|\n)*lower actor.micro_batch_tokens"):
        actor.compute_log_prob(batches[0])
