"""The conformance check passes with this server, and each of its checks fails with a broken one."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch

from agentrl_tinker import app, losses, requests, samples
from agentrl_tinker.check import CHECKS, run_checks
from agentrl_tinker.losses import Loss
from agentrl_tinker.queues import Ordered, Results, finish
from agentrl_tinker.refusals import Refusal
from agentrl_tinker.sampler import Sampler
from agentrl_tinker.service import Service
from agentrl_tinker.trainer import Trainer

Serve = Callable[..., Any]
Patch = pytest.MonkeyPatch


async def states(server: Any, only: list[str] | None = None) -> dict[str, str]:
    transport = httpx.ASGITransport(app=server.api.app)
    outcomes = await run_checks("http://test", "tml-one", "tml-two", only=only, transport=transport)
    return {each.name: str(each) for each in outcomes}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: Patch) -> None:
    monkeypatch.setattr(app, "WAIT", 0.5)


def test_this_server_passes_all_checks(serve: Serve) -> None:
    found = serve(states, max_adapters=6)
    assert {name: text for name, text in found.items() if not text.startswith("passed")} == {}
    assert found.keys() == CHECKS.keys()


# What is broken, by the check that must find it -------------------------------------------------------------------


def every_key_is_let_in_as_the_same(patch: Patch) -> None:
    patch.setattr(app.Api, "_owner", lambda self, request: "everybody")


def crashes_on_an_unknown_key(patch: Patch) -> None:
    original = app.Api._owner

    def owner(self: Any, request: Any) -> str:
        try:
            return original(self, request)
        except Refusal as refusal:
            raise Refusal(str(refusal), 500) from refusal

    patch.setattr(app.Api, "_owner", owner)


def with_loss(name: str, of: Any) -> Callable[[Patch], None]:
    def broken(patch: Patch) -> None:
        patch.setitem(losses.LOSSES, name, Loss(of, losses.LOSSES[name].inputs, losses.LOSSES[name].settings))

    return broken


def relative(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Takes clip thresholds as distances from 1."""
    return lambda lp, x, s: loss(
        lp, x, {"clip_low_threshold": 1 - s["clip_low_threshold"], "clip_high_threshold": 1 + s["clip_high_threshold"]}
    )


def wrapped(owner: Any, name: str, change: Callable[..., Any]) -> Callable[[Patch], None]:
    """``change(original, *args)`` in the place of a method."""

    def broken(patch: Patch) -> None:
        original = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))

    return broken


def capped(lp: Any, x: Any, s: Any) -> Any:
    return -(torch.exp(lp - x["logprobs"]).clamp(0, 1) * x["advantages"]).sum()


def without_minimum(lp: Any, x: Any, s: Any) -> Any:
    return -(losses._clipped(torch.exp(lp - x["logprobs"]), s) * x["advantages"]).sum()


def without_negative_weights(lp: Any, x: Any, s: Any) -> Any:
    return -(lp * x["weights"].clamp(min=0)).sum()


def of_the_base(scores: Any, self: Any, folder: Any, shape: Any, *rest: Any) -> Any:
    return scores(self, None, None, *rest)


def averaged(forward: Any, self: Any, name: str, rows: Any, loss: Loss, settings: Any, backward: bool) -> Any:
    mean = Loss(lambda *args: loss.of(*args) / len(rows), loss.inputs)
    return forward(self, name, rows, mean, settings, backward)


def forgetful(forward: Any, self: Any, name: str, rows: Any, loss: Loss, settings: Any, backward: bool) -> Any:
    for parameter in self.adapters.parameters(name).values() if backward else ():
        parameter.grad = None
    return forward(self, name, rows, loss, settings, backward)


def keeping_gradients(step: Any, self: Any, name: str, params: Any) -> Any:
    kept = {
        key: None if each.grad is None else each.grad.clone() for key, each in self.adapters.parameters(name).items()
    }
    metrics = step(self, name, params)
    for key, each in self.adapters.parameters(name).items():
        each.grad = kept[key]
    return metrics


def always_backward(forward: Any, self: Any, name: str, rows: Any, loss: Loss, settings: Any, backward: bool) -> Any:
    return forward(self, name, rows, loss, settings, True)


def always(name: str, value: float) -> Callable[..., Any]:
    def step(original: Any, self: Any, model: str, params: Any) -> Any:
        object.__setattr__(params, name, value)
        return original(self, model, params)

    return step


def at_once(original: Any, self: Any, number: int, future: Any, work: Any) -> None:
    if future is not None:
        asyncio.get_running_loop().create_task(finish(future, work))


def without_moments(original: Any, self: Any, name: str, weights: Any, moments: Any) -> None:
    original(self, name, weights, None)


def other_seed_each_time(original: Any, params: Any, index: int) -> Any:
    return original(params, index) if params.seed is None else original(params, index + torch.randint(9**9, ()).item())


def tempered(original: Any, output: Any, *rest: Any) -> Any:
    output.log_probs = [each / 2 for each in output.log_probs]
    return original(output, *rest)


def dropping_unknown_parameters(patch: Patch) -> None:
    original = requests.Sample.model_validate

    def validated(body: Any) -> Any:
        known = requests.Sampling.model_fields
        body["sampling_params"] = {key: value for key, value in body["sampling_params"].items() if key in known}
        return original(body)

    patch.setattr(requests.Sample, "model_validate", validated)


