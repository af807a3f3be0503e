"""What a real vLLM that cannot start, or cannot go on, leaves behind: an error that says why, and no process."""

import asyncio
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from agentrl_core.api import EngineContext, SamplingParams, WeightUpdate
from agentrl_core.api.errors import EngineError
from agentrl_core.engine_kit.model_tensors import ModelTensors
from agentrl_engine_vllm.config import VLLMConfig
from agentrl_engine_vllm.engine import VLLMEngine

START_IN_A_SERVER = """
    import asyncio, sys
    from agentrl_core.api import EngineContext
    from agentrl_core.config.schema import EngineSlot
    from agentrl_core.plugins.resolution import resolve
    from agentrl_core.serving.server import EngineServer
    from agentrl_engine_vllm.config import VLLMConfig

    async def main(model, timeout, report):
        slot = EngineSlot("vllm", VLLMConfig(), start_timeout=float(timeout), resolved=resolve("engine", "vllm"))
        server = EngineServer(slot, EngineContext(model, max_model_len=64))
        try:
            await server.start()
        except Exception as error:
            open(report, "w").write(str(error))
        finally:
            await server.close()

    if __name__ == "__main__":
        asyncio.run(main(*sys.argv[1:]))
"""
START_AND_DIE = """
    import asyncio, multiprocessing, os, sys
    from agentrl_core.api import EngineContext
    from agentrl_engine_vllm.config import VLLMConfig
    from agentrl_engine_vllm.engine import VLLMEngine

    async def main(model, report):
        engine = VLLMEngine(VLLMConfig(), EngineContext(model, max_model_len=64))
        await engine.start()
        open(report, "w").write(" ".join(str(child.pid) for child in multiprocessing.active_children()))
        os.kill(os.getpid(), 9)

    if __name__ == "__main__":
        asyncio.run(main(*sys.argv[1:]))
"""


def run_script(text: str, folder: Path, *arguments: str) -> str:
    """What a script has reported; its output goes to a file, as that of a Ray actor does."""
    script, report = folder / "script.py", folder / "report.txt"
    script.write_text(textwrap.dedent(text))
    with (folder / "log.txt").open("w") as log:
        subprocess.run([sys.executable, script, *arguments, report], stdout=log, stderr=log, timeout=250, check=False)
    assert report.exists(), (folder / "log.txt").read_text()
    return report.read_text()


def has_ended(pid: int, seconds: float = 60) -> bool:
    waiting = ["tail", f"--pid={pid}", "-f", os.devnull]
    return subprocess.run(waiting, timeout=seconds, check=False).returncode == 0


def test_a_model_that_vllm_does_not_know_is_named(models, tmp_path) -> None:
    for source in Path(models.folder()).iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["OddForCausalLM"], "model_type": "odd"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = VLLMEngine(VLLMConfig(), EngineContext(str(tmp_path), max_model_len=64))
    with pytest.raises(Exception, match="(?i)odd"):
        asyncio.run(engine.start())


def test_an_engine_that_is_not_healthy_in_time_shows_its_last_30_lines(models, tmp_path) -> None:
    message = run_script(START_IN_A_SERVER, tmp_path, models.folder(), "12")
    head, _, lines = message.partition("The last lines of its log:\n")
    assert "not healthy after 12 s (start_timeout)" in head
    assert 0 < len(lines.splitlines()) <= 30


def test_vllm_ends_with_the_process_that_started_it(models, tmp_path) -> None:
    pids = run_script(START_AND_DIE, tmp_path, models.folder()).split()
    assert pids
    assert all(has_ended(int(pid)) for pid in pids)


def test_after_an_update_that_failed_half_way_the_engine_is_ill(models, run, monkeypatch, tmp_path) -> None:
    # Its last file is gone when a worker looks for it.
    gone = str(tmp_path / "gone.safetensors")

    async def main() -> None:
        engine = VLLMEngine(VLLMConfig(), EngineContext(models.folder(), max_model_len=64))
        await engine.start()
        monkeypatch.setattr(ModelTensors, "normalised", lambda self, update: WeightUpdate(files=(*update.files, gone)))
        with pytest.raises(EngineError, match="weights 1: (.|\n)*gone.safetensors(.|\n)* restart the vllm engine"):
            await engine.update_weights(models.files(1), 1)
        for call in (engine.health(), engine.generate([1], SamplingParams(1), "r")):
            with pytest.raises(EngineError, match="ended after an update to weights 1 that failed"):
                await call
        await engine.close()

    run(main())
