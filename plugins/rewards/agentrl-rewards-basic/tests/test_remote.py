import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from agentrl_core.api import RewardError, RewardFunctionContext, RewardResult, RewardTrajectory
from agentrl_rewards_basic.config import RemoteConfig
from agentrl_rewards_basic.remote import Remote


class Server(http.server.ThreadingHTTPServer):
    """Gives its answers in order and keeps the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/score"
        self.answers: list[tuple[int, str]] = []
        self.requests: list[tuple[dict[str, Any], str | None]] = []
        self.ended = threading.Event()


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.requests.append((json.loads(body), self.headers["authorization"]))
        status, text = self.server.answers[len(self.server.requests) - 1]
        if not status:
            self.server.ended.wait(60)
            return
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: Any) -> None:
        """Tests read no log."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.ended.set()
        server.shutdown()


def score(server: Server, *answers: tuple[int, str], **options: Any) -> RewardResult:
    server.answers = list(answers)
    function = Remote(RemoteConfig(server.url, backoff=0.0, **options), RewardFunctionContext("remote"))
    return asyncio.run(function(RewardTrajectory([{"role": "user"}], "a", "a", "a", ground_truth="4")))


def test_an_answer_without_end_is_cut_off(server: Server) -> None:
    with pytest.raises(RewardError, match=f"in 2 attempts; the last: {server.url}: .* max_body_bytes=100. Raise this"):
        score(server, (200, "1" * 101), (200, "1" * 101), attempts=2, max_body_bytes=100)


def test_the_trajectory_is_posted_and_the_result_taken(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "s3cret")
    answer = '{"score": 0.5, "metrics": {"m": 1}, "components": {"c": 2}, "turn_rewards": [0.5], "answer": "4"}'
    assert score(server, (200, answer), token_env="REWARD_TOKEN") == RewardResult(
        0.5, {"m": 1.0}, {"c": 2.0}, [0.5], answer="4"
    )
    ((posted, authorization),) = server.requests
    assert (posted["model_text"], posted["ground_truth"], authorization) == ("a", "4", "Bearer s3cret")


def test_a_number_is_a_result_and_a_busy_server_is_asked_again(server: Server) -> None:
    assert score(server, (503, "busy"), (429, "slow"), (200, "1")).score == 1.0


def test_a_server_that_does_not_answer_is_given_up(server: Server) -> None:
    with pytest.raises(
        RewardError,
        match=rf"no score in 2 attempts; the last: {server.url}: no whole answer within attempt_timeout=0.05 s",
    ):
        score(server, (0, ""), (0, ""), attempts=2, attempt_timeout=0.05)


def test_a_request_that_the_server_rejects_is_not_repeated(server: Server) -> None:
    with pytest.raises(RewardError, match=rf"no score in 1 attempts; the last: {server.url}: status 404: no"):
        score(server, (404, "no"))


@pytest.mark.parametrize(
    "answer",
    [
        "NaN", "1e999", "1" + "0" * 400, "null", "true", '"1"', "[1]", "", "<html>", "{}", '{"score": NaN}',
        '{"score": 1, "metrics": {"m": null}}', '{"score": 1, "turn_rewards": [Infinity]}', '{"score": 1, "reward": 1}',
        "[" * 100_000,
    ],
    ids=lambda answer: answer[:20],
)  # fmt: skip
def test_a_malformed_answer_names_the_url(server: Server, answer: str) -> None:
    with pytest.raises(RewardError, match=f"{server.url} answered .* allowed are a finite number and an object"):
        score(server, (200, answer))


def test_secrets_stay_out_of_urls_and_must_be_there() -> None:
    for options, problem in [
        ({"url": "http://me:pass@host"}, "the URL holds a password"),
        ({"url": "http://host", "token_env": "NO_SUCH_TOKEN"}, "NO_SUCH_TOKEN, which is not set"),
    ]:
        with pytest.raises(ValueError, match=problem) as caught:
            Remote(RemoteConfig(**options), RewardFunctionContext("remote"))
        assert "pass@" not in str(caught.value)
