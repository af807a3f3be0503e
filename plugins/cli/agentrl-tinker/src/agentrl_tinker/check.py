"""Checks of a server of the Tinker API, each of what clients rely on and a server can get wrong in silence.

Every check makes sessions and models of its own. Values are compared with what the server itself returned, so that
neither the model nor its data type matters.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx
import numpy as np

from agentrl_core.api.errors import ConfigError
from agentrl_core.plugins.boundary import described
from agentrl_tinker.bench import IDS, LINEAR, NEAR, Bench, Failed, Skipped, close, expect, row
from agentrl_tinker.client import Client, Model, SamplerClient, datum, trained
from agentrl_tinker.refusals import Refusal


@dataclass(frozen=True)
class Outcome:
    name: str
    state: Literal["passed", "failed", "skipped"]
    why: str = ""

    def __str__(self) -> str:
        return f"{self.state:8}{self.name}" + (f": {self.why}" if self.why else "")


Check = Callable[[Bench], Awaitable[None]]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


@check
async def unknown_keys_are_not_let_in(bench: Bench) -> None:
    try:
        await bench.stranger.session()
    except Refusal as refusal:
        expect(refusal.status in (401, 403), f"a key that nobody has got the status {refusal.status}")
    else:
        raise Skipped("this server lets every key in")


@check
async def keys_are_isolated(bench: Bench) -> None:
    if bench.other is None:
        raise Skipped("needs --other-key")
    model = await bench.model()
    promise = await model.send_train([row()])
    await bench.client.result(promise)
    path, sampler = await model.save("isolated"), await model.sampler()
    session = await bench.other.session()
    async with bench.refuses("get_info of a model of another key"):
        await bench.other.post("get_info", {"model_id": model.model_id})
    async with bench.refuses("the result of another key's request"):
        await bench.other.result(promise)
    async with bench.refuses("a step on a model of another key"):
        await bench.other.post("optim_step", {"model_id": model.model_id, "seq_id": model.sent + 1, "adam_params": {}})
    async with bench.refuses("sampling with a sampler of another key"):
        await SamplerClient(bench.other, sampler.sampler_id).sample(IDS, max_tokens=1)
    async with bench.refuses("a checkpoint of another key"):
        body = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": False}
        await bench.other.result(await bench.other.post("load_weights", body))


def _losses(name: str, lp: "np.ndarray[Any, Any]", q: "np.ndarray[Any, Any]", a: "np.ndarray[Any, Any]") -> float:
    """Tinker's definitions, in float64, with clip thresholds 0.9 and 1.3, and beta 1."""
    ratio = np.exp(lp - q)
    if name == "gspo":
        ratio = np.full_like(lp, np.exp((lp - q).mean()))
    clipped = np.clip(ratio, 0.9, 1.3)
    terms = {
        "importance_sampling": ratio * a, "ppo": np.minimum(ratio * a, clipped * a), "cispo": clipped * lp * a,
        "dro": lp * a - 0.5 * (lp - q) ** 2, "gspo": np.minimum(ratio * a, clipped * a),
    }  # fmt: skip
    return -float(terms[name].sum())


_SETTINGS = {"importance_sampling": {}, "dro": {"beta": 1.0}}
_THRESHOLDS = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}


def _of_loss(name: str) -> Check:
    async def values(bench: Bench) -> None:
        model = await bench.model()
        lp = (await bench.log_probs(model)).astype(np.float64)
        q = lp - np.log([0.5, 0.95, 1.0, 1.2, 2.0])
        rows, wanted = [], 0.0
        # The first has ratios on both sides of the thresholds, the second a ratio of the whole sequence above them.
        for shift in (0.0, 0.5):
            for sign in (1.0, -1.0):
                a = sign * np.array([1.0, 2.0, 0.5, 1.0, 1.5])
                mask = {"sequence_ratio_mask": [1.0] * 5} if name == "gspo" else {}
                rows.append(datum(IDS[:-1], IDS[1:], logprobs=q - shift, advantages=a, **mask))
                wanted += _losses(name, lp, q - shift, a) * (1 if sign > 0 else 2)
        rows = [each for index, each in enumerate(rows) for _ in range(1 + index % 2)]
        try:
            found = await model.train(rows, name, **_SETTINGS.get(name, _THRESHOLDS))
        except Refusal as refusal:
            raise Skipped(f"refused: {refusal}") from refusal
        close(
            found.loss / max(abs(wanted), 1.0),
            wanted / max(abs(wanted), 1.0),
            "the loss and its definition, relatively,",
            1e-2,
        )

    values.__name__ = f"loss_{name}"
    return check(values)


