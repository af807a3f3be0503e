"""Attacks on what `docs/security.md` promises, where no other test makes them; and that each test it names exists."""

import asyncio
import gzip
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from agentrl_core.hosting.process_host import SAFE_VARIABLES
from agentrl_core.runs.run_dir import RunDir
from agentrl_loop_openai_agent.config import OpenAIAgentConfig
from agentrl_loop_openai_agent.server import EndpointServer
from agentrl_testing.loops import FakeSession

ROOT = Path(__file__).parents[1]
NAMED = re.findall(r"`((?:tests|plugins)/[\w/.-]+\.py)(?:::(\w+))?`", (ROOT / "docs" / "security.md").read_text())
SECRET = "hunter2-hunter2-hunter2"
Fit = Callable[..., RunDir]


def test_the_page_names_tests() -> None:
    assert len(NAMED) > 20


@pytest.mark.parametrize(("file", "test"), NAMED, ids="::".join)
def test_a_test_that_the_page_names_exists(file: str, test: str) -> None:
    assert not test or re.search(rf"def {test}\(|class {test}\b", (ROOT / file).read_text())


def test_a_new_run_directory_is_private_and_an_old_one_keeps_its_rights(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "new" / "runs", "run")
    assert run.path.stat().st_mode & 0o777 == 0o700
    run.path.chmod(0o750)
    assert RunDir.create(tmp_path / "new" / "runs", "run").path.stat().st_mode & 0o777 == 0o750


def test_a_secret_from_the_environment_is_in_no_file_of_a_run(tiny_run: Any, start_agentrl: Callable[..., Any]) -> None:
    tiny_run(
        {
            "rollout.sampling.stop": ["${oc.env:TEST_SECRET}"],
            "trainer.checkpoint": {"interval": 1},
            "trainer.trackers": ["jsonl", "tensorboard", "console"],
            "trainer.profile.steps": [2],
        }
    )
    code, output = start_agentrl("train", "config.yaml", TEST_SECRET=SECRET).wait()
    assert code == 0, output
    assert SECRET not in output
    run = RunDir(tiny_run.folder / "runs" / "tiny")
    files = [file for file in run.path.rglob("*") if file.is_file()]
    assert {"config.yaml", "plugins.lock.json", "log.txt", "trainer.json"} <= {file.name for file in files}
    assert [file for file in files if SECRET.encode() in content(file)] == []
    assert "${oc.env:TEST_SECRET}" in run.config_file.read_text()


def content(file: Path) -> bytes:
    return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()


EVIL = """
from pathlib import Path

Path({marker!r}).touch()
from transformers import Qwen3Config as Config, Qwen3ForCausalLM as Model
"""


def test_code_in_a_model_directory_does_not_run(fit: Fit, tiny_model: Path, tmp_path: Path) -> None:
    model, marker = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(tiny_model, model)
    (model / "evil.py").write_text(EVIL.format(marker=str(marker)))
    for name, classes in (
        ("config.json", {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["evil.Slow", "evil.Fast"]}),
    ):
        content = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**content, "auto_map": classes}))
    fit({"model.path": str(model), "trainer.steps": 1})
    assert not marker.exists()


def test_the_chat_endpoint_is_on_loopback_and_a_key_ends_with_its_trajectory() -> None:
    async def attack() -> tuple[set[str], list[int]]:
        before = listeners()
        server = EndpointServer(OpenAIAgentConfig(agent="json:dumps"), lambda ids: "")
        body = {"model": "policy", "messages": [{"role": "user", "content": "two"}]}
        async with httpx.AsyncClient() as client:

            async def ask(key: str) -> int:
                headers = {"authorization": f"Bearer {key}"}
                answer = await client.post(f"{server.base_url}/chat/completions", json=body, headers=headers)
                return answer.status_code

            async with server.open(FakeSession(["four", "four"]), {}) as (key, _):
                found = [await ask(key), await ask("x"), await ask(key[:-1])]
                addresses = {address for address, _ in listeners() - before}
            found.append(await ask(key))
        await server.close()
        return addresses, found

    addresses, answers = asyncio.run(asyncio.wait_for(attack(), 60))
    assert addresses == {"127.0.0.1"}
    assert answers == [200, 401, 401, 401]


def listeners() -> set[tuple[str, int]]:
    """Addresses and ports on which this process listens."""
    found: Any = psutil.Process(os.getpid()).net_connections(kind="inet")
    return {tuple(each.laddr) for each in found if each.status == psutil.CONN_LISTEN}


def test_the_page_names_every_variable_that_a_child_process_gets() -> None:
    page = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    assert [name for name in sorted(SAFE_VARIABLES) if f"`{name}`" not in page] == []
