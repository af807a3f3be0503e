"""`make gpu` without a GPU: what it says of parts that cannot run, of those that fail, and what it keeps."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FIGURE = {"case": "weights", "name": "wrong", "value": 2.0, "unit": "", "goal": 0.0, "at_least": False}


@pytest.fixture
def run(run_script: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: run_script("gpu.py", *arguments, CUDA_VISIBLE_DEVICES="")


@pytest.fixture(scope="module")
def gpu(import_script: Callable[[str], ModuleType]) -> ModuleType:
    return import_script("gpu")


@pytest.fixture
def run_code(gpu: ModuleType, tmp_path: Path) -> Callable[..., str]:
    """The page after a part that runs this Python, with the path of its figures as first argument."""

    def run_code(code: str, *arguments: object, seconds: float = 60) -> str:
        part = gpu.Part("A part", ("-c", code, "{json}", *map(str, arguments)), unseen="the kernels of CUDA")
        results = gpu.Results(tmp_path)
        gpu.run("part", part, results, seconds, True)
        return str(results.write_page({"part": part, "another": part}).read_text(encoding="utf-8"))

    return run_code


def test_parts_that_cannot_run_say_why_and_the_page_names_the_device(run: Callable[..., Any], tmp_path: Path) -> None:
    here = ("--vllm-python", sys.executable, "--sglang-python", "nowhere", "--output", tmp_path)
    here += ("--megatron-python", "nowhere")
    done = run("--parts", "sglang-sleep", "vllm-nccl", "vllm-ipc", "megatron", *here)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert ", CPU (" in text
    for reason in ("no interpreter ", "needs 2 CUDA devices, found 0", "needs a CUDA device"):
        assert f"Not run: {reason}" in text
    assert "(make megatron-env, or --megatron-python)" in text


@pytest.mark.parametrize(
    ("device", "command"), [("cpu", "make engines-cpu-vllm,"), ("cuda", "agentrl engines setup vllm,")]
)
def test_an_engine_that_is_missing_comes_from_the_command_for_this_device(
    gpu: ModuleType, device: str, command: str
) -> None:
    assert command in gpu.parts(device, {"vllm": Path("nowhere")})["vllm-sleep"].missing


def test_parts_of_megatron_say_what_they_lack(gpu: ModuleType, tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    assert "agentrl backends setup megatron," in gpu.parts("cuda", {"megatron": python})["megatron"].missing
    python.parent.mkdir()
    python.touch()
    parts = gpu.parts("cuda", {"megatron": python})
    assert parts["megatron"].python == str(python) and not parts["megatron"].missing
    assert parts["megatron-tensor"].missing == "needs 2 CUDA devices, found 0"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu.torch.cuda, "device_count", lambda: 2)
        parts = gpu.parts("cuda", {"megatron": python})
        assert not parts["megatron-tensor"].missing
        assert "Transformer Engine is not installed in " in parts["megatron-context"].missing
        (tmp_path / "lib/python3.11/site-packages/transformer_engine").mkdir(parents=True)
        assert not gpu.parts("cuda", {"megatron": python})["megatron-context"].missing


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_part_ends_within_eight_minutes(gpu: ModuleType, device: str) -> None:
    parts = gpu.parts(device, {"vllm": Path(sys.executable), "megatron": Path(sys.executable)})
    assert all(0 < part.limit <= 480 for part in parts.values())
    assert all(0 < part.limit <= 7 for part in gpu.parts(device, {}, 7).values())
    assert all(("--tiny" in part.command) == (device == "cpu") for part in parts.values() if part.command[0] != "-m")


def test_without_ray_what_needs_it_says_so(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    parts = gpu.parts("cuda", {"vllm": Path(sys.executable), "megatron": Path(sys.executable)})
    assert {name for name, part in parts.items() if "Ray is not installed" in part.missing} == {
        "ray", "hf-sleep", "vllm-sleep", "vllm-nccl", "vllm-ipc",
        "megatron-step", "megatron-tensor", "megatron-context",
    }  # fmt: skip
    assert parts["tests"].command[-2:] == ("-m", "not ray")


def test_a_part_that_fails_keeps_its_figures(run_code: Callable[..., str]) -> None:
    text = run_code(
        "import pathlib, sys; print('the last words'); pathlib.Path(sys.argv[1]).write_text(sys.argv[2]); sys.exit(3)",
        json.dumps({"figures": [{**FIGURE, "verdict": "miss"}]}),
    )
    assert "| part | **Failed** (exit status 3) | " in text and "the last words" in text
    assert "| weights | wrong | 2.00 | ≤ 0 | miss |" in text


def test_goals_that_are_missed_are_counted_and_a_rehearsal_says_what_it_does_not_show(
    run_code: Callable[..., str],
) -> None:
    text = run_code(
        "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])",
        json.dumps({"figures": [{**FIGURE, "verdict": "miss"}, {**FIGURE, "value": 0.0, "verdict": "pass"}]}),
    )
    assert "**Goals missed: 1**" in text
    assert "A rehearsal: the model is tiny" in text and "It does not show: the kernels of CUDA." in text


def test_a_part_whose_time_is_up_leaves_no_process(
    run_code: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not even a child of it: it would hold the memory that the next part needs."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    wait, begun = subprocess.Popen.wait, os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(begun, True)
    words = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[3], sys.argv[2]])"
    child = "import signal, sys; file = open(sys.argv[1], 'w'); file.write('begun'); file.flush(); signal.pause()"
    first = [True]

    def wait_until_it_has_begun(process: Any, timeout: float | None = None) -> int:
        if not first:
            return wait(process, timeout)
        first.clear()
        while not os.read(begun, 5):
            pass
        raise subprocess.TimeoutExpired("part", 60)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_until_it_has_begun)
    text = run_code(words, fifo, child)
    assert "| part | **Cut** after 60 s | " in text
    # The end of a pipe is seen when nobody can write to it any more.
    assert os.read(begun, 5) == b""
    os.close(begun)


def test_a_part_that_never_ended_is_on_the_page_with_its_figures(gpu: ModuleType, tmp_path: Path) -> None:
    """As when the machine is taken away."""
    part, results = gpu.Part("A part", ("-c", "")), gpu.Results(tmp_path)
    results.file("part", "json").write_text(json.dumps({"figures": [{**FIGURE, "verdict": "miss"}]}))

    class Gone(BaseException):
        pass

    def taken_away(*inputs: Any) -> int:
        results.file("part", "json").write_text(json.dumps({"figures": [{**FIGURE, "verdict": "miss"}]}))
        raise Gone

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Gone):
        patch.setattr(gpu, "_status", taken_away)
        gpu.run("part", part, results, 60, True)
    text = results.write_page({"part": part}).read_text(encoding="utf-8")
    assert "| part | **Has not ended** | 0 |" in text and "| weights | wrong | 2.00 | ≤ 0 | miss |" in text


def test_what_no_time_is_left_for_is_named_and_the_page_has_earlier_calls(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    assert run("--parts", "vllm-ipc", "--output", tmp_path).returncode == 0
    done = run("--parts", "log-probs", "local", "--within", "0", "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no time was left for: --parts log-probs local" in done.stdout
    (tmp_path / "gpu.md").unlink()
    assert run("--parts", "--output", tmp_path).returncode == 0
    text = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert "| vllm-ipc | Not run: " in text and "| local |" not in text


def test_an_unknown_part_is_named(run: Callable[..., Any]) -> None:
    done = run("--parts", "lokal")
    assert done.returncode == 2 and "--parts: lokal; allowed: log-probs, packing, fsdp" in done.stderr