for _name in ("importance_sampling", "ppo", "cispo", "dro", "gspo"):
    _of_loss(_name)


@check
async def loss_cross_entropy(bench: Bench) -> None:
    model, weights = await bench.model(), [1.0, 0.0, -0.5, 2.0, 1.0]
    found = await model.train([row(weights), row()])
    wanted = -(found.log_probs[0] * np.array(weights)).sum() - found.log_probs[1].sum()
    close(found.loss / wanted, 1.0, "the loss and the weighted sum of the log-probabilities, relatively,", 1e-2)


@check
async def gradients_are_sums_over_datums(bench: Bench) -> None:
    one = await bench.moved(lambda model: model.train([row()]), learning_rate=await bench.rate() / 4)
    three = await bench.moved(lambda model: model.train([row()] * 3), learning_rate=await bench.rate() / 4)
    expect(2.3 <= three / one <= 3.9, f"three datums move the model {three / one:.2f} times as far as one, not 3 times")


@check
async def gradients_add_up_until_a_step(bench: Bench) -> None:
    together = await bench.moved(lambda model: model.train([row()] * 2))
    apart = await bench.moved(*[lambda model: model.train([row()])] * 2)
    close(apart, together, "a step after two requests and one after a request with the same data")


@check
async def a_step_uses_up_the_gradients(bench: Bench) -> None:
    once = await bench.moved(lambda model: model.train([row()]))

    async def stepped(model: Model) -> None:
        await model.train([row()])
        await model.step(learning_rate=await bench.rate(), **LINEAR)

    close(await bench.moved(stepped), once, "one step, and one followed by a step without gradients,")


@check
async def a_forward_adds_no_gradient(bench: Bench) -> None:
    close(
        await bench.moved(lambda model: model.forward([row()] * 3)),
        0.0,
        "the model before and after a forward and a step",
    )


@check
async def negative_weights_lower_log_probs(bench: Bench) -> None:
    """forward_backward_custom sends the gradient of the client's own loss as weights."""
    up = await bench.moved(lambda model: model.train([row()]), learning_rate=await bench.rate() / 4)
    down = await bench.moved(lambda model: model.train([row([-1.0] * 5)]), learning_rate=await bench.rate() / 4)
    expect(-1.6 <= down / up <= -0.6, f"weights -1 move the model {down / up:.2f} times as far as weights 1")


@check
async def what_ppo_clips_has_no_gradient(bench: Bench) -> None:
    for above, advantage in ((True, 1.0), (False, -1.0)):

        async def clipped(model: Model, above: bool = above, advantage: float = advantage) -> None:
            q = await bench.log_probs(model) - np.log(1.5 if above else 0.5)
            data = [datum(IDS[:-1], IDS[1:], logprobs=q, advantages=[advantage] * 5)]
            await model.train(data, "ppo", clip_low_threshold=0.8, clip_high_threshold=1.2)

        close(await bench.moved(clipped), 0.0, "the model before and after a step on tokens that ppo clips")


@check
async def what_cispo_clips_keeps_its_gradient(bench: Bench) -> None:
    async def clipped(model: Model) -> None:
        q = await bench.log_probs(model) - np.log(3.0)
        await model.train([datum(IDS[:-1], IDS[1:], logprobs=q, advantages=[1.0] * 5)], "cispo", **_THRESHOLDS)

    moved, plain = await bench.moved(clipped), await bench.moved(lambda model: model.train([row()]))
    expect(moved > plain * 0.8, f"tokens that cispo clips move the model by {moved:.3g}, cross_entropy by {plain:.3g}")


@check
async def the_optimizer_takes_the_numbers_of_each_step(bench: Bench) -> None:
    train: Callable[[Model], Awaitable[Any]] = lambda model: model.train([row()])  # noqa: E731
    close(await bench.moved(train, learning_rate=0.0), 0.0, "the model before and after a step with learning_rate 0")
    full = await bench.moved(train)
    clipped = await bench.moved(train, grad_clip_norm=1e-3)
    expect(abs(clipped) < 0.5 * full, f"grad_clip_norm 0.001 moves the model by {clipped:.3g}, without it {full:.3g}")
    model = await bench.model()
    before, after = await bench.log_probs(model), await bench.learned(model)
    expect(float((after - before).sum()) > 0.5, "four steps of AdamW did not raise the log-probabilities")
    # Without a gradient the step is the decay alone: it takes the adapter's second matrix back to 0.
    await model.step(learning_rate=1.0, weight_decay=1.0, **LINEAR)
    close(
        await bench.log_probs(model),
        before,
        "the base and the model after a step with learning_rate 1 and weight_decay 1",
    )