def any_setting(patch: Patch) -> None:
    original = requests.loss_named
    known = {key for loss in losses.LOSSES.values() for key in loss.settings}
    patch.setattr(requests, "loss_named", lambda name, s: original(name, {k: v for k, v in s.items() if k in known}))


def newest_for_all(patch: Patch) -> None:
    original = Service._new_sampler

    def new(self: Any, owner: str, session: str, number: int, weights: Any, path: Any = None) -> str:
        newest = self.__dict__.setdefault("_newest", {})
        newest[session] = weights
        return original(self, owner, session, number, lambda: newest[session](), path)

    patch.setattr(Service, "_new_sampler", new)


def never_published(patch: Patch) -> None:
    original = Service.save_for_sampler

    def save(self: Any, model: Any, body: Any) -> Any:
        first = self.__dict__.setdefault("_first", {})
        work = original(self, model, body)

        async def publish() -> Any:
            result = await work()
            if body.kind == "inflight":
                model.published = first.setdefault(model.model_id, model.published)
            return result

        return publish

    patch.setattr(Service, "save_for_sampler", save)


def done_twice(patch: Patch) -> None:
    patch.setattr(Ordered, "known", lambda *_: False)
    patch.setattr(Results, "__contains__", lambda *_: False)
    wrapped(Ordered, "add", at_once)(patch)


def ready_too_early(patch: Patch) -> None:
    # However long it takes on a machine with other work.
    patch.setattr(app, "WAIT", 60.0)
    wrapped(Ordered, "add", at_once)(patch)


def with_the_base(generate: Any, self: Any, weights: Any, *rest: Any) -> Any:
    return generate(self, None, *rest)


BROKEN: list[tuple[str, Callable[[Patch], None]]] = [
    ("unknown_keys_are_not_let_in", crashes_on_an_unknown_key),
    ("keys_are_isolated", every_key_is_let_in_as_the_same),
    ("loss_importance_sampling", with_loss("importance_sampling", capped)),
    ("loss_ppo", with_loss("ppo", relative(losses._ppo))),
    ("loss_ppo", with_loss("ppo", without_minimum)),
    ("loss_cispo", with_loss("cispo", losses._ppo)),
    ("loss_dro", with_loss("dro", lambda lp, x, s: losses._dro(lp, x, {"beta": 2 * s["beta"]}))),
    ("loss_gspo", with_loss("gspo", losses._ppo)),
    ("loss_cross_entropy", with_loss("cross_entropy", lambda lp, x, s: -lp.sum())),
    ("loss_cross_entropy", with_loss("cross_entropy", lambda lp, x, s: -(lp * x["weights"]).mean())),
    ("gradients_are_sums_over_datums", wrapped(Trainer, "forward", averaged)),
    ("gradients_add_up_until_a_step", wrapped(Trainer, "forward", forgetful)),
    ("a_step_uses_up_the_gradients", wrapped(Trainer, "optim_step", keeping_gradients)),
    ("a_forward_adds_no_gradient", wrapped(Trainer, "forward", always_backward)),
    ("negative_weights_lower_log_probs", with_loss("cross_entropy", without_negative_weights)),
    ("what_ppo_clips_has_no_gradient", with_loss("ppo", losses._importance_sampling)),
    ("what_cispo_clips_keeps_its_gradient", with_loss("cispo", losses._ppo)),
    ("the_optimizer_takes_the_numbers_of_each_step", wrapped(Trainer, "optim_step", always("learning_rate", 1e-2))),
    ("the_optimizer_takes_the_numbers_of_each_step", wrapped(Trainer, "optim_step", always("grad_clip_norm", 0.0))),
    ("the_optimizer_takes_the_numbers_of_each_step", wrapped(Trainer, "optim_step", always("weight_decay", 0.0))),
    ("requests_run_in_the_order_of_seq_id", wrapped(Ordered, "add", at_once)),
    ("the_same_request_again_is_done_once", done_twice),
    ("samplers_have_the_weights_that_were_saved", wrapped(Trainer, "scores", of_the_base)),
    ("a_snapshot_keeps_its_weights", newest_for_all),
    ("a_sampler_in_flight_takes_new_weights", never_published),
    ("log_probs_of_samples_are_those_of_the_model", wrapped(samples, "cut", tempered)),
    ("log_probs_of_samples_are_those_of_the_model", wrapped(Sampler, "generate", with_the_base)),
    ("samples_follow_their_parameters", wrapped(samples, "numbered", lambda _, params, index: params)),
    ("samples_follow_their_parameters", wrapped(samples, "numbered", other_seed_each_time)),
    ("a_state_continues_where_it_was_saved", wrapped(Trainer, "load", without_moments)),
    ("what_is_not_there_is_refused", any_setting),
    ("what_is_not_there_is_refused", dropping_unknown_parameters),
    ("what_is_not_there_is_refused", lambda patch: patch.setattr(Service, "_check_base", lambda *_: None)),
    ("a_result_that_is_not_there_yet_says_so", ready_too_early),
]


def test_broken_servers_fail(serve: Serve, monkeypatch: Patch) -> None:
    async def scenario(server: Any) -> list[str]:
        found = []
        for name, breaking in BROKEN:
            with monkeypatch.context() as patch:
                breaking(patch)
                found.append((await states(server, [name]))[name])
        return found

    assert [each for each in serve(scenario, max_adapters=12) if not each.startswith("failed")] == []


def test_every_check_has_a_broken_server() -> None:
    assert {name for name, _ in BROKEN} == CHECKS.keys()
