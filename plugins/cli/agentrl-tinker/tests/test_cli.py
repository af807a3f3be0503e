"""What ``agentrl tinker`` refuses before it loads anything, and the exit code of a check."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl_core.api.errors import ConfigError
from agentrl_tinker import check
from agentrl_tinker.cli import app
from agentrl_tinker.client import Model
from agentrl_tinker.refusals import Refusal


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
    result = CliRunner().invoke(app, ["serve", "--model", str(tmp_path), "--state", str(tmp_path / "s"), *given])
    with pytest.raises(ConfigError, match=message):
        raise result.exception or AssertionError(result.output)


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