@check
async def requests_run_in_the_order_of_seq_id(bench: Bench) -> None:
    straight = await bench.model()
    await straight.train([row()])
    await straight.step(learning_rate=0.05)
    wanted = await bench.log_probs(straight)
    model = await bench.model()
    third = await model.send_train([row()], forward_only=True, seq_id=3)
    await model.send_step(seq_id=2, learning_rate=0.05)
    await model.send_train([row()], seq_id=1)
    found = trained(await bench.client.result(third)).log_probs[0]
    close(found, wanted, "log-probabilities after requests that came as 3, 2, 1 and after the same in order", 1e-2)


@check
async def the_same_request_again_is_done_once(bench: Bench) -> None:
    async def twice(model: Model) -> None:
        number = model.next()
        for promise in [await model.send_train([row()], seq_id=number) for _ in range(2)]:
            await bench.client.result(promise)

    once = await bench.moved(lambda model: model.train([row()]))
    close(await bench.moved(twice), once, "a request, and the same sent twice,")


@check
async def samplers_have_the_weights_that_were_saved(bench: Bench) -> None:
    model, base = await bench.model(), await bench.base()
    wanted = await bench.learned(model)
    for sampler in (
        await model.sampler(),
        await SamplerClient.create(bench.client, model.session_id, 900, model_path=await model.save_for_sampler("now")),
    ):
        close(
            (await sampler.score(IDS))[1:], wanted, "log-probabilities of the trainer and of a sampler with its weights"
        )
    gap = float(np.max(np.abs((await base.score(IDS))[1:] - wanted)))
    expect(gap > NEAR, "the base has the log-probabilities of a trained model")


@check
async def a_snapshot_keeps_its_weights(bench: Bench) -> None:
    model = await bench.model()
    wanted = await bench.learned(model)
    snapshot = await model.sampler()
    await snapshot.score(IDS)
    later = await bench.learned(model)
    await model.sampler()
    expect(float(np.max(np.abs(later - wanted))) > 2 * NEAR, "further steps did not change the model")
    close((await snapshot.score(IDS))[1:], wanted, "a snapshot before and after further training")


@check
async def a_sampler_in_flight_takes_new_weights(bench: Bench) -> None:
    model = await bench.model()
    await bench.learned(model)
    sampler = await model.sampler("inflight")
    wanted = await bench.learned(model)
    newer = await model.sampler("inflight")
    close((await newer.score(IDS))[1:], wanted, "the trainer and a sampler in flight that was saved after it")
    await sampler.score(IDS)


@check
async def log_probs_of_samples_are_those_of_the_model(bench: Bench) -> None:
    model = await bench.model()
    await bench.learned(model)
    sampler = await model.sampler()
    found = await sampler.sample(IDS, count=2, max_tokens=4, stop=[])
    for tokens, log_probs in zip(found.tokens, found.log_probs, strict=True):
        expect(len(tokens) == len(log_probs), "a sample has another number of log-probabilities than of tokens")
        wanted = (await sampler.score(IDS + tokens))[len(IDS) :]
        close(log_probs, wanted, "log-probabilities of a sample, and of the same tokens as a prompt,")


@check
async def samples_follow_their_parameters(bench: Bench) -> None:
    base = await bench.base()
    found = await base.sample(IDS, count=3, max_tokens=4, stop=[])
    expect(
        [len(each) for each in found.tokens] == [4] * 3, "num_samples 3, max_tokens 4 and no stops gave another shape"
    )
    expect(not any(found.stopped), "a sample that max_tokens ended has the stop_reason stop")
    greedy = [(await base.sample(IDS, max_tokens=4, temperature=0.0, stop=[])).tokens[0] for _ in range(2)]
    expect(greedy[0] == greedy[1], "temperature 0 gave two different samples")
    seeded = [await base.sample(IDS, count=2, max_tokens=8, seed=5, stop=[]) for _ in range(2)]
    expect(seeded[0].tokens == seeded[1].tokens, "the same seed gave two different samples")
    expect(seeded[0].tokens[0] != seeded[0].tokens[1], "two samples of one request with a seed are the same")
    stop = greedy[0][-1]
    ended = await base.sample(IDS, max_tokens=4, temperature=0.0, stop=[stop])
    expect(ended.tokens[0] == greedy[0][: greedy[0].index(stop) + 1], "a stop token does not end a sample")
    expect(ended.stopped == [True], "a sample that a stop token ended has the stop_reason length")
    expect(bool(np.isnan((await base.score(IDS))[0])), "the first token of a prompt has a log-probability")


