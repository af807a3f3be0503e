"""What the console shows of messages that others wrote."""

import logging

import pytest

from agentrl_core.cli._shared import console_of_stdout, new_table, set_up_logging


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich._console", None)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    monkeypatch.setattr(logging.getLogger("agentrl_core"), "level", logging.NOTSET)


def test_pip_install_keeps_its_extra_in_brackets_in_tables(capsys: pytest.CaptureFixture[str]) -> None:
    table = new_table("PACKAGE", "VERDICT")
    table.add_row("ray", "pip install 'agentrl-core[ray]'")
    console_of_stdout().print(table)
    assert "agentrl-core[ray]" in capsys.readouterr().out


def test_names_between_colons_are_no_emoji(handlers: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Servers of the Tinker API name models so."""
    set_up_logging()
    path = "tinker://0a1b:train:1/weights/age"
    logging.getLogger("agentrl_core.trainer").warning(path)
    table = new_table("STATE")
    table.add_row(path)
    console_of_stdout().print(table)
    assert capsys.readouterr().out.count(path) == 2


def test_a_long_warning_is_not_wrapped_at_80_columns_where_the_output_is_a_pipe(
    handlers: None, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logging()
    message = "the engine's log-probs differ [ray] " + "x" * 200
    logging.getLogger("agentrl_core.trainer").warning(message)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith(f" WARNING {message}")


def test_warnings_of_other_libraries_stay_out_of_the_console(
    handlers: None, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logging()
    seen: list[str] = []
    log_file = logging.Handler()
    log_file.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(log_file)
    for name in ("vllm.worker", "agentrl_engine_vllm.engine"):
        logging.getLogger(name).warning("%s is slow", name)
    logging.getLogger("vllm.worker").error("out of memory")
    shown = capsys.readouterr().out
    assert "vllm.worker is slow" not in shown and "agentrl_engine_vllm.engine is slow" in shown
    assert "out of memory" in shown and seen[0] == "vllm.worker is slow"
