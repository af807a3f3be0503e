"""Every call of the SDK ``tinker`` that the server carries out, and how the SDK shows what it refuses.

In the environment of ``make tinker-env``; the server runs in the environment of ``AGENTRL_PYTHON``.
"""

import asyncio
import math
import urllib.request
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types

IDS = [5, 6, 7, 8, 9, 10]


def datum(**inputs: Any) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(IDS[:-1]),
        loss_fn_inputs={"target_tokens": torch.tensor(IDS[1:]), **{k: torch.tensor(v) for k, v in inputs.items()}},
    )


ROW = datum(weights=[1.0] * 5)
ADAM = types.AdamParams(learning_rate=0.01)


@pytest.fixture
def service(server: Any) -> Any:
    client = tinker.ServiceClient(base_url=server.url, api_key="tml-one", user_metadata={"test": "yes"})
    yield client
    client.close("success").result(timeout=60)


@pytest.fixture
def training(service: Any, server: Any) -> Any:
    return service.create_lora_training_client(base_model=server.model, rank=8, seed=1).result(timeout=120)


def test_what_the_server_says_of_itself_and_of_a_model(service: Any, training: Any, server: Any) -> None:
    (supported,) = service.get_server_capabilities().supported_models
    assert (supported.model_name, supported.trainable, supported.max_context_length) == (server.model, True, 2048)
    info = training.get_info()
    assert (info.model_data.model_name, info.is_lora, info.lora_rank) == (server.model, True, 8)
    assert training.get_tokenizer().decode(training.get_tokenizer().encode("2 + 2")) == "2 + 2"


def test_training_lowers_the_loss_and_samplers_have_the_weights(service: Any, training: Any, server: Any) -> None:
    losses = []
    for _ in range(6):
        # As the SDK wants it: both are sent before either is waited for.
        passed, stepped = training.forward_backward([ROW] * 3, "cross_entropy"), training.optim_step(ADAM)
        losses.append(passed.result(timeout=60).metrics["loss:sum"])
        assert stepped.result(timeout=60).metrics["grad_norm"] > 0
    assert losses[-1] < 0.7 * losses[0]
    (output,) = training.forward([ROW], "cross_entropy").result(timeout=60).loss_fn_outputs
    wanted = output["logprobs"].to_numpy()

    snapshot = training.save_weights_and_get_sampling_client().result(timeout=60)
    inflight = training.save_weights_and_get_sampling_client(kind="inflight").result(timeout=60)
    path = training.save_weights_for_sampler("for-sampler", ttl_seconds=3600).result(timeout=60).path
    named = service.create_sampling_client(model_path=path).result(timeout=60)
    base = service.create_sampling_client(base_model=server.model).result(timeout=60)
    prompt = types.ModelInput.from_ints(IDS)
    for sampler in (snapshot, inflight, named):
        scored = sampler.compute_logprobs(prompt).result(timeout=60)
        assert scored[0] is None
        np.testing.assert_allclose(scored[1:], wanted, atol=1e-4)
    assert abs(np.array(base.compute_logprobs(prompt).result(timeout=60)[1:]) - wanted).max() > 0.5
    training.forward_backward([ROW] * 3, "cross_entropy").result(timeout=60)
    training.optim_step(ADAM).result(timeout=60)
    training.save_weights_and_get_sampling_client(kind="inflight").result(timeout=60)
    assert abs(np.array(inflight.compute_logprobs(prompt).result(timeout=60)[1:]) - wanted).max() > 0.01
    np.testing.assert_allclose(snapshot.compute_logprobs(prompt).result(timeout=60)[1:], wanted, atol=1e-4)
    assert named.get_base_model() == server.model


def test_sampling(service: Any, server: Any) -> None:
    base = service.create_sampling_client(base_model=server.model).result(timeout=60)
    prompt = types.ModelInput.from_ints(IDS)
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=3, stop=[])
    found = base.sample(prompt, 4, params, include_prompt_logprobs=True, topk_prompt_logprobs=3).result(timeout=60)
    assert [len(each.tokens) for each in found.sequences] == [6] * 4
    assert {each.stop_reason for each in found.sequences} == {"length"}
    assert len({each.sequence_id for each in found.sequences}) == 4
    assert found.prompt_logprobs[0] is None and found.topk_prompt_logprobs[0] is None
    for token, log_prob, top in zip(IDS[1:], found.prompt_logprobs[1:], found.topk_prompt_logprobs[1:], strict=True):
        assert len(top) == 3 and top[0][1] >= max(log_prob, top[1][1], top[2][1])
        assert dict(top).get(token, log_prob) == pytest.approx(log_prob, abs=1e-5)
    tail = base.compute_logprobs(prompt, prompt_logprobs_last_n=2).result(timeout=60)
    assert tail[:4] == [None] * 4 and tail[4:] == found.prompt_logprobs[4:]
    again = base.sample(prompt, 4, params).result(timeout=60)
    assert [each.tokens for each in again.sequences] == [each.tokens for each in found.sequences]
    first = found.sequences[0].tokens
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=3, stop=[first[2]])
    (stopped,) = base.sample(prompt, 1, params).result(timeout=60).sequences
    assert (stopped.tokens, stopped.stop_reason) == (first[: first.index(first[2]) + 1], "stop")
    text = training_text(base, first[:3])
    (stopped,) = base.sample(prompt, 1, params.model_copy(update={"stop": [text]})).result(timeout=60).sequences
    assert len(stopped.tokens) <= 3 and stopped.stop_reason == "stop"