@check
async def a_state_continues_where_it_was_saved(bench: Bench) -> None:
    model = await bench.model()
    await bench.learned(model)
    path = await model.save("state")
    wanted = await bench.learned(model)
    await model.load(path)
    close(await bench.learned(model), wanted, "training that went on, and training from its state,", 1e-2)
    session = await bench.session()
    body = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
    loaded = await bench.client.result(await bench.client.post("load_weights", body))
    resumed = Model(bench.client, session, loaded["model_id"])
    close(await bench.learned(resumed), wanted, "training that went on, and a new model from its state,", 1e-2)


@check
async def what_is_not_there_is_refused(bench: Bench) -> None:
    model, base = await bench.model(), await bench.base()
    async with bench.refuses("the loss 'no_such_loss'"):
        await model.train([row()], "no_such_loss")
    async with bench.refuses("the setting 'no_such_setting' of ppo"):
        data = [datum(IDS[:-1], IDS[1:], logprobs=[0.0] * 5, advantages=[0.0] * 5)]
        await model.train(data, "ppo", no_such_setting=1.0)
    async with bench.refuses("a datum with fewer weights than targets"):
        await model.train([datum(IDS[:-1], IDS[1:], weights=[1.0] * 4)])
    async with bench.refuses("an unknown number of the optimizer"):
        await model.step(no_such_number=1.0)
    async with bench.refuses("an unknown parameter of sampling"):
        await base.sample(IDS, max_tokens=1, no_such_parameter=1)
    async with bench.refuses("a model that the server does not have"):
        await Model.create(bench.client, "no/such-model", model.session_id, 7)
    # The client has counted the requests that were refused.
    await bench.log_probs(model)


@check
async def a_result_that_is_not_there_yet_says_so(bench: Bench) -> None:
    model = await bench.model()
    promise = await model.send_train([row()], seq_id=2)
    async with bench.refuses("the result of a request that waits for an earlier one"):
        await bench.client.result(promise, seconds=0)
    await model.send_train([row()], seq_id=1)
    await bench.client.result(promise)


async def _first_model(url: str, client: Client) -> str:
    try:
        return str((await client.get("get_server_capabilities"))["supported_models"][0]["model_name"])
    except Refusal as refusal:
        raise ConfigError(f"{url} answered {refusal.status}: {refusal}. Check --key, or name a --model") from refusal
    except Exception as error:
        raise ConfigError(
            f"{url} names no model: {described(error)}. Check the address, which begins with http:// or https://, or "
            "name a --model"
        ) from error


async def run_checks(
    url: str, key: str, other_key: str | None = None, base_model: str | None = None, only: Sequence[str] | None = None,
    report: Callable[[Outcome], None] = lambda _: None, transport: httpx.AsyncBaseTransport | None = None,
    unembed: bool = True,
) -> list[Outcome]:  # fmt: skip
    """Check a server.

    Args:
        base_model: None: the first one that the server names.
        only: names of :data:`CHECKS`; None: all.
        transport: of httpx, for a server in this process.
        unembed: adapters change the output layer too.

    Raises:
        ConfigError: the server cannot be asked for its models.
    """
    outcomes = []
    async with httpx.AsyncClient(base_url=url, timeout=60, transport=transport) as http:
        client, other = Client(http, key), Client(http, other_key) if other_key else None
        if base_model is None:
            base_model = await _first_model(url, client)
        stranger = Client(http, "tml-nobody-has-this-key")
        bench = Bench(client, other, stranger, str(base_model), {} if unembed else {"train_unembed": False})
        for name in only or CHECKS:
            try:
                await CHECKS[name](bench)
                outcome = Outcome(name, "passed")
            except Skipped as reason:
                outcome = Outcome(name, "skipped", str(reason))
            except (Failed, Refusal, httpx.HTTPError) as error:
                outcome = Outcome(name, "failed", str(error) or type(error).__name__)
            except Exception as error:  # noqa: BLE001 - whatever an answer of another form leads to
                outcome = Outcome(name, "failed", f"an answer of another form: {described(error)}")
            outcomes.append(outcome)
            report(outcome)
            await bench.end()
    return outcomes
