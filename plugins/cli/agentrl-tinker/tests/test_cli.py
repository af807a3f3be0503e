"""What ``agentrl tinker`` refuses before it loads anything, and the exit code of a check."""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from agentrl_core.api.errors import ConfigError, EngineError
from agentrl_tinker import check, client
from agentrl_tinker.cli import app
from agentrl_tinker.client import Client, Model
from agentrl_tinker.refusals import Refusal
from agentrl_tinker.sampler import Sampler, Weights


@pytest.mark.parametrize(
    ("keys", "options", "message"),
    [
        (None, ["--host", "0.0.0.0"], "0.0.0.0 can be reached from other machines. Name a file with the API keys"),
        ("secret\n", ["--keys", "KEYS"], "1 keys in .* do not begin with tml-"),
        ("# nothing\n\n", ["--keys", "KEYS"], "has no key"),
        (None, ["--keys", "KEYS"], "cannot be read"),
        (None, ["--engine-option", "max_num_seqs"], "is not of the form KEY=VALUE"),
        (None, ["--dtype", "int8"], "allowed: float32, bfloat16"),
        (None, ["--model", "nowhere"], "--model: 'nowhere' is not a directory"),
    ],
)
def test_options_that_cannot_work(tmp_path: Path, keys: str | None, options: list[str], message: str) -> None:
    file = tmp_path / "keys"
    if keys is not None:
        file.write_text(keys)
    given = [str(file) if each == "KEYS" else each for each in options]
    given = ["--model", str(tmp_path), "--state", str(tmp_path / "s"), "--port", "0", *given]
    result = CliRunner().invoke(app, ["serve", *given])
    with pytest.raises(ConfigError, match=message):
        raise result.exception or AssertionError(result.output)


def test_an_address_that_is_taken_is_said_before_the_model_is_loaded(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("tml-one")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for address in (["--port", port], ["--host", "no.such.host.invalid", "--keys", str(keys)]):
            result = CliRunner().invoke(app, ["serve", "--model", "nowhere", "--state", str(tmp_path / "s"), *address])
            assert "Choose another port, or an address of this machine" in str(result.exception)


def test_more_tokens_than_the_model_has_positions_are_refused(serve: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="--max-model-len: 100000 is more than the 4096 positions"):
        serve(None, max_model_len=100_000)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda _: httpx.Response(200, text="<html>"), "http://x names no model: JSONDecodeError"),
        (lambda _: httpx.Response(200, json={"supported_models": []}), "names no model: IndexError"),
        (lambda _: httpx.Response(401, json={"detail": "who?"}), "answered 401: who.. Check --key"),
        (lambda _: 1 / 0, "names no model: ZeroDivisionError.*begins with http://"),
    ],
)
def test_an_address_without_a_server_of_the_api(answer: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        asyncio.run(check.run_checks("http://x", "tml-one", transport=httpx.MockTransport(answer)))


def test_a_check_of_a_server_that_answers_in_another_form_fails_and_the_others_run() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json={"session_id": 1}))
    found = asyncio.run(check.run_checks("http://x", "tml-one", "tml-two", "m", transport=transport))
    assert len(found) == len(check.CHECKS)
    assert not [each for each in found if each.state == "passed"]
    assert any("an answer of another form: KeyError" in each.why for each in found)


def test_a_result_is_waited_for_where_the_server_answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_sleep(_: float) -> None: ...

    asked = []

    def answer(_: httpx.Request) -> httpx.Response:
        asked.append(1)
        return httpx.Response(408) if len(asked) < 100 else httpx.Response(200, json={"done": True})

    async def main() -> Any:
        async with httpx.AsyncClient(base_url="http://x", transport=httpx.MockTransport(answer)) as http:
            return await Client(http, "tml-one").result({"request_id": "r"})

    monkeypatch.setattr(client, "asyncio", SimpleNamespace(get_running_loop=asyncio.get_running_loop, sleep=no_sleep))
    assert asyncio.run(main()) == {"done": True}


def test_a_check_that_failed_is_in_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run_checks(*_: Any, report: Callable[[check.Outcome], None], **__: Any) -> list[check.Outcome]:
        found = [check.Outcome("a", "passed"), check.Outcome("b", states.pop(), "why")]
        for each in found:
            report(each)
        return found

    monkeypatch.setattr(check, "run_checks", run_checks)
    states: list[Any] = ["failed", "skipped"]
    results = [CliRunner().invoke(app, ["check", "http://x", "--key", "tml-a"]) for _ in range(2)]
    assert [each.exit_code for each in results] == [0, 1]
    unknown = CliRunner().invoke(app, ["check", "http://x", "--key", "tml-a", "--only", "no_such"])
    assert "there is no check no_such" in str(unknown.exception)


def test_a_server_whose_engine_has_no_output_layer_says_so(serve: Callable[..., Any]) -> None:
    async def scenario(server: Any) -> None:
        session = await server.one.session()
        with pytest.raises(Refusal, match="Set train_unembed=False"):
            await Model.create(server.one, server.model, session)
        await Model.create(server.one, server.model, session, 1, train_unembed=False)

    serve(scenario, unembed=False)


def test_checks_leave_the_output_layer_alone_where_they_are_told_to(serve: Callable[..., Any]) -> None:
    async def scenario(server: Any) -> None:
        only = ["samplers_have_the_weights_that_were_saved"]
        for unembed, state in ((False, "passed"), (True, "failed")):
            (outcome,) = await check.run_checks(
                "http://x", "tml-one", base_model=server.model, only=only, unembed=unembed,
                transport=httpx.ASGITransport(server.api.app),
            )  # fmt: skip
            assert outcome.state == state, str(outcome)

    serve(scenario, unembed=False)


def test_an_engine_without_adapters_of_the_output_layer_is_found_out_at_the_start(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(sampler: Any, weights: Weights) -> None:
        assert weights.shape.train_unembed and (weights.folder / "adapter_model.safetensors").is_file()
        raise EngineError("no such tensor")

    monkeypatch.setattr(Sampler, "try_out", refuse)
    with pytest.raises(
        ConfigError, match="--unembed: the engine 'hf' serves no adapters .*no such tensor.*--no-unembed"
    ):
        serve(lambda server: None)