def training_text(sampler: Any, ids: list[int]) -> str:
    return str(sampler.get_tokenizer().decode(ids))[-1]


RL = {"logprobs": [-5.0, -5.5, -6.0, -5.2, -5.8], "advantages": [1.0, -1.0, 0.5, 0.0, 2.0]}


@pytest.mark.parametrize(
    ("loss", "inputs", "config"),
    [
        ("importance_sampling", RL, None),
        ("ppo", RL, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        ("cispo", RL, None),
        ("dro", RL, {"beta": 0.05}),
        ("gspo", RL | {"sequence_ratio_mask": [0.0, 1.0, 1.0, 1.0, 1.0]},
         {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}),
    ],
)  # fmt: skip
def test_losses(training: Any, loss: str, inputs: Any, config: Any) -> None:
    found = training.forward_backward([datum(**inputs)], loss, config).result(timeout=60)
    lp = found.loss_fn_outputs[0]["logprobs"].to_numpy().astype(np.float64)
    q, a = np.array(inputs["logprobs"]), np.array(inputs["advantages"])
    ratio = np.exp(lp - q)
    low, high = (config or {}).get("clip_low_threshold", 0.8), (config or {}).get("clip_high_threshold", 1.2)
    if loss == "gspo":
        ratio = np.full(5, np.exp((lp - q)[1:].mean()))
    wanted = {
        "importance_sampling": lambda: -(ratio * a).sum(),
        "cispo": lambda: -(np.clip(ratio, low, high) * lp * a).sum(),
        "dro": lambda: -(lp * a - 0.025 * (lp - q) ** 2).sum(),
    }.get(loss, lambda: -np.minimum(ratio * a, np.clip(ratio, low, high) * a).sum())()
    assert found.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-4)


def test_a_loss_of_the_clients_own_has_its_gradient(service: Any, server: Any) -> None:
    """The squared log-probability, against cross_entropy with the weights that its gradient is."""

    def squared(data: Any, logprobs: list[torch.Tensor]) -> Any:
        loss = sum((each**2).sum() for each in logprobs)
        return loss, {"squared:sum": float(loss)}

    step = types.AdamParams(learning_rate=1.0, eps=1000.0, beta1=0.0, beta2=0.0)
    found = []
    for custom in (True, False):
        model = service.create_lora_training_client(base_model=server.model, rank=8, seed=1).result(timeout=60)
        before = model.forward([ROW], "cross_entropy").result(timeout=60).loss_fn_outputs[0]["logprobs"].to_torch()
        if custom:
            result = model.forward_backward_custom([ROW, ROW], squared).result(timeout=60)
            assert result.metrics["loss:sum"] == pytest.approx(2 * float((before**2).sum()), rel=1e-4)
        else:
            model.forward_backward([datum(weights=(-2 * before).tolist())] * 2, "cross_entropy").result(timeout=60)
        model.optim_step(step).result(timeout=60)
        found.append(model.forward([ROW], "cross_entropy").result(timeout=60).loss_fn_outputs[0]["logprobs"].to_numpy())
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
    assert abs(found[0] - before.numpy()).max() > 1e-3


