"""Every command that reads a run, with every file of it damaged in every way: a clear message, or a correct result."""

import ctypes
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from agentrl_core.cli.main import app
from agentrl_core.config import load_config
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.trainer import Trainer

Damage = Callable[[Path], Any]
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2
CHANGES: dict[str, Any] = {
    "trainer.checkpoint": {"interval": 1},
    "trainer.steps": 2,
    "data.validation_files": ["validation.jsonl"],
    "rollout.engine": {"name": "scripted"},
}


def flip(file: Path) -> None:
    """One bit in the middle; in a text the byte is then no UTF-8."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x80
    file.write_bytes(content)


def directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def loop(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


DAMAGES: dict[str, Damage] = {
    "deleted": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-20]),
    "flipped": flip,
    "directory": directory,
    "unreadable": lambda file: file.chmod(0),
    "loop": loop,
}


@contextmanager
def rights_hold() -> Iterator[None]:
    """Files without permission cannot be read, for root neither: without the capabilities that override them."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    before, less = (ctypes.c_uint32 * 6)(), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, before) == 0
    less[:] = before[:]
    less[0] &= ~(1 << _DAC_OVERRIDE | 1 << _DAC_READ_SEARCH)
    assert libc.capset(header, less) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


CHECKPOINT = [
    f"checkpoints/step-000002/{name}"
    for name in (
        "trainer.json", "checksums.json", "config.yaml", "plugins.lock.json", "actor/config.json",
        "actor/model.safetensors", "actor/tokenizer.json", "actor/training/.metadata", "actor/training/__0_0.distcp",
    )
]  # fmt: skip
ROLLOUTS, METRICS, CONFIG, STATE = "rollouts/step-000001.jsonl", "metrics.jsonl", "config.yaml", "state.json"

COMMANDS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "resume": (
        ["train", "CONFIG", "trainer.steps=3", "trainer.output_dir=RUNS", "--resume"],
        [*CHECKPOINT, STATE, METRICS, CONFIG],
        [ROLLOUTS],
    ),
    "eval": (["eval", "CONFIG", "--checkpoint", "RUN", "--output", "OUT"], CHECKPOINT, [ROLLOUTS, METRICS, STATE]),
    "export": (["export", "RUN", "OUT"], CHECKPOINT, [ROLLOUTS, METRICS, CONFIG, STATE]),
    "doctor": (["doctor", "--model", "RUN/checkpoints/latest/actor"], CHECKPOINT, [STATE]),
    "show": (["rollouts", "show", "RUN", "--step", "1", "-n", "99"], [ROLLOUTS], [METRICS, CONFIG, STATE]),
    "reward": (["reward", "replay", f"RUN/{ROLLOUTS}", "--reward", "FOLDER/rewards.py:lower"], [ROLLOUTS], [METRICS]),
    "replay": (["replay", "RUN", "--step", "1"], [ROLLOUTS, CONFIG], [METRICS]),
    "list": (["runs", "list", "RUNS"], [STATE, METRICS, CONFIG], [ROLLOUTS]),
    "compare": (["runs", "compare", "RUN", "OTHER"], [STATE, METRICS, CONFIG], [ROLLOUTS]),
    "view": (["view", "RUN", "--export", "OUT"], [ROLLOUTS, METRICS, CONFIG, STATE], CHECKPOINT[:1]),
}
"""A command's arguments, the files that it reads, and some that it does not."""
HARMLESS = {
    ("resume", STATE, "deleted"): "the checkpoint says where the run is",
    ("compare", STATE, "deleted"): "nothing in it is compared",
    ("view", ROLLOUTS, "deleted"): "trajectories may be deleted to save space",
}
"""Damage that changes no result."""
CASES = [
    pytest.param(
        command, file, how, file in reads and (command, file, how) not in HARMLESS, id=f"{command}-{file}-{how}"
    )
    for command, (_, reads, leaves) in COMMANDS.items()
    for file in (*reads, *leaves)
    for how in (DAMAGES if file in reads else ["flipped"])
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_runs_in: Callable[[Path], Any]) -> Path:
    """A folder with a configuration, and two finished runs."""
    folder = tmp_path_factory.mktemp("finished")
    config = tiny_runs_in(folder)(CHANGES)
    for name in ("tiny", "other"):
        Trainer(load_config(config, [f"trainer.name={name}"])).fit()
    return folder


@pytest.fixture
def agentrl(
    finished: Path, tmp_path: Path, installed_plugins: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Result]:
    monkeypatch.setattr("agentrl_core.plugins.resolution.registrations", installed_plugins)
    monkeypatch.setattr("rich._console", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runs = shutil.copytree(finished / "runs", tmp_path / "runs", symlinks=True)
    paths = {
        "CONFIG": finished / "config.yaml", "FOLDER": finished, "RUNS": runs, "RUN": runs / "tiny",
        "OTHER": runs / "other", "OUT": tmp_path / "out",
    }  # fmt: skip

    def run(command: str) -> Result:
        words = [re.sub(r"\b[A-Z]{3,}\b", lambda name: str(paths[name[0]]), word) for word in COMMANDS[command][0]]
        with rights_hold():
            return CliRunner().invoke(app, words, env={"COLUMNS": "300"})

    return run


def is_said(result: Result, file: str) -> bool:
    """Whether an error or a warning names the file, or the step whose file is not there."""
    if result.exit_code != 0 and "rollouts of step 1" in result.output:
        return file == ROLLOUTS
    name = Path(file).name
    lines = [line for line in result.output.splitlines() if re.search(r"\berror\b|\bwarning\b", line, re.IGNORECASE)]
    return any(name in line for line in lines) or (result.exit_code != 0 and name in result.output)


@pytest.mark.parametrize(("command", "file", "how", "matters"), CASES)
def test_damage_is_said_or_does_not_matter(
    agentrl: Callable[[str], Result], tmp_path: Path, command: str, file: str, how: str, matters: bool
) -> None:
    run = RunDir(tmp_path / "runs" / "tiny")
    DAMAGES[how](run.path / file)
    result = agentrl(command)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    assert "Traceback" not in result.output
    assert is_said(result, file) == matters, result.output
    if not matters:
        assert result.exit_code == 0, result.output
    if result.exit_code != 0:
        assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_whole_is_no_damage(agentrl: Callable[[str], Result], tmp_path: Path, command: str) -> None:
    result = agentrl(command)
    assert result.exit_code == 0, result.output
    assert not re.search("damaged|is missing|holds no row|is not as", result.output), result.output
    if command == "resume":
        run = RunDir(tmp_path / "runs" / "tiny")
        assert [row["step"] for row in run.read_metrics()] == [0, 1, 2, 3]
        assert json.loads(run.state_file.read_text())["first_metrics"] == 0
