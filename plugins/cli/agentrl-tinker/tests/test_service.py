"""Order, keys, refusals and checkpoints, over HTTP."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agentrl_tinker import messages, service
from agentrl_tinker.client import Model, SamplerClient, datum, trained
from agentrl_tinker.refusals import Refusal
from agentrl_tinker.store import owner_of

IDS = [5, 6, 7, 8, 9, 10]
DATUM = datum(IDS[:-1], IDS[1:], weights=[1.0] * 5)
STEP = {"learning_rate": 0.01}
Serve = Callable[..., Any]


async def new_model(client: Any, model: str, **options: Any) -> Model:
    return await Model.create(client, model, await client.session(), **options)


async def refused(call: Any) -> Refusal:
    with pytest.raises(Refusal) as found:
        await call
    return found.value


async def log_probs(model: Model) -> np.ndarray:
    return (await model.forward([DATUM])).log_probs[0]


# Training ---------------------------------------------------------------------------------------------------------


def test_a_model_begins_as_the_base_and_learns_what_it_is_trained_on(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        one = await new_model(server.one, server.model)
        base = await SamplerClient.create(server.one, one.session_id, 0, base_model=server.model)
        before = await log_probs(one)
        np.testing.assert_allclose(before, (await base.score(IDS))[1:], atol=1e-5)
        for _ in range(8):
            await one.train([DATUM])
            metrics = (await one.step(**STEP))["metrics"]
        assert metrics["grad_norm"] > 0
        assert (await log_probs(one)).sum() > before.sum() + 5
        np.testing.assert_allclose((await base.score(IDS))[1:], before, atol=1e-6)

    serve(scenario)


def test_gradients_add_up_until_a_step_and_a_forward_adds_none(serve: Serve) -> None:
    """Also over micro-batches, chunks and other models that compute in between."""
    other = datum([20, 21, 22], [21, 22, 23], weights=[0.5, -1.0, 2.0])

    async def scenario(server: Any) -> None:
        session = await server.one.session()
        models = [await Model.create(server.one, server.model, session, number) for number in range(3)]
        together, apart, third = models
        await asyncio.gather(together.train([DATUM, other] * 20), third.train([other] * 30), apart.train([other] * 20))
        await apart.forward([DATUM] * 10)
        await apart.train([DATUM] * 20)
        # With a large eps the step is proportional to the gradient.
        for model in models[:2]:
            await model.step(learning_rate=1.0, eps=100.0, beta1=0.0, beta2=0.0)
        found = [await log_probs(model) for model in models]
        np.testing.assert_allclose(found[0], found[1], atol=2e-5)
        assert abs(found[0] - found[2]).max() > 0.01

    serve(scenario)


def test_the_optimizer_is_adamw_with_the_numbers_of_each_step(serve: Serve) -> None:
    """Against the formula in float64, on the gradients that the server has."""
    steps = [
        {"learning_rate": 0.01, "beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1},
        {"learning_rate": 0.02, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.5},
        {"learning_rate": 0.0},
    ]

    async def scenario(server: Any) -> None:
        model = await new_model(server.one, server.model)
        parameters = server.service.trainer.adapters.parameters(model.model_id)
        first, second = ({key: 0.0 for key in parameters} for _ in range(2))
        for number, step in enumerate(steps, start=1):
            await model.train([DATUM])
            s = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0, **step}
            grads = {key: value.grad.double().numpy().copy() for key, value in parameters.items()}
            norm = np.sqrt(sum((each**2).sum() for each in grads.values()))
            scale = min(1.0, s["grad_clip_norm"] / norm) if s["grad_clip_norm"] else 1.0
            wanted = {}
            for key, value in parameters.items():
                grad = grads[key] * scale
                first[key] = s["beta1"] * first[key] + (1 - s["beta1"]) * grad
                second[key] = s["beta2"] * second[key] + (1 - s["beta2"]) * grad**2
                # torch corrects the bias with the betas of this step.
                m = first[key] / (1 - s["beta1"] ** number)
                v = second[key] / (1 - s["beta2"] ** number)
                kept = value.detach().double().numpy() * (1 - s["learning_rate"] * s["weight_decay"])
                wanted[key] = kept - s["learning_rate"] * m / (np.sqrt(v) + s["eps"])
            assert (await model.step(**step))["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-5)
            for key, value in parameters.items():
                np.testing.assert_allclose(value.detach().numpy(), wanted[key], rtol=1e-4, atol=1e-6)

    serve(scenario)


def test_a_step_with_gradients_that_are_not_finite_is_not_made(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        model = await new_model(server.one, server.model)
        before = await log_probs(model)
        far = datum(IDS[:-1], IDS[1:], logprobs=[-1000.0] * 5, advantages=[1.0] * 5)
        assert np.isnan((await model.train([far], "importance_sampling")).loss)
        assert "The weights are as they were" in str(await refused(model.step(**STEP)))
        np.testing.assert_array_equal(await log_probs(model), before)
        await model.train([DATUM])
        assert (await model.step(**STEP))["metrics"]["grad_norm"] > 0
        assert (await log_probs(model)).sum() > before.sum()

    serve(scenario)


def test_parts_of_the_model_that_are_trained_are_those_asked_for(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        names = {}
        for part in ("attn", "mlp", "unembed"):
            others = {f"train_{each}": each == part for each in ("attn", "mlp", "unembed")}
            model = await new_model(server.one, server.model, **others)
            names[part] = {key.split(".")[-3] for key in server.service.trainer.adapters.parameters(model.model_id)}
        assert names == {
            "attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
            "mlp": {"gate_proj", "up_proj", "down_proj"},
            "unembed": {"lm_head"},
        }
        nothing = dict.fromkeys(["train_attn", "train_mlp", "train_unembed"], False)
        assert "nothing to train" in str(await refused(new_model(server.one, server.model, **nothing)))

    serve(scenario)


def test_one_seed_gives_one_adapter(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        models = [await new_model(server.one, server.model, seed=seed) for seed in (3, 3, 4, None)]
        firsts = [next(iter(server.service.trainer.adapters.parameters(each.model_id).values())) for each in models]
        assert (firsts[0] == firsts[1]).all()
        assert not (firsts[0] == firsts[2]).any()
        assert not (firsts[0] == firsts[3]).any()

    serve(scenario)


def test_adapters_of_a_model_in_bfloat16_are_float32(serve: Serve) -> None:
    """In bfloat16 a step of less than a 256th of a weight would be lost."""

    async def scenario(server: Any) -> None:
        model = await new_model(server.one, server.model)
        path = await model.save("a")
        folder = server.service.store.find(owner_of("tml-one"), path)[1]
        saved = load_file(folder / "adapter_model.safetensors")
        parameters = server.service.trainer.adapters.parameters(model.model_id)
        assert {each.dtype for each in [*parameters.values(), *saved.values()]} == {torch.float32}
        await model.train([DATUM])
        await model.step(learning_rate=1e-6)
        first = next(key for key in saved if "lora_A" in key and "lm_head" not in key)
        await model.train([DATUM])
        await model.step(learning_rate=1e-6)
        assert not torch.equal(parameters[first], saved[first])

    serve(scenario, dtype="bfloat16")


# Order ------------------------------------------------------------------------------------------------------------


def test_requests_run_in_the_order_of_their_numbers(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        wanted = await new_model(server.one, server.model)
        await wanted.train([DATUM])
        await wanted.step(**STEP)
        after = await log_probs(wanted)

        model = await new_model(server.one, server.model)
        read = await model.send_train([DATUM], forward_only=True, seq_id=3)
        step = await model.send_step(seq_id=2, **STEP)
        assert not server.service.results._tasks[read["request_id"]][2].done()
        first = await model.send_train([DATUM], seq_id=1)
        np.testing.assert_array_equal(trained(await server.one.result(read)).log_probs[0], after)
        assert await server.one.result(step) and await server.one.result(first)

    serve(scenario)


def test_a_refused_request_uses_up_its_number(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        model = await new_model(server.one, server.model)
        assert "no loss 'mse'" in str(await refused(model.train([DATUM], "mse")))
        assert "learning_rate" in str(await refused(model.step(learning_rate=-1.0)))
        await model.forward([DATUM])
        assert model.sent == 3

    serve(scenario)


def test_the_same_request_again_is_the_same_and_another_one_is_refused(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        model = await new_model(server.one, server.model)
        promises = [await model.send_train([DATUM], seq_id=1) for _ in range(2)]
        assert promises[0] == promises[1]
        await server.one.result(promises[0])
        await server.one.result(promises[0])
        assert "another request with the number 1" in str(await refused(model.send_train([DATUM] * 2, seq_id=1)))
        await server.one.result(await model.send_step(seq_id=2, **STEP))
        assert "too far ahead" in str(await refused(model.send_step(seq_id=100_000)))
        assert "seq_id" in str(await refused(model.send_step(seq_id=0)))

    serve(scenario)


def test_a_request_that_cannot_be_read_does_not_stop_those_after_it(serve: Serve, monkeypatch: Any) -> None:
    async def scenario(server: Any) -> None:
        model = await new_model(server.one, server.model)
        with monkeypatch.context() as patch:
            patch.setattr(service.Service, "save", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await model.save("a")
        await asyncio.wait_for(model.forward([DATUM]), 30)

    serve(scenario)


def test_half_of_a_failed_request_leaves_no_gradient(serve: Serve, monkeypatch: Any) -> None:
    async def scenario(server: Any) -> None:
        models = [await new_model(server.one, server.model) for _ in range(2)]
        trainer = server.service.trainer
        forward, calls = trainer.forward, []

        def fails_at_the_second(*args: Any) -> Any:
            calls.append(args)
            if len(calls) == 2:
                raise MemoryError("no memory left")
            return forward(*args)

        for model in models:
            await model.train([DATUM])
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "forward", fails_at_the_second)
            assert "no memory left" in str(await refused(models[0].train([DATUM] * 40)))
        found = [
            [parameter.grad for parameter in trainer.adapters.parameters(model.model_id).values()] for model in models
        ]
        assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))

    serve(scenario)


def test_another_request_with_a_number_that_was_used_is_refused(serve: Serve) -> None:
    """What was made for the first one would be taken for what was made for the second."""

    async def scenario(server: Any) -> None:
        one, model = server.one, await new_model(server.one, server.model)
        session = model.session_id
        base = {"session_id": session, "sampling_session_seq_id": 0, "base_model": server.model}
        again = [await one.post("create_sampling_session", base) for _ in range(2)]
        assert again[0] == again[1]
        named = base | {"model_path": await model.save_for_sampler("a")}
        assert "another sampler with the number 0" in str(await refused(one.post("create_sampling_session", named)))
        sampler = await model.sampler("inflight")
        published = server.service.model(owner_of("tml-one"), model.model_id).published
        model.samplers -= 1
        assert "another sampler with the number 101" in str(await refused(model.sampler("inflight")))
        assert server.service.model(owner_of("tml-one"), model.model_id).published is published

        promise = await sampler.send(IDS, max_tokens=1)
        sampler.sent -= 1
        assert await sampler.send(IDS, max_tokens=1) == promise
        sampler.sent -= 1
        assert "was another one" in str(await refused(sampler.send(IDS, max_tokens=2)))

        create = {"session_id": session, "base_model": server.model, "model_seq_id": 0, "type": "create_model"}
        lora = {"lora_config": {"rank": 8, "seed": 1}}
        assert (await one.post("create_model", create | lora))["model_id"] == model.model_id
        other = create | {"lora_config": {"rank": 4, "seed": 1}}
        assert "was another one" in str(await refused(one.post("create_model", other)))
        # Its result was fetched so long ago that it is not kept.
        del server.service.results._tasks[f"{model.model_id}:0"]
        assert "has a model with the number 0" in str(await refused(one.post("create_model", create | lora)))

    serve(scenario)


def test_a_failed_request_says_why_and_the_next_ones_run(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: Any) -> None:
        model = await new_model(server.one, server.model)
        trainer = server.service.trainer
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "forward", lambda *_: 1 / 0)
            assert "ZeroDivisionError" in str(await refused(model.train([DATUM])))
        await model.train([DATUM])

    serve(scenario)


# Keys -------------------------------------------------------------------------------------------------------------


def test_a_key_sees_what_it_made_and_nothing_else(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        one, two = server.one, server.two
        model = await new_model(one, server.model)
        promise = await model.send_train([DATUM])
        await one.result(promise)
        saved, for_sampler = await model.save("a"), await model.save_for_sampler("b")
        sampler = await model.sampler()
        session = await two.session()
        calls = [
            two.post("get_info", {"model_id": model.model_id}),
            two.result(promise),
            two.post("session_heartbeat", {"session_id": model.session_id}),
            two.get(f"samplers/{sampler.sampler_id}"),
            SamplerClient(two, sampler.sampler_id).send(IDS, max_tokens=1),
            SamplerClient.create(two, session, 0, model_path=for_sampler),
            Model.create(two, server.model, model.session_id, 5),
            Model(two, model.session_id, model.model_id, model.sent).train([DATUM]),
            two.post("load_weights", {"session_id": session, "model_seq_id": 0, "path": saved, "optimizer": True}),
            two.post("weights_info", {"tinker_path": saved}),
            two.post("cancel_future", {"request_id": f"{sampler.sampler_id}:0"}),
            two.get(f"training_runs/{model.model_id}"),
        ]
        for call in calls:
            assert (await refused(call)).status in (404, 410)
        assert (await two.get("checkpoints"))["checkpoints"] == []
        assert len((await one.get("checkpoints"))["checkpoints"]) == 2
        assert (await one.get(f"training_runs/{model.model_id}"))["lora_rank"] == 8
        assert (await one.post("weights_info", {"tinker_path": saved}))["train_mlp"] is True
        await log_probs(model)

    serve(scenario)


@pytest.mark.parametrize("key", ["", "tml-three"])
def test_an_unknown_key_is_not_let_in(serve: Serve, key: str) -> None:
    async def scenario(server: Any) -> None:
        for path in ("client/config", "create_session", "forward_backward", "asample", "retrieve_future"):
            response = await server.http.post(f"/api/v1/{path}", json={}, headers={"X-API-Key": key} if key else {})
            assert response.status_code == 401
            assert "key" in response.json()["detail"]

    serve(scenario)


# Refusals ---------------------------------------------------------------------------------------------------------

TENSOR = {"dense": np.ones(5, "<f4").tobytes(), "dtype": messages.FLOAT32, "shape": [5]}


def broken(**changes: Any) -> Any:
    """A datum with other chunks or inputs."""
    data = datum(IDS[:-1], IDS[1:], **changes.pop("inputs", {"weights": [1.0] * 5}))
    for key, value in changes.pop("tensors", {}).items():
        entry = next(each for each in data.loss_fn_inputs if each.key == key)
        entry.value.CopyFrom(messages.new("Tensor", **(TENSOR | value)))
    if chunk := changes.pop("chunk", None):
        data.model_input.add().CopyFrom(messages.new("Chunk", **chunk))
    return data


BAD_DATA: list[tuple[list[Any], str]] = [
    ([], "0 datums; allowed are 1 to"),
    ([broken(chunk={"image": messages.new("ImageChunk", format="png")})], "takes text alone"),
    ([broken(inputs={})], "lacks weights"),
    ([broken(inputs={"weights": [1.0] * 5, "mask": [1.0] * 5})], "does not read loss_fn_inputs mask"),
    ([broken(inputs={"weights": [1.0] * 4})], "4 values and the shape .4. for 5 tokens"),
    ([broken(tensors={"weights": {"shape": [7]}})], "5 values and the shape .7. for 5 tokens"),
    ([broken(inputs={"weights": [1.0, float("nan"), 1.0, 1.0, 1.0]})], "not finite"),
    ([broken(tensors={"weights": {"shape": [5, 1]}})], "one target for each position"),
    ([broken(tensors={"weights": {"dtype": messages.INT64}})], "is not float32"),
    ([broken(tensors={"weights": {"dense": b"abc"}})], "no whole number"),
    ([DATUM, datum([1, 10_000], [1, 2], weights=[1.0, 1.0])], "data.1.: model_input has the id 10000"),
    ([datum([1, 2], [1, -3], weights=[1.0, 1.0])], "target_tokens has the id -3"),
    ([datum([1] * 300, [1] * 300, weights=[1.0] * 300)], "300 tokens; allowed are 1 to 256"),
    ([datum([], [], weights=[])], "0 tokens"),
]


def test_data_that_cannot_be_trained_on_is_refused(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        model = await new_model(server.one, server.model)
        for data, message in BAD_DATA:
            with pytest.raises(Refusal, match=message) as found:
                await model.train(data)
            assert found.value.status == 400
        await model.forward([DATUM])

    serve(scenario)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
        ("create_model", {"lora_config": None}, "trains LoRA adapters alone"),
        ("create_model", {"lora_config": {"rank": 8, "alpha": 3}}, "lora_config.alpha: this server does not know"),
        ("create_model", {"lora_config": {"rank": 65}}, "more than this server's --max-rank 64"),
        ("create_model", {"base_model": "another"}, "this server has .*, not 'another'"),
        ("create_model", {"optimizer_config": {"type": "dimuon"}}, "optimizer adamw alone"),
        ("optim_step", {"adam_params": {"momentum": 0.9}}, "momentum: this server does not know this field"),
        ("optim_step", {"optimizer_params": {"type": "dimuon"}}, "optimizer adamw alone"),
        ("optim_step", {"adam_params": {"beta1": 1.0}}, "beta1: Input should be less than 1"),
        ("create_model", {"lora_config": {"rank": 0}}, "lora_config.rank: Input should be greater than or equal to 1$"),
        ("create_model", {"lora_config": {"rank": 8, "seed": 2**70}}, "seed: Input should be less than"),
        ("save_weights", {"path": "a", "ttl_seconds": 10**400}, "ttl_seconds: Input should be"),
        ("save_weights", {"path": "a", "ttl_seconds": 10**12}, "ttl_seconds: Input should be less than"),
        ("save_weights", {"path": "../up"}, "no name of a checkpoint"),
        ("save_weights_for_sampler", {}, "needs path or sampling_session_seq_id"),
        ("load_weights", {"path": "tinker://x/weights/y", "optimizer": True}, "there is no checkpoint"),
        ("load_weights", {"path": "/etc/passwd", "optimizer": True}, "is not of the form tinker://"),
        (
            "load_weights",
            {"path": "tinker://x/weights/y", "optimizer": True, "weights_access_token": "t"},
            "loads the checkpoints that it has saved itself",
        ),
        ("asample", {"topk_sample_logprobs": 2}, "no likeliest tokens of sampled positions"),
        ("asample", {"prompt_alt_tokens_k": 2}, "draws no alternatives"),
        ("asample", {"target_prompt_logprobs": {"data": [1], "dtype": "int64"}}, "scores the tokens of the prompt"),
        ("asample", {"record_stability_info": True}, "stable_reinforce"),
        ("asample", {"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, "takes text alone"),
        ("asample", {"sampling_params": {"max_tokens": 2, "min_p": 0.1}}, "min_p: this server does not know"),
        ("asample", {"sampling_params": {"temperature": 9.0}}, "temperature is 9.0; allowed"),
        ("asample", {"sampling_params": {"max_tokens": 0}}, "max_tokens: Input should be greater"),
        ("asample", {"prompt": {"chunks": []}}, "the prompt is empty"),
        ("asample", {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [9999]}]}}, "outside the vocabulary"),
        ("asample", {"prompt_logprobs_last_n": 2}, "needs prompt_logprobs"),
        ("save_weights_external", {"path": "x", "age_encryption_recipients": ["age1x"]}, "does not encrypt the files"),
        ("copy_weights", {}, "a checkpoint stays where it was saved"),
        ("create_custom_loss", {}, "custom losses run in the client"),
        ("training_runs/x/checkpoints/weights/y/publish", {}, "no public checkpoints"),
        ("something", {}, "this server has no POST /api/v1/something"),
]  # fmt: skip


def test_what_the_server_does_not_do_is_refused_in_a_sentence(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        model = await new_model(server.one, server.model)
        base = await SamplerClient.create(server.one, model.session_id, 0, base_model=server.model)
        valid = {
            "create_model": {
                "session_id": model.session_id, "model_seq_id": 1, "base_model": server.model,
                "lora_config": {"rank": 8},
            },
            "asample": {
                "sampling_session_id": base.sampler_id, "seq_id": 0, "sampling_params": {"max_tokens": 2},
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": IDS}]},
            },
        }  # fmt: skip
        for path, body, message in REFUSED:
            ordered = path in (
                "optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external", "load_weights",
            )  # fmt: skip
            numbers = {"model_id": model.model_id, "seq_id": model.next()} if ordered else {}
            with pytest.raises(Refusal, match=message):
                await server.one.post(path, {**valid.get(path, numbers), **body})
        # Each of them has used up its number.
        await model.forward([DATUM])

    serve(scenario)


ELSEWHERE = [
    ("PUT", "training_runs/r/checkpoints/weights/a/ttl", "is set when it is saved"),
    ("POST", "training_runs/r/checkpoints/weights/a/publish", "no public checkpoints"),
    ("GET", "sessions", "does not list sessions"),
    ("POST", "sessions/search", "does not list sessions"),
    ("GET", "sessions/s", "does not describe sessions"),
    ("PUT", "sessions/s/project", "no projects"),
    ("GET", "sessions/s/trace_export", "no traces"),
    ("GET", "audit", "no audit log"),
    ("GET", "billing/usage/checkpoints/current", "bills nothing"),
    ("DELETE", "auth/apikey/me", "started with .--keys"),
    ("GET", "training_runs?access_scope=accessible", "a key sees what it has made itself"),
    ("GET", "training_runs?sort=name", "sort: this server does not know this field"),
    ("GET", "checkpoints?offset=-1", "offset: Input should be greater than or equal to 0"),
]


def test_what_else_the_sdk_asks_for_is_refused(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        for method, path, message in ELSEWHERE:
            response = await server.http.request(method, f"/api/v1/{path}", headers={"X-API-Key": "tml-one"})
            assert (response.status_code, path) == (400, path)
            assert re.search(message, response.json()["detail"])

    serve(scenario)


def test_lists_come_in_pages(serve: Serve) -> None:
    async def scenario(server: Any) -> None:
        session = await server.one.session()
        models = [await Model.create(server.one, server.model, session, number) for number in range(3)]
        paths = [await model.save("a") for model in models]
        pages = [await server.one.get(f"checkpoints?limit=2&offset={offset}") for offset in (0, 2, 4)]
        assert [[each["tinker_path"] for each in page["checkpoints"]] for page in pages] == [paths[:2], paths[2:], []]
        assert [page["cursor"] for page in pages] == [
            {"offset": offset, "limit": 2, "total_count": 3} for offset in (0, 2, 4)
        ]
        runs = (await server.one.get("training_runs?limit=1&offset=1&access_scope=owned"))["training_runs"]
        assert [each["training_run_id"] for each in runs] == [models[1].model_id]

    serve(scenario)


def test_bodies_have_limits_and_forms(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: Any) -> None:
        headers = {"X-API-Key": "tml-one"}
        protobuf = {**headers, "Content-Type": "application/x-protobuf"}
        cases = [
            (headers, b"{}", 415, "takes application/x-protobuf"),
            ({**protobuf, "Content-Encoding": "zstd"}, b"", 415, "encoded as zstd"),
            (protobuf, b"\xff\xff\xff", 400, "is no ForwardBackwardRequest"),
            (protobuf, b"x" * 200, 413, "Send fewer datums"),
        ]
        limit = monkeypatch.context()
        limit.__enter__().setattr("agentrl_tinker.app.MAX_BODY", 100)
        for sent, body, status, message in cases:
            response = await server.http.post("/api/v1/forward_backward", content=body, headers=sent)
            assert response.status_code == status
            assert message in response.json()["detail"]
        limit.__exit__(None, None, None)
        response = await server.http.post("/api/v1/create_session", content=b"{", headers=headers)
        assert response.status_code == 400 and "no JSON" in response.json()["detail"]
        request = messages.new("ForwardBackwardRequest", model_id="m", seq_id=1)
        request.MergeFromString(b"\xc2\x3e\x01a")
        model = await new_model(server.one, server.model)
        request.model_id = model.model_id
        assert "fields that this server does not know" in str(
            await refused(server.one.post_message("forward_backward", request))
        )

    serve(scenario)


def test_many_clients_take_turns(serve: Serve) -> None:
    """None of them is ever far behind another one, and one that disappears does not hold up the others."""

    async def scenario(server: Any) -> None:
        done = [0] * 8
        apart = []

        async def client(number: int, key: Any) -> None:
            model = await new_model(key, server.model)
            for _ in range(4):
                await asyncio.gather(model.train([DATUM] * (1 + 10 * (number % 2))), model.step(**STEP))
                await (await model.sampler()).sample(IDS, max_tokens=2, stop=[])
                done[number] += 1
                # Those that have not begun yet are still being created.
                apart.append(max(done) - min(each for each in done[:-1]))

        tasks = [asyncio.create_task(client(number, (server.one, server.two)[number % 2])) for number in range(8)]
        while not done[7] and not any(each.done() for each in tasks):
            await asyncio.sleep(0)
        tasks[7].cancel()
        await asyncio.gather(*tasks[:7])
        assert done[:7] == [4] * 7
        assert max(apart) <= 2

    serve(scenario)


BODIES: list[Any] = [
    b"", b"[]", b"null", b"1", b'"x"', b"{}", b"\xff", b"[" * 5000, b'{"model_id": 1, "seq_id": "a"}',
    b'{"model_id": [], "seq_id": 1e400}', b'{"request_id": null}', b'{"session_id": {}, "model_seq_id": -1}',
    b'{"path": 3, "optimizer": "no", "session_id": "s", "model_seq_id": 0}', b'{"tinker_path": []}',
    b'{"sampling_session_id": "", "seq_id": 0, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1e99]}]}, '
    b'"sampling_params": {"stop": [[]], "top_p": "NaN"}}',
]  # fmt: skip


def test_no_body_makes_the_server_fail(serve: Serve) -> None:
    """Also not for a model that exists: its next requests run."""

    async def scenario(server: Any) -> None:
        model = await new_model(server.one, server.model)
        headers = {"X-API-Key": "tml-one"}
        routes = [each for each in server.api.app.routes if "{" not in each.path]
        assert len(routes) > 20
        for route in routes:
            for body in BODIES:
                for method in route.methods:
                    kind = {"Content-Type": "application/x-protobuf"} if "forward_backward" in route.path else {}
                    found = await server.http.request(method, route.path, content=body, headers=headers | kind)
                    assert found.status_code < 500, (route.path, body, found.text)
                    assert found.is_success or "detail" in found.json(), (route.path, body)
        for body in (b"", b"{", b"{}"):
            prefix = messages.new("ForwardBackwardRequest", model_id=model.model_id, seq_id=model.next())
            content = prefix.SerializeToString() + b"\x1a" + bytes([len(body)]) + body
            found = await server.http.post(
                "/api/v1/forward_backward",
                content=content,
                headers=headers | {"Content-Type": "application/x-protobuf"},
            )
            assert found.status_code == 400
            if "is no ForwardBackwardRequest" in found.text:
                model.sent -= 1
        await model.forward([DATUM])

    serve(scenario)