def test_state_is_saved_and_loaded(service: Any, training: Any, server: Any) -> None:
    def learn(model: Any) -> Any:
        for _ in range(2):
            model.forward_backward([ROW], "cross_entropy").result(timeout=60)
            model.optim_step(ADAM).result(timeout=60)
        return model.forward([ROW], "cross_entropy").result(timeout=60).loss_fn_outputs[0]["logprobs"].to_numpy()

    learn(training)
    path = training.save_state("step-2", ttl_seconds=3600, user_metadata={"a": "b"}).result(timeout=60).path
    wanted = learn(training)
    resumed = service.create_training_client_from_state_with_optimizer(path).result(timeout=60)
    np.testing.assert_array_equal(learn(resumed), wanted)
    fresh = service.create_training_client_from_state(path).result(timeout=60)
    assert abs(learn(fresh) - wanted).max() > 1e-4
    training.load_state_with_optimizer(path).result(timeout=60)
    np.testing.assert_array_equal(learn(training), wanted)

    rest = tinker.RestClient(base_url=server.url, api_key="tml-one")
    info = rest.get_weights_info_by_tinker_path(path).result(timeout=60)
    assert (info.base_model, info.lora_rank, info.train_mlp) == (server.model, 8, True)
    external = training.save_weights_external("files").result(timeout=60).path
    urls = rest.get_external_weights_urls(external).result(timeout=60).urls
    assert sorted(urls) == ["adapter_config.json", "adapter_model.safetensors"]
    assert b'"r": 8' in urllib.request.urlopen(urls["adapter_config.json"], timeout=60).read()
    rest.delete_checkpoint_from_tinker_path(external).result(timeout=60)
    run = rest.get_training_run(training.model_id).result(timeout=60)
    assert run.last_checkpoint.tinker_path == path and run.lora_rank == 8
    (checkpoint,) = rest.list_checkpoints(training.model_id).result(timeout=60).checkpoints
    assert (checkpoint.checkpoint_id, checkpoint.user_metadata) == ("weights/step-2", {"a": "b"})
    rest.delete_checkpoint_from_tinker_path(path).result(timeout=60)
    assert rest.list_checkpoints(training.model_id).result(timeout=60).checkpoints == []


def test_many_datums_travel_in_chunks(training: Any) -> None:
    found = training.forward_backward([ROW] * 2500, "cross_entropy").result(timeout=120)
    assert len(found.loss_fn_outputs) == 2500
    total = -sum(float(each["logprobs"].to_numpy().sum()) for each in found.loss_fn_outputs)
    assert found.metrics["loss:sum"] == pytest.approx(total, rel=1e-4)
    assert math.isfinite(training.optim_step(ADAM).result(timeout=60).metrics["grad_norm"])


def test_what_is_refused_raises_with_the_sentence_and_the_client_goes_on(
    service: Any, training: Any, server: Any
) -> None:
    with pytest.raises(tinker.BadRequestError, match="its objective is not published"):
        training.forward_backward([datum(**RL)], "stable_reinforce").result(timeout=60)
    with pytest.raises(tinker.BadRequestError, match="one target for each position"):
        wide = types.Datum(
            model_input=types.ModelInput.from_ints(IDS[:-1]),
            loss_fn_inputs={"target_tokens": torch.ones(5, 2, dtype=torch.long), "weights": torch.ones(5, 2)},
        )
        training.forward_backward([wide], "cross_entropy").result(timeout=60)
    with pytest.raises(tinker.BadRequestError, match="optimizer adamw alone"):
        training.optim_step(types.DimuonParams(learning_rate=0.1)).result(timeout=60)
    with pytest.raises(tinker.BadRequestError, match="does not encrypt"):
        training.save_weights_external("x", age_encryption_recipients=["age1x"]).result(timeout=60)
    with pytest.raises(tinker.BadRequestError, match="this server has"):
        service.create_lora_training_client(base_model="another").result(timeout=60)
    recorded = service.create_sampling_client(base_model=server.model, record_stability_info=True).result(timeout=60)
    with pytest.raises(tinker.BadRequestError, match="stable_reinforce"):
        recorded.sample(types.ModelInput.from_ints(IDS), 1, types.SamplingParams(max_tokens=1)).result(timeout=60)
    with pytest.raises(tinker.AuthenticationError, match="not in the file"):
        tinker.ServiceClient(base_url=server.url, api_key="tml-unknown").create_sampling_client(base_model=server.model)


def test_two_keys_at_the_same_time(server: Any) -> None:
    async def main() -> None:
        clients = [tinker.ServiceClient(base_url=server.url, api_key=key) for key in ("tml-one", "tml-two")]
        models = await asyncio.gather(
            *(each.create_lora_training_client(base_model=server.model, rank=8, seed=1) for each in clients * 2)
        )
        found = await asyncio.gather(*(learn(model, number) for number, model in enumerate(models)))
        # The same seed and the same data, whatever the others do.
        np.testing.assert_array_equal(found[0], found[2])
        assert abs(found[0] - found[1]).max() > 1e-3
        saved = await models[0].save_state("mine")
        with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
            await clients[1].create_training_client_from_state(saved.path)
        for each in clients:
            await each.close("success")

    async def learn(model: Any, number: int) -> Any:
        for _ in range(3):
            passed = model.forward_backward([datum(weights=[1.0 + number % 2] * 5)], "cross_entropy")
            stepped = model.optim_step(types.AdamParams(learning_rate=0.01 * (1 + number % 2)))
            await passed
            await stepped
        sampler = await model.save_weights_and_get_sampling_client()
        return np.array((await sampler.compute_logprobs(types.ModelInput.from_ints(IDS)))[1:])

    # The SDK waits in its constructor, which therefore may not run in its own loop; this one is ours.
    asyncio.run(main())
